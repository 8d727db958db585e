"""The attention network: MLPs on both sets of points, and attention of each query point to its neighbours."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pointproj.nn.mlp import MLP
from pointproj.nn.projector import (
    CloudEncoding,
    CloudNetwork,
    as_predicted,
    first_mlp,
    known_of_queries,
    last_mlp,
)
from pointproj.nn.rows import take_rows
from pointproj.ops.attention import attend
from pointproj.ops.neighbor_lists import Neighbors
from pointproj.ops.specification.reference import safe_sqrt

PLACE_CHANNELS = 4  # displacement (3), distance


class AttentionProjector(CloudNetwork):
    """A network that carries features from a cloud onto query points by learned attention.

    A first MLP computes a key and a value for each reference point. A second MLP computes a query for each
    query point, which attends to the ``k`` nearest reference points. A linear layer on their relative
    positions gives a bias, which is added to the logits. The input of a third MLP is the result of the
    attention and the position of the nearest reference point. Lengths are in units of the distance to the
    k-th neighbour, so one set of weights serves clouds of any density.

    Parameters
    ----------
    k : int
        Neighbours of a query point.
    heads : int
        Heads of the attention.
    hidden_channels : int
        Width of all layers, a multiple of ``heads``.
    in_channels : int
        Channels of ``features`` in :meth:`forward`; 3 if the points themselves are the features.
    out_channels : int
        Channels of the result.
    query_channels, pool, blocks : int, bool, int
        As for :class:`pointproj.Projector`.
    predicts : {"value", "distance", "signed_distance"}
        As for :class:`pointproj.Projector`, with the distance of the nearest reference point.
    backend : str
        Implementation of the operators, see :func:`pointproj.backends`.

    Raises
    ------
    ValueError
        If the width is not a multiple of the heads, or for another ``predicts``.
    """

    def __init__(
        self,
        *,
        k: int = 16,
        heads: int = 4,
        hidden_channels: int = 32,
        in_channels: int = 3,
        out_channels: int = 1,
        query_channels: int = 0,
        pool: bool = False,
        blocks: int = 0,
        predicts: str = "value",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if hidden_channels % heads:
            raise ValueError(
                f"expected hidden_channels to be a multiple of {heads} heads, got {hidden_channels}"
            )
        self.k, self.heads, self.predicts, self.pool, self.backend = k, heads, predicts, pool, backend
        self.reference_mlp = first_mlp(in_channels, hidden_channels, 2 * hidden_channels, blocks)
        self.query = MLP(query_channels or 3, hidden_channels, hidden_channels)
        self.bias = nn.Linear(PLACE_CHANNELS, heads)
        channels = (1 + pool) * hidden_channels + PLACE_CHANNELS + query_channels
        self.query_mlp = last_mlp(channels, hidden_channels, out_channels, predicts, blocks)

    def decode(
        self,
        query_points: Float[Tensor, "*batch q 3"],
        encoding: CloudEncoding,
        *,
        query_features: Float[Tensor, "*batch q c"] | None = None,
    ) -> Float[Tensor, "*batch q out"]:
        """Evaluate the network at query points: see :meth:`pointproj.Projector.decode`."""
        reference_points, hidden, _ = encoding
        if query_points.dim() < reference_points.dim():
            query_points = query_points.expand(reference_points.shape[0], -1, -1)
        distances, rows = self._nearest(query_points, encoding, self.k)
        neighbors = Neighbors(rows, distances)
        rows = rows.clamp(min=0)  # queries that are not finite have rows -1; any row will do for them
        places = self._places(query_points, reference_points, distances, rows)
        keys, values = hidden.chunk(2, dim=-1)
        queries = self.query(query_points if query_features is None else query_features)
        settings = {"heads": self.heads, "bias": self.bias(places), "backend": self.backend}
        attended = attend(queries, keys.to(queries.dtype), values.to(queries.dtype), neighbors, **settings)
        known = known_of_queries(query_points, query_features, values if self.pool else None)
        predicted = self.query_mlp(torch.cat([attended, places[..., 0, :], *known], dim=-1))
        if self.predicts == "value":
            return predicted
        away = take_rows(reference_points, rows[..., 0]) - query_points
        return as_predicted(predicted, safe_sqrt(away.square().sum(-1, keepdim=True)), self.predicts)

    def _places(
        self, query_points: Tensor, reference_points: Tensor, distances: Tensor, rows: Tensor
    ) -> Float[Tensor, "*batch q k 4"]:
        """Return displacements and distances to the neighbours, in units of the farthest; no gradients."""
        with torch.no_grad():
            neighbors = take_rows(reference_points, rows)
            unit = distances[..., -1:, None].clamp(min=torch.finfo(distances.dtype).tiny)
            return torch.cat([neighbors - query_points[..., None, :], distances[..., None]], dim=-1) / unit

    def extra_repr(self) -> str:
        """The network's arguments, for ``print(model)``."""
        return f"k={self.k}, heads={self.heads}, backend={self.backend}"

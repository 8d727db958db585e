"""The pairs network: edge networks from a cloud onto query points, at two scales."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pointproj.nn.edge_mlp import EdgeMLP
from pointproj.nn.projector import (
    CloudEncoding,
    CloudNetwork,
    as_predicted,
    first_mlp,
    known_of_queries,
    last_mlp,
)
from pointproj.nn.rows import take_rows
from pointproj.ops.neighbor_lists import Neighbors
from pointproj.ops.specification.reference import safe_sqrt

PLACE_CHANNELS = 4  # displacement (3), distance
SCALES = 2


class PairsProjector(CloudNetwork):
    """A network that carries features from a cloud onto query points by an MLP on every pair.

    A first MLP runs on the reference points. For each query point, a second runs on the pairs with its ``k``
    nearest reference points, and a third on those with its ``wide * k`` nearest, of which it takes every
    ``wide``-th; both are averaged (:func:`pointproj.edge_mlp`). The input of the last MLP is both results and
    the position of the nearest reference point. Lengths are as they are given: points belong into a cube of
    size 2.

    Parameters
    ----------
    k : int
        Neighbours of a query point at each scale.
    wide : int
        How many times as many neighbours the larger scale spans.
    hidden_channels : int
        Width of all layers, at most 512.
    in_channels : int
        Channels of ``features`` in :meth:`forward`; 3 if the points themselves are the features.
    out_channels : int
        Channels of the result.
    query_channels, pool, blocks : int, bool, int
        As for :class:`pointproj.Projector`.
    predicts : {"value", "distance", "signed_distance"}
        As for :class:`pointproj.Projector`, with the distance of the nearest reference point.
    backend : str
        Implementation of the search, see :func:`pointproj.backends`. The edge networks run on the fastest
        that has them here.
    """

    def __init__(
        self,
        *,
        k: int = 8,
        wide: int = 4,
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
        self.k, self.wide, self.predicts, self.pool, self.backend = k, wide, predicts, pool, backend
        self.reference_mlp = first_mlp(in_channels, hidden_channels, hidden_channels, blocks)
        self.scales = nn.ModuleList(
            EdgeMLP(
                nn.Sequential(
                    nn.Linear(hidden_channels + PLACE_CHANNELS + query_channels, hidden_channels),
                    nn.GELU(),
                    nn.Linear(hidden_channels, hidden_channels),
                ),
                with_distance=True,
            )
            for _ in range(SCALES)
        )
        channels = (SCALES + pool) * hidden_channels + PLACE_CHANNELS + query_channels
        self.query_mlp = last_mlp(channels, hidden_channels, out_channels, predicts, blocks)

    def decode(
        self,
        query_points: Float[Tensor, "*batch q 3"],
        encoding: CloudEncoding,
        *,
        query_features: Float[Tensor, "*batch q c"] | None = None,
    ) -> Float[Tensor, "*batch q out"]:
        """Evaluate the network at query points: see :meth:`pointproj.Projector.decode`."""
        reference_points, features, _ = encoding
        if query_points.dim() < reference_points.dim():
            query_points = query_points.expand(reference_points.shape[0], -1, -1)
        count = min(self.k * self.wide, reference_points.shape[-2])
        distances, rows = self._nearest(query_points, encoding, count)
        lists = (slice(0, self.k), slice(None, None, self.wide))
        points = query_points, reference_points
        carried = [
            scale(
                features,
                *points,
                Neighbors(rows[..., part], distances[..., part]),
                query_features=query_features,
            )
            for scale, part in zip(self.scales, lists, strict=True)
        ]
        # Queries that are not finite have rows -1; any row will do for them.
        away = take_rows(reference_points, rows[..., 0].clamp(min=0)) - query_points
        distance = safe_sqrt(away.square().sum(-1, keepdim=True))
        known = known_of_queries(query_points, query_features, features if self.pool else None)
        predicted = self.query_mlp(torch.cat([*carried, away, distance, *known], dim=-1))
        return predicted if self.predicts == "value" else as_predicted(predicted, distance, self.predicts)

    def extra_repr(self) -> str:
        """The network's arguments, for ``print(model)``."""
        return f"k={self.k}, wide={self.wide}, backend={self.backend}"

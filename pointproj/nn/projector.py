"""The network: an MLP on the reference points, aggregation onto the query points, a second MLP on these."""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pointproj.nn.context import CONTEXT_CHANNELS, Aggregate, aggregate_with_context
from pointproj.nn.mlp import MLP
from pointproj.ops.functional import Index, build_index, knn_aggregate, radius_aggregate

# What an output means: the channels that the last MLP has for it. See as_predicted.
PREDICTED_CHANNELS = {"value": 1, "distance": 1, "signed_distance": 2}


class CloudEncoding(NamedTuple):
    """Result of :meth:`Projector.encode`; any number of queries can be decoded from it."""

    reference_points: Float[Tensor, "*batch n 3"]
    features: Float[Tensor, "*batch n hidden"]  # of the first MLP
    index: Index | None  # None: built where it is needed


class Projector(nn.Module):
    """A network that aggregates learned features of a point cloud onto query points.

    Features of the reference points come from a first MLP, are aggregated onto each query point with the
    weights ``exp(-distance / sigma)`` over its neighbours, and go through a second MLP there. Without
    context the second MLP sees the aggregated features alone, so it cannot know how far away the cloud is.
    With context it also sees, from the same aggregation,

    - the displacement from the query point to the weighted mean of its neighbours,
    - the soft distance, which is that displacement's length,
    - the spread of the neighbours, their weighted standard deviation about that mean,
    - has_neighbour: 1, or 0 where no reference point lies within the radius (all else is 0 there).

    After ``.half()`` or ``.bfloat16()`` the MLPs run in that dtype; points stay in single precision.

    Parameters
    ----------
    kind : {"knn", "radius"}
        Neighbours are the ``k`` nearest reference points, or all within ``radius``.
    k : int
        Neighbours of a query point, for ``kind="knn"``.
    radius : float or None
        Cut-off in the unit of the points, for ``kind="radius"``.
    sigma : float
        Softmax temperature in the unit of the points.
    in_channels : int
        Channels of ``features`` in :meth:`forward`; 3 where the points themselves are the features.
    hidden_channels : int
        Width of both MLPs.
    out_channels : int
        Channels of the result.
    context : bool
        Whether the second MLP sees displacement, soft distance, spread and has_neighbour.
    predicts : {"value", "distance", "signed_distance"}
        What the second MLP's output means: see :func:`as_predicted`.
    backend : str
        Implementation of the operators, see :func:`pointproj.backends`.

    Raises
    ------
    ValueError
        For another ``kind`` or ``predicts``, ``kind="radius"`` without a radius, or a distance without
        ``context``.
    """

    def __init__(
        self,
        *,
        kind: str = "knn",
        k: int = 7,
        radius: float | None = None,
        sigma: float = 0.02,
        in_channels: int = 3,
        hidden_channels: int = 25,
        out_channels: int = 1,
        context: bool = False,
        predicts: str = "value",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if kind not in ("knn", "radius"):
            raise ValueError(f"expected kind 'knn' or 'radius', got {kind!r}")
        if kind == "radius" and radius is None:
            raise ValueError("kind='radius' needs a radius, got None; give radius in the unit of the points")
        self.kind = kind
        self.k = k
        self.radius = radius
        self.sigma = sigma
        self.context = context
        self.predicts = predicts
        self.backend = backend
        self.reference_mlp = MLP(in_channels, hidden_channels, hidden_channels)
        query_channels = hidden_channels + (CONTEXT_CHANNELS if context else 0)
        self.query_mlp = last_mlp(query_channels, hidden_channels, out_channels, predicts)
        if predicts != "value" and not context:
            raise ValueError(f"predicts={predicts!r} begins with the soft distance, which needs context=True")

    def encode(
        self,
        reference_points: Float[Tensor, "*batch n 3"],
        features: Float[Tensor, "*batch n c"] | None = None,
        *,
        index: Index | None = None,
    ) -> CloudEncoding:
        """Compute once what all queries share: the features from the first MLP, and the search structure.

        Parameters
        ----------
        reference_points : (N, 3) or (B, N, 3) float tensor
            The cloud, or a batch of clouds.
        features : (N, C) or (B, N, C) float tensor, optional
            What the first MLP sees; the reference points themselves by default.
        index : Index, optional
            From :func:`pointproj.build_index` on these reference points. None: it is built here.

        Returns
        -------
        CloudEncoding
            For :meth:`decode`.
        """
        if index is None:
            index = build_index(reference_points, radius=self.radius, backend=self.backend)
        return CloudEncoding(reference_points, self._hidden(reference_points, features), index)

    def decode(
        self,
        query_points: Float[Tensor, "*batch q 3"],
        encoding: CloudEncoding,
        *,
        neighbor_indices: Int[Tensor, "*batch q k"] | None = None,
    ) -> Float[Tensor, "*batch q out"]:
        """Evaluate the network at query points; a large set may be given in parts.

        Parameters
        ----------
        query_points : (Q, 3) or (B, Q, 3) float tensor
            Where the result is wanted; (Q, 3) beside a batch of clouds means the same points for every cloud.
        encoding : CloudEncoding
            From :meth:`encode`.
        neighbor_indices : (Q, k) or (B, Q, k) integer tensor, optional
            From :func:`pointproj.knn` on these points, with ``kind="knn"``: nothing is searched then.

        Returns
        -------
        (Q, out) or (B, Q, out) float tensor
        """
        reference_points, hidden, index = encoding
        if query_points.dim() < reference_points.dim():
            query_points = query_points.expand(reference_points.shape[0], -1, -1)
        aggregate = self._aggregation(query_points, reference_points, index, neighbor_indices)
        if not self.context:
            return self.query_mlp(aggregate(hidden))

        hidden, *context = aggregate_with_context(aggregate, query_points, reference_points, hidden)
        predicted = self.query_mlp(torch.cat([hidden, *context], dim=-1))
        return as_predicted(predicted, context[1], self.predicts)

    def forward(
        self,
        query_points: Float[Tensor, "*batch q 3"],
        reference_points: Float[Tensor, "*batch n 3"],
        *,
        features: Float[Tensor, "*batch n c"] | None = None,
        index: Index | None = None,
        neighbor_indices: Int[Tensor, "*batch q k"] | None = None,
    ) -> Float[Tensor, "*batch q out"]:
        """Encode the cloud and decode the query points: see :meth:`encode` and :meth:`decode`."""
        # No index for a single call: some backends then build for both sets of points at once.
        hidden = self._hidden(reference_points, features)
        encoding = CloudEncoding(reference_points, hidden, index)
        return self.decode(query_points, encoding, neighbor_indices=neighbor_indices)

    def _hidden(self, reference_points: Tensor, features: Tensor | None) -> Tensor:
        return self.reference_mlp(reference_points if features is None else features)

    def _aggregation(
        self,
        query_points: Tensor,
        reference_points: Tensor,
        index: Index | None,
        neighbor_indices: Tensor | None,
    ) -> Aggregate:
        shared = {"sigma": self.sigma, "index": index, "backend": self.backend}
        if self.kind == "knn":
            shared["neighbor_indices"] = neighbor_indices
            return partial(knn_aggregate, query_points, reference_points, k=self.k, **shared)
        if neighbor_indices is not None:
            raise ValueError("neighbor_indices are for kind='knn'; this projector has kind='radius'")
        return partial(radius_aggregate, query_points, reference_points, radius=self.radius, **shared)

    def extra_repr(self) -> str:
        """The network's arguments, for ``print(model)``."""
        neighbors = f"k={self.k}" if self.kind == "knn" else f"radius={self.radius}"
        extras = f"context={self.context}, predicts={self.predicts}"
        return f"kind={self.kind}, {neighbors}, sigma={self.sigma}, {extras}, backend={self.backend}"


def as_predicted(
    output: Float[Tensor, "*batch q m"], soft_distance: Float[Tensor, "*batch q 1"], predicts: str
) -> Float[Tensor, "*batch q out"]:
    """Give the output m of the last MLP, with ``out * PREDICTED_CHANNELS[predicts]`` channels, its meaning.

    A value is m itself. A distance is soft distance + m. A signed distance is (1 + m_1) * soft distance +
    m_2, so that the sign is one number to learn. Distances are in the dtype of the soft distance, also under
    autocast.
    """
    if predicts == "value":
        return output
    output = output.to(soft_distance.dtype)
    if predicts == "distance":
        return soft_distance + output
    scale, shift = output.chunk(2, dim=-1)
    return (1 + scale) * soft_distance + shift


def last_mlp(in_channels: int, hidden_channels: int, out_channels: int, predicts: str) -> MLP:
    """The MLP whose output :func:`as_predicted` takes: at first a predicted distance is the soft distance.

    ``ValueError`` for another ``predicts``.
    """
    if predicts not in PREDICTED_CHANNELS:
        raise ValueError(f"expected predicts {', '.join(PREDICTED_CHANNELS)}, got {predicts!r}")
    mlp = MLP(in_channels, hidden_channels, out_channels * PREDICTED_CHANNELS[predicts])
    if predicts != "value":
        nn.init.zeros_(mlp[-1].weight)
        nn.init.zeros_(mlp[-1].bias)
    return mlp

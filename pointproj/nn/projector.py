"""The network: an MLP on the reference points, aggregation onto the query points, and a second MLP there."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pointproj.nn.context import CONTEXT_CHANNELS, Aggregate, aggregate_with_context
from pointproj.nn.mlp import MLP, GatedMLP
from pointproj.nn.pretrained import Pretrained
from pointproj.ops.functional import Index, build_index, knn, knn_aggregate, radius_aggregate

FIRST_SIGMA = 0.1  # of a learned sigma with the k nearest neighbours, in the unit of the points

# Channels of the last MLP for each output channel, by what the output means. See as_predicted.
PREDICTED_CHANNELS = {"value": 1, "distance": 1, "signed_distance": 2}


class CloudEncoding(NamedTuple):
    """Result of :meth:`CloudNetwork.encode`; any number of queries can be decoded from it."""

    reference_points: Float[Tensor, "*batch n 3"]
    features: Float[Tensor, "*batch n hidden"]  # of the first MLP
    index: Index | None  # None: each operator builds its own


class CloudNetwork(Pretrained):
    """A network with ``reference_mlp`` on the reference points; ``decode`` carries its result to queries."""

    def encode(
        self,
        reference_points: Float[Tensor, "*batch n 3"],
        features: Float[Tensor, "*batch n c"] | None = None,
        *,
        index: Index | None = None,
    ) -> CloudEncoding:
        """Compute what all queries share: the features from the first MLP, and the search structure.

        Parameters
        ----------
        reference_points : (N, 3) or (B, N, 3) float tensor
            The cloud, or a batch of clouds.
        features : (N, C) or (B, N, C) float tensor, optional
            Input of the first MLP; by default the reference points themselves.
        index : Index, optional
            Result of :func:`pointproj.build_index` for these reference points; by default it is built here.

        Returns
        -------
        CloudEncoding
            Argument of :meth:`decode`.
        """
        if index is None:
            index = self._build_index(reference_points)
        return CloudEncoding(reference_points, self._hidden(reference_points, features), index)

    def forward(
        self,
        query_points: Float[Tensor, "*batch q 3"],
        reference_points: Float[Tensor, "*batch n 3"],
        *,
        features: Float[Tensor, "*batch n c"] | None = None,
        query_features: Float[Tensor, "*batch q c"] | None = None,
        index: Index | None = None,
    ) -> Float[Tensor, "*batch q out"]:
        """Encode the cloud and decode the query points: see :meth:`encode` and ``decode``."""
        encoding = self.encode(reference_points, features, index=index)
        return self.decode(query_points, encoding, query_features=query_features)

    def _hidden(self, reference_points: Tensor, features: Tensor | None) -> Tensor:
        return self.reference_mlp(reference_points if features is None else features)

    def _build_index(self, reference_points: Tensor) -> Index:
        return build_index(reference_points, backend=self.backend)

    def _nearest(self, query_points: Tensor, encoding: CloudEncoding, k: int) -> tuple[Tensor, Tensor]:
        """Return distances and rows of the nearest reference points, without gradients."""
        points = query_points.detach(), encoding.reference_points.detach()
        return knn(*points, k, index=encoding.index, backend=self.backend)


class Projector(CloudNetwork):
    """A network that aggregates learned features of a point cloud onto query points.

    A first MLP computes features of the reference points. They are aggregated onto each query point with the
    weights ``exp(-distance / sigma)`` of its neighbours. A second MLP computes the result from the aggregated
    features. Without context these are its only input, so it cannot know how far away the cloud is. With
    context, the same aggregation gives it further inputs:

    - the displacement from the query point to the weighted mean of its neighbours,
    - the soft distance, which is the length of the displacement,
    - the spread, which is the weighted standard deviation of the neighbours about their mean,
    - has_neighbour: 1, or 0 if no reference point lies within the radius; then the others are 0 too.

    After ``.half()`` or ``.bfloat16()`` the MLPs run in that dtype; points stay in single precision.

    Parameters
    ----------
    kind : {"knn", "radius"}
        Neighbours are the ``k`` nearest reference points, or all within ``radius``.
    k : int
        Neighbours of a query point, for ``kind="knn"``.
    radius : float or None
        Largest distance of a neighbour, in the unit of the points, for ``kind="radius"``.
    scales : sequence of float, optional
        Several ``k`` or radii instead of one. The second MLP gets the aggregation at each of them.
    sigma : float or "learned"
        Softmax temperature in the unit of the points. A learned one begins with :data:`FIRST_SIGMA`, or a
        third of the radius, and is a parameter of the network, one for each scale.
    in_channels : int
        Channels of ``features`` in :meth:`forward`; 3 if the points themselves are the features.
    hidden_channels : int
        Width of both MLPs.
    out_channels : int
        Channels of the result.
    query_channels : int
        Channels of ``query_features`` in :meth:`forward`, which are further inputs of the second MLP.
    pool : bool
        Whether the mean over the cloud of the features from the first MLP is an input of the second one too.
    blocks : int
        If not 0, :class:`pointproj.nn.mlp.GatedMLP` takes the place of both MLPs: the second one has this
        many blocks, the first one has one block.
    context : bool
        Whether displacement, soft distance, spread and has_neighbour are inputs of the second MLP.
    predicts : {"value", "distance", "signed_distance"}
        Meaning of the second MLP's output: see :func:`as_predicted`.
    backend : str
        Implementation of the operators, see :func:`pointproj.backends`.

    Raises
    ------
    ValueError
        For another ``kind`` or ``predicts``; for ``kind="radius"`` without a radius; for a ``k`` that is no
        whole number; or if a distance is predicted without ``context``.
    """

    def __init__(
        self,
        *,
        kind: str = "knn",
        k: int = 7,
        radius: float | None = None,
        scales: Sequence[float] | None = None,
        sigma: float | str = 0.02,
        in_channels: int = 3,
        hidden_channels: int = 25,
        out_channels: int = 1,
        query_channels: int = 0,
        pool: bool = False,
        blocks: int = 0,
        context: bool = False,
        predicts: str = "value",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if kind not in ("knn", "radius"):
            raise ValueError(f"expected kind 'knn' or 'radius', got {kind!r}")
        if kind == "radius" and radius is None and not scales:
            raise ValueError("kind='radius' needs a radius, got None; give radius in the unit of the points")
        self.kind = kind
        self.scales = tuple(scales or [k if kind == "knn" else radius])
        if kind == "knn":
            if any(int(scale) != scale for scale in self.scales):
                raise ValueError(f"expected whole numbers k for kind='knn', got scales={self.scales}")
            self.scales = tuple(int(scale) for scale in self.scales)
        self.learns_sigma = sigma == "learned"
        if self.learns_sigma:
            first = [FIRST_SIGMA if kind == "knn" else scale / 3 for scale in self.scales]
            self.log_sigma = nn.Parameter(torch.tensor(first).log())
        else:
            self.sigma = sigma
        self.context = context
        self.predicts = predicts
        self.backend = backend
        self.pool = pool
        width = hidden_channels
        self.reference_mlp = first_mlp(in_channels, width, width, blocks)
        query_channels += len(self.scales) * (hidden_channels + (CONTEXT_CHANNELS if context else 0))
        if pool:
            query_channels += hidden_channels
        self.query_mlp = last_mlp(query_channels, hidden_channels, out_channels, predicts, blocks)
        if predicts != "value" and not context:
            raise ValueError(f"predicts={predicts!r} begins with the soft distance, which needs context=True")

    def decode(
        self,
        query_points: Float[Tensor, "*batch q 3"],
        encoding: CloudEncoding,
        *,
        query_features: Float[Tensor, "*batch q c"] | None = None,
        neighbor_indices: Int[Tensor, "*batch q k"] | None = None,
    ) -> Float[Tensor, "*batch q out"]:
        """Evaluate the network at query points; many points may be given in several calls.

        Parameters
        ----------
        query_points : (Q, 3) or (B, Q, 3) float tensor
            Points to evaluate at. With a batch of clouds, (Q, 3) means the same points for every cloud.
        encoding : CloudEncoding
            Result of :meth:`encode`.
        query_features : (Q, C) or (B, Q, C) float tensor, optional
            What is known of the query points, such as their normals; needed with ``query_channels``.
        neighbor_indices : (Q, k) or (B, Q, k) integer tensor, optional
            Result of :func:`pointproj.knn` for these points; for ``kind="knn"`` only, with the largest
            ``k``. Without it, the neighbours are searched.

        Returns
        -------
        (Q, out) or (B, Q, out) float tensor
            The predicted values.

        Raises
        ------
        ValueError
            If ``neighbor_indices`` are given to a projector of ``kind="radius"``.
        """
        reference_points, hidden, index = encoding
        if query_points.dim() < reference_points.dim():
            query_points = query_points.expand(reference_points.shape[0], -1, -1)
        known = known_of_queries(query_points, query_features, hidden if self.pool else None)
        at_scales = self._aggregations(query_points, reference_points, index, neighbor_indices)
        if not self.context:
            return self.query_mlp(_joined([*(aggregate(hidden) for aggregate in at_scales), *known]))

        parts = [
            aggregate_with_context(aggregate, query_points, reference_points, hidden)
            for aggregate in at_scales
        ]
        predicted = self.query_mlp(_joined([*itertools.chain(*parts), *known]))
        return as_predicted(predicted, parts[0][2], self.predicts)

    def forward(
        self,
        query_points: Float[Tensor, "*batch q 3"],
        reference_points: Float[Tensor, "*batch n 3"],
        *,
        features: Float[Tensor, "*batch n c"] | None = None,
        query_features: Float[Tensor, "*batch q c"] | None = None,
        index: Index | None = None,
        neighbor_indices: Int[Tensor, "*batch q k"] | None = None,
    ) -> Float[Tensor, "*batch q out"]:
        """Encode the cloud and decode the query points: see :meth:`encode` and :meth:`decode`."""
        # A single call builds no index itself: some backends are faster when they get both sets of points.
        if index is None and len(self.scales) > 1:
            index = self._build_index(reference_points)
        encoding = CloudEncoding(reference_points, self._hidden(reference_points, features), index)
        known = {"query_features": query_features, "neighbor_indices": neighbor_indices}
        return self.decode(query_points, encoding, **known)

    def _build_index(self, reference_points: Tensor) -> Index:
        radius = max(self.scales) if self.kind == "radius" else None
        return build_index(reference_points, radius=radius, backend=self.backend)

    def _aggregations(
        self,
        query_points: Tensor,
        reference_points: Tensor,
        index: Index | None,
        neighbor_indices: Tensor | None,
    ) -> Iterator[Aggregate]:
        """Yield the aggregation of each scale; all share one index, and with ``kind="knn"`` one search."""
        points, shared = (query_points, reference_points), {"index": index, "backend": self.backend}
        if self.kind == "radius" and neighbor_indices is not None:
            raise ValueError("neighbor_indices are for kind='knn'; this projector has kind='radius'")
        if len(self.scales) > 1 and self.kind == "knn" and neighbor_indices is None:
            _, neighbor_indices = knn(*(each.detach() for each in points), max(self.scales), **shared)
        sigmas = self.log_sigma.exp() if self.learns_sigma else itertools.repeat(self.sigma)
        for scale, sigma in zip(self.scales, sigmas, strict=False):
            if self.kind == "radius":
                yield partial(radius_aggregate, *points, radius=scale, sigma=sigma, **shared)
                continue
            rows = None if neighbor_indices is None else neighbor_indices[..., :scale]
            yield partial(knn_aggregate, *points, k=scale, sigma=sigma, neighbor_indices=rows, **shared)

    def extra_repr(self) -> str:
        """The network's arguments, for ``print(model)``."""
        name = "k" if self.kind == "knn" else "radius"
        neighbors = f"scales={list(self.scales)}" if len(self.scales) > 1 else f"{name}={self.scales[0]}"
        sigma = "learned" if self.learns_sigma else self.sigma
        extras = f"context={self.context}, predicts={self.predicts}"
        return f"kind={self.kind}, {neighbors}, sigma={sigma}, {extras}, backend={self.backend}"


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def known_of_queries(
    query_points: Float[Tensor, "*batch q 3"],
    query_features: Float[Tensor, "*batch q c"] | None,
    pooled: Float[Tensor, "*batch n hidden"] | None,
) -> list[Float[Tensor, "*batch q channels"]]:
    """Return what the last MLP gets beside what is carried: the query's features, and the mean of a cloud."""
    known = [] if query_features is None else [query_features]
    if pooled is not None:
        known.append(pooled.mean(-2, keepdim=True).expand(*query_points.shape[:-1], -1))
    return known


def as_predicted(
    output: Float[Tensor, "*batch q m"], soft_distance: Float[Tensor, "*batch q 1"], predicts: str
) -> Float[Tensor, "*batch q out"]:
    """Compute the prediction from the output m of the last MLP.

    m has ``out * PREDICTED_CHANNELS[predicts]`` channels. A value is m itself. A distance is soft distance +
    m. A signed distance is (1 + m_1) * soft distance + m_2, so that one number decides the sign. Distances
    are in the dtype of the soft distance, also under autocast.
    """
    if predicts == "value":
        return output
    output = output.to(soft_distance.dtype)
    if predicts == "distance":
        return soft_distance + output
    scale, shift = output.chunk(2, dim=-1)
    return (1 + scale) * soft_distance + shift


def first_mlp(in_channels: int, hidden_channels: int, out_channels: int, blocks: int) -> nn.Module:
    """Make the MLP on the reference points; for a network with gated blocks it has one of them."""
    shape = in_channels, hidden_channels, out_channels
    return GatedMLP(*shape, 1) if blocks else MLP(*shape)


def last_mlp(
    in_channels: int, hidden_channels: int, out_channels: int, predicts: str, blocks: int = 0
) -> nn.Module:
    """Make the MLP for :func:`as_predicted`, initialised so that a predicted distance is the soft distance.

    Raises ValueError for another ``predicts``.
    """
    if predicts not in PREDICTED_CHANNELS:
        raise ValueError(f"expected predicts {', '.join(PREDICTED_CHANNELS)}, got {predicts!r}")
    shape = in_channels, hidden_channels, out_channels * PREDICTED_CHANNELS[predicts]
    mlp = GatedMLP(*shape, blocks) if blocks else MLP(*shape)
    if predicts != "value":
        last = mlp.last if blocks else mlp[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    return mlp

"""The network: an MLP on the reference points, aggregation onto the query points, an MLP there."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pointproj.ops import Index, build_index, knn_aggregate, radius_aggregate

CONTEXT_CHANNELS = 6  # displacement (3), soft distance, spread, has_neighbour


class MLP(nn.Sequential):
    """Three linear layers with ReLU between them.

    Parameters
    ----------
    in_channels, hidden_channels, out_channels : int
        Widths: in -> hidden -> hidden -> out.
    """

    def __init__(self, in_channels: int, hidden_channels: int, out_channels: int) -> None:
        super().__init__(
            nn.Linear(in_channels, hidden_channels),
            nn.ReLU(),
            nn.Linear(hidden_channels, hidden_channels),
            nn.ReLU(),
            nn.Linear(hidden_channels, out_channels),
        )


class CloudEncoding(NamedTuple):
    """What :meth:`Projector.encode` knows of a cloud; any number of queries can be decoded from it."""

    reference_points: Float[Tensor, "*batch n 3"]
    features: Float[Tensor, "*batch n hidden"]  # of the first MLP
    index: Index


class Projector(nn.Module):
    """Carry what a network learns on a point cloud onto query points.

    Features of the reference points come from a first MLP, are aggregated onto each query point with the
    weights ``exp(-distance / sigma)`` over its neighbours, and go through a second MLP there. Without
    context the second MLP sees the aggregated features alone, so it cannot know how far away the cloud is.
    With context it also sees, from the same aggregation,

    - the displacement from the query point to the weighted mean of its neighbours,
    - the soft distance, which is that displacement's length,
    - the spread of the neighbours, their weighted standard deviation about that mean,
    - has_neighbour: 1, or 0 where no reference point lies within the radius (all else is 0 there).

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
    hidden_channels, out_channels : int
        Width of both MLPs, and of the result.
    context : bool
        Whether the second MLP sees displacement, soft distance, spread and has_neighbour.
    predicts : {"value", "distance", "signed_distance"}
        What the second MLP's output m means. A value is m itself. A distance is soft distance + m. A signed
        distance is (1 + m_1) * soft distance + m_2, so that the sign is one number to learn. Both distances
        begin as the soft distance, before training.
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
        sigma: float = 0.1,
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
        if predicts not in ("value", "distance", "signed_distance"):
            raise ValueError(f"expected predicts 'value', 'distance' or 'signed_distance', got {predicts!r}")
        if predicts != "value" and not context:
            raise ValueError(f"predicts={predicts!r} begins with the soft distance, which needs context=True")
        self.kind = kind
        self.k = k
        self.radius = radius
        self.sigma = sigma
        self.context = context
        self.predicts = predicts
        self.backend = backend
        self.reference_mlp = MLP(in_channels, hidden_channels, hidden_channels)
        query_channels = hidden_channels + (CONTEXT_CHANNELS if context else 0)
        predicted_channels = out_channels * (2 if predicts == "signed_distance" else 1)
        self.query_mlp = MLP(query_channels, hidden_channels, predicted_channels)
        if predicts != "value":
            nn.init.zeros_(self.query_mlp[-1].weight)
            nn.init.zeros_(self.query_mlp[-1].bias)

    def encode(
        self,
        reference_points: Float[Tensor, "*batch n 3"],
        features: Float[Tensor, "*batch n c"] | None = None,
        *,
        index: Index | None = None,
    ) -> CloudEncoding:
        """Do once what all queries share: the first MLP and the search structure.

        Parameters
        ----------
        reference_points : (N, 3) or (B, N, 3) float tensor
            The cloud, or a batch of clouds.
        features : (N, C) or (B, N, C) float tensor, optional
            What the first MLP sees; the reference points themselves by default.
        index : Index, optional
            Result of :func:`pointproj.build_index` on these reference points; built here without.

        Returns
        -------
        CloudEncoding
            For :meth:`decode`.
        """
        if index is None:
            index = build_index(reference_points, radius=self.radius, backend=self.backend)
        hidden = self.reference_mlp(reference_points if features is None else features)
        return CloudEncoding(reference_points, hidden, index)

    def decode(
        self, query_points: Float[Tensor, "*batch q 3"], encoding: CloudEncoding
    ) -> Float[Tensor, "*batch q out"]:
        """Evaluate the network at query points; a large set may be given in parts.

        Parameters
        ----------
        query_points : (Q, 3) or (B, Q, 3) float tensor
            Where the result is wanted; (Q, 3) beside a batch of clouds means the same points for every cloud.
        encoding : CloudEncoding
            From :meth:`encode`.

        Returns
        -------
        (Q, out) or (B, Q, out) float tensor
        """
        reference_points, hidden, index = encoding
        if query_points.dim() < reference_points.dim():
            query_points = query_points.expand(reference_points.shape[0], -1, -1)
        if not self.context:
            return self.query_mlp(self._aggregate(query_points, reference_points, hidden, index))

        hidden, *context = self._with_context(query_points, reference_points, hidden, index)
        predicted = self.query_mlp(torch.cat([hidden, *context], dim=-1))
        if self.predicts == "value":
            return predicted
        soft_distance = context[1]
        predicted = predicted.to(soft_distance.dtype)
        if self.predicts == "distance":
            return soft_distance + predicted
        scale, shift = predicted.chunk(2, dim=-1)
        return (1 + scale) * soft_distance + shift

    def forward(
        self,
        query_points: Float[Tensor, "*batch q 3"],
        reference_points: Float[Tensor, "*batch n 3"],
        *,
        features: Float[Tensor, "*batch n c"] | None = None,
        index: Index | None = None,
    ) -> Float[Tensor, "*batch q out"]:
        """Encode the cloud and decode the query points: see :meth:`encode` and :meth:`decode`."""
        return self.decode(query_points, self.encode(reference_points, features, index=index))

    def _with_context(
        self, query_points: Tensor, reference_points: Tensor, features: Tensor, index: Index
    ) -> list[Tensor]:
        """Aggregate once; return features, displacement, soft distance, spread and has_neighbour."""
        dtype = torch.promote_types(features.dtype, reference_points.dtype)
        squared_norm = reference_points.square().sum(-1, keepdim=True)
        moments = torch.cat([reference_points, squared_norm, torch.ones_like(squared_norm)], dim=-1)
        carried = torch.cat([features.to(dtype), moments.to(dtype)], dim=-1)
        aggregated = self._aggregate(query_points, reference_points, carried, index)
        features, mean, mean_square, has_neighbour = aggregated.split([features.shape[-1], 3, 1, 1], dim=-1)
        displacement = mean - has_neighbour * query_points
        # E|q|^2 - |E q|^2 can round to below 0.
        variance = (mean_square - mean.square().sum(-1, keepdim=True)).clamp(min=0)
        soft_distance = _safe_sqrt(displacement.square().sum(-1, keepdim=True))
        return [features, displacement, soft_distance, _safe_sqrt(variance), has_neighbour]

    def _aggregate(
        self, query_points: Tensor, reference_points: Tensor, features: Tensor, index: Index
    ) -> Tensor:
        shared = {"sigma": self.sigma, "index": index, "backend": self.backend}
        if self.kind == "knn":
            return knn_aggregate(query_points, reference_points, features, self.k, **shared)
        return radius_aggregate(query_points, reference_points, features, self.radius, **shared)

    def extra_repr(self) -> str:
        """What the operators were told, for ``print(model)``."""
        reach = f"k={self.k}" if self.kind == "knn" else f"radius={self.radius}"
        extras = f"context={self.context}, predicts={self.predicts}"
        return f"kind={self.kind}, {reach}, sigma={self.sigma}, {extras}, backend={self.backend}"


def _safe_sqrt(squared: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Square root whose gradient is 0 (not infinite) at 0."""
    apart = squared > 0
    return torch.where(apart, torch.where(apart, squared, 1.0).sqrt(), 0.0)

"""The visibility network, for reconstruction: its input is what points see of the outside."""

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pointproj.nn.context import aggregate_with_context
from pointproj.nn.pretrained import Pretrained
from pointproj.nn.projector import as_predicted, last_mlp
from pointproj.nn.visibility.attention import SideAttention, full_precision
from pointproj.nn.visibility.constants import Cloud, Disk, Ray, SightLine
from pointproj.nn.visibility.disk_grid import DiskGrid
from pointproj.nn.visibility.rays import soft_visibility
from pointproj.nn.visibility.sight_lines import nearest_sight_lines
from pointproj.nn.visibility.surface import NEIGHBORS, find_surface
from pointproj.ops.functional import Index, build_index, knn, knn_aggregate

LINES = 2  # closeness of the nearest line of sight, and of the nearest one that has come far
SEEN = 2 * Ray.FEATURES  # shares of rays and their square roots, which distinguish few rays from none


class VisibilityEncoding(NamedTuple):
    """Result of :meth:`VisibilityNetwork.encode`; any number of queries can be decoded from it."""

    points: Float[Tensor, "b n 3"]
    places: Float[Tensor, "b n p"]  # see :class:`pointproj.nn.visibility.attention.SideAttention`
    sides: Float[Tensor, "b n 2 channels"]
    grid: DiskGrid
    index: Index
    batched: bool


class VisibilityNetwork(Pretrained):
    """Tell inside from outside by what points and the sides of their neighbours see of the outside.

    1. Each reference point gets the plane of its face, and a disk in this plane. The disk covers the holes
       between samples, and ends at edges. In a cloud with noise, the point is moved onto the plane.
    2. Rays start from both sides of each disk and from each query point; each ray escapes or is stopped by
       a disk. This is the only information about what is far away. All other information is local, so the
       network learns from few shapes.
    3. The sides of each reference point attend to the sides of its neighbours, a given number of times.
    4. Each query point attends to the sides of the nearest reference points. Its own visibility is a part of
       the input of this attention. An MLP gives the result.

    Lengths are in units of the holes between samples, so one set of weights serves clouds of any density. If
    a scanner gives the direction to the sensor of each point, lines of sight tell which side is outside and
    which space is free. Weights trained on clouds with and without sensors can be used for both.

    Under autocast, the inner layers of attention run in low precision; positions and visibility do not.

    Parameters
    ----------
    hidden_channels : int
        Width of all layers, a multiple of 8.
    neighbors : int
        Reference points that a point attends to, at least 13; each reference point is its own first
        neighbour. A cloud needs at least 33 points, and at least this many.
    rounds : int
        How often the sides of reference points attend to each other.
    in_channels : int
        Channels of ``features`` without those of the sensors; 0 for none.
    sensors : bool
        Whether ``features`` have three more channels at the end: unit vectors from the points to the sensors
        that saw them, 0 for a point whose sensor is unknown.
    out_channels : int
        Channels of the result.
    predicts : {"value", "distance", "signed_distance"}
        As for :class:`pointproj.Projector`.
    backend : str
        Implementation of the searches, see :func:`pointproj.backends`. Visibility is always computed by Warp.

    Raises
    ------
    ValueError
        For a width that is not a multiple of 8, too few neighbours, or another ``predicts``.
    """

    def __init__(
        self,
        *,
        hidden_channels: int = 16,
        neighbors: int = 13,
        rounds: int = 1,
        in_channels: int = 0,
        sensors: bool = False,
        out_channels: int = 1,
        predicts: str = "value",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if neighbors <= Disk.HOLE_NEIGHBOR:
            raise ValueError(f"expected at least {Disk.HOLE_NEIGHBOR + 1} neighbours, got {neighbors}")
        self.neighbors = neighbors
        self.predicts = predicts
        self.backend = backend
        self.sensors = sensors
        width = hidden_channels
        lines = LINES * sensors
        self.side = nn.Linear(2 * SEEN + 3 + in_channels + 2 * sensors + lines, width)
        among = partial(SideAttention, width, width, width, own_normals=True, sensors=sensors)
        self.rounds = nn.ModuleList(among() for _ in range(rounds))
        self.near = SideAttention(SEEN + lines, width, width, sensors=sensors)
        self.query_mlp = last_mlp(width + SEEN + lines, 2 * width, out_channels, predicts)
        if predicts != "value":
            self.log_sigma = nn.Parameter(torch.tensor(Cloud.UNIT / 4).log())

    def encode(
        self,
        reference_points: Float[Tensor, "*batch n 3"],
        features: Float[Tensor, "*batch n c"] | None = None,
        *,
        index: Index | None = None,
    ) -> VisibilityEncoding:
        """Compute what all queries share: see :meth:`pointproj.Projector.encode`.

        ``features`` are further inputs for each point. With ``sensors``, no features means unknown sensors.
        Raises TypeError if ``reference_points`` are not in the network's dtype.
        """
        if reference_points.dtype != (dtype := self.side.weight.dtype):
            raise TypeError(
                f"expected reference_points in the network's dtype {dtype}, got {reference_points.dtype}; "
                f"for half precision keep both in float32 and call the network under torch.autocast"
            )
        batched = reference_points.dim() == 3
        if not batched:
            reference_points = reference_points[None]
            features = None if features is None else features[None]
            index = None  # the index of a single cloud does not fit a batch of one cloud
        if index is None:
            index = build_index(reference_points, backend=self.backend)
        if features is None:
            features = reference_points.new_zeros(*reference_points.shape[:2], 3 * self.sensors)
        features, sensors = features.tensor_split((features.shape[-1] - 3 * self.sensors,), dim=-1)
        with full_precision(reference_points):
            k = max(self.neighbors, NEIGHBORS)
            distances, rows = self._nearest(reference_points, reference_points, index, k)
            surface = find_surface(reference_points.detach(), distances, rows, sensors)
            on_planes = reference_points + surface.shift
            places = torch.cat([on_planes, surface.normals, surface.holes, sensors], dim=-1)
            outwards = torch.stack([surface.normals, -surface.normals], dim=2)
            beside = on_planes[:, :, None] + (Disk.BESIDE + surface.noise[..., None]) * outwards
            seen = _seen_from(beside.flatten(1, 2), surface.grid).unflatten(1, (-1, 2))
            noise = (surface.noise / surface.holes).clamp(max=1)
            known = torch.cat([surface.fit, surface.exact_fit, noise, features], dim=-1)
            known = [seen, seen.flip(2), known[:, :, None].expand(-1, -1, 2, -1)]
            if self.sensors:
                facing = (outwards * sensors[:, :, None]).sum(-1, keepdim=True)
                is_known = sensors.square().sum(-1, keepdim=True)
                passing = _passing(beside.flatten(1, 2), places).unflatten(1, (-1, 2))
                known += [facing, is_known[:, :, None].expand_as(facing), passing]
            sides = self.side(torch.cat(known, dim=-1))
        twice = rows[..., : self.neighbors].repeat_interleave(2, dim=1)
        among = beside.flatten(1, 2), places, twice, outwards.flatten(1, 2)
        for attend in self.rounds:
            sides = sides + attend(sides.flatten(1, 2), sides, *among).unflatten(1, (-1, 2))
        return VisibilityEncoding(reference_points, places, sides, surface.grid, index, batched)

    def decode(
        self, query_points: Float[Tensor, "*batch q 3"], encoding: VisibilityEncoding
    ) -> Float[Tensor, "*batch q out"]:
        """Evaluate the network at query points: see :meth:`pointproj.Projector.decode`."""
        reference_points, places, sides, grid, index, batched = encoding
        if query_points.dim() == 2:
            query_points = query_points.expand(places.shape[0], -1, -1)
        with full_precision(query_points):
            _, rows = self._nearest(query_points, reference_points, index, self.neighbors)
            seen = _seen_from(query_points, grid)
            if self.sensors:
                seen = torch.cat([seen, _passing(query_points, places)], dim=-1)
        near = self.near(seen, sides, query_points, places, rows)
        predicted = self.query_mlp(torch.cat([near, seen], dim=-1))
        if self.predicts != "value":
            soft_distance = self._soft_distance(query_points, reference_points, rows, index)
            predicted = as_predicted(predicted, soft_distance, self.predicts)
        return predicted if batched else predicted[0]

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

    def _nearest(
        self, query_points: Tensor, reference_points: Tensor, index: Index, k: int
    ) -> tuple[Float[Tensor, "b q k"], Tensor]:
        """Return distances and rows of the nearest reference points, without gradients."""
        where = query_points.detach(), reference_points.detach()
        return knn(*where, k, index=index, backend=self.backend)

    def _soft_distance(
        self, query_points: Tensor, reference_points: Tensor, rows: Tensor, index: Index
    ) -> Float[Tensor, "b q 1"]:
        """Return the distance to the weighted mean of the nearest reference points."""
        where = query_points, reference_points
        with full_precision(query_points):
            shared = {"sigma": self.log_sigma.exp(), "index": index, "backend": self.backend}
            aggregate = partial(knn_aggregate, *where, k=self.neighbors, neighbor_indices=rows, **shared)
            return aggregate_with_context(aggregate, *where, reference_points[..., :0])[2]

    def extra_repr(self) -> str:
        """The network's arguments, for ``print(model)``."""
        return f"neighbors={self.neighbors}, predicts={self.predicts}, backend={self.backend}"


def _seen_from(points: Float[Tensor, "b q 3"], grid: DiskGrid) -> Float[Tensor, "b q 8"]:
    seen = soft_visibility(points, grid)
    return torch.cat([seen, seen.sqrt()], dim=-1)


def _passing(points: Float[Tensor, "b q 3"], places: Float[Tensor, "b n 10"]) -> Float[Tensor, "b q 2"]:
    """Return how close lines of sight pass by: 1 for a line through the point, 0 if no line is near."""
    samples, _, holes, sensors = places.tensor_split((3, 6, 7), dim=-1)
    hole = holes.mean((1, 2))
    near = nearest_sight_lines(points, samples, sensors, hole * sensors.flatten(1).any(1))
    return torch.exp(-near / (SightLine.NEARLY * hole[:, None, None]))

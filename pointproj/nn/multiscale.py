"""A network for reconstruction: features on grids of several scales, refined, evaluated at any points."""

import math
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pointproj.nn.attention import NeighborAttention, full_precision
from pointproj.nn.context import CONTEXT_CHANNELS, aggregate_with_context
from pointproj.nn.mlp import MLP
from pointproj.nn.planes import local_planes
from pointproj.nn.projector import PREDICTED_CHANNELS, as_predicted, begin_at_soft_distance
from pointproj.nn.refinement import GridRefinement, cell_centres, trilinear
from pointproj.nn.widest_path import widest_path
from pointproj.ops.functional import Index, build_index, knn, knn_aggregate, radius_aggregate

RADIUS_IN_CELLS = 1.5  # radius of a level's projection, in cells of that level
NEAREST_LEVEL = 1  # the level that is also shown the nearest points, however far they are
NEAREST = 4
PLANE_CHANNELS = 4  # normal (3) and fit
FINER = 2  # cells of the flood for each of the finest grid, along an axis
FLOOD_CHANNELS = 4 * FINER**3
UNIT = 0.05  # displacements between neighbours are measured in it; about the spacing of 4,096 points


class GridEncoding(NamedTuple):
    """Result of :meth:`Multiscale.encode`; any number of queries can be decoded from it."""

    reference_points: Float[Tensor, "b n 3"]
    normals: Float[Tensor, "b n 3"]
    features: Float[Tensor, "b n channels"]  # of the reference points, with those of the grid there
    grid: Float[Tensor, "b side**3 grid_channels"]
    index: Index
    batched: bool


class Multiscale(nn.Module):
    """Aggregate a cloud onto grids of several scales, refine them together, and decode at any points.

    1. For each reference point, the plane through it and most of its neighbours is found
       (:func:`pointproj.nn.planes.local_planes`). Wherever a point attends to neighbours, its distances to
       their planes are among the inputs. On flat pieces these are exact, between samples and on boards of any
       thickness.
    2. Each reference point attends to its neighbours, twice. The resulting features describe the surface
       around it.
    3. These features are aggregated onto grids, the levels; each has half as many cells a side as the one
       before. Every level gets all points within a radius proportional to its cells; the second level gets
       the nearest points too. One index serves all of this. Each aggregation has a learned sigma of its own
       and the context of :func:`pointproj.nn.context.aggregate_with_context`.
    4. Each cell of the finest grid also gets the width of the widest path to it from outside
       (:func:`pointproj.nn.widest_path.widest_path`), computed on a grid of half the cells' width. What is
       enclosed depends on the whole cloud, which convolutions alone learn only from many examples.
    5. A U-Net over the levels combines what is far apart, to tell which side of a surface is enclosed. It
       needs no normals.
    6. Each reference point interpolates the refined grid on both sides of its plane and attends to its
       neighbours again. For a query point, an MLP gets the refined grid interpolated there, attention to the
       nearest reference points, and their aggregated features with context.

    Under autocast the U-Net and the inner layers of attention run in low precision. Positions do not, because
    low precision would lose the small differences between the two sides of a thin wall.

    Parameters
    ----------
    side : int
        Cells a side of the finest grid; a multiple of ``2**(levels - 1)``.
    levels : int
        Grids; the side of each is half of that before.
    hidden_channels : int
        Width of everything at points, a multiple of 8.
    grid_channels : int
        Width of the finest grid, a multiple of 8; each coarser one has twice that of the one before.
    neighbors : int
        Neighbours that a point attends to, at least 3; a reference point itself is the first of its own.
    in_channels : int
        Channels of ``features`` beside the points, 0 for none.
    out_channels : int
        Channels of the result.
    predicts : {"value", "distance", "signed_distance"}
        As for :class:`pointproj.Projector`.
    backend : str
        Implementation of the operators, see :func:`pointproj.backends`.

    Raises
    ------
    ValueError
        For a side that cannot be halved that often, a width that is not a multiple of 8, too few
        neighbours, or another ``predicts``.
    """

    def __init__(
        self,
        *,
        side: int = 16,
        levels: int = 3,
        hidden_channels: int = 16,
        grid_channels: int = 16,
        neighbors: int = 8,
        in_channels: int = 0,
        out_channels: int = 1,
        predicts: str = "value",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if side % 2 ** (levels - 1):
            raise ValueError(f"expected a side that can be halved {levels - 1} times, got {side}")
        if neighbors < 3:
            raise ValueError(f"expected at least 3 neighbours, which a plane goes through, got {neighbors}")
        if predicts not in PREDICTED_CHANNELS:
            raise ValueError(f"expected predicts {', '.join(PREDICTED_CHANNELS)}, got {predicts!r}")
        self.sides = [side // 2**level for level in range(levels)]
        self.neighbors = neighbors
        self.predicts = predicts
        self.backend = backend
        among = {"unit": UNIT, "own_planes": True}
        self.surface = NeighborAttention(PLANE_CHANNELS + in_channels, hidden_channels, **among)
        self.around = NeighborAttention(hidden_channels, hidden_channels, **among)
        self.carried = nn.Linear(hidden_channels, grid_channels)
        projected = grid_channels + CONTEXT_CHANNELS
        self.by_radius = nn.ModuleList(nn.Linear(projected, grid_channels) for _ in self.sides)
        self.by_nearest = nn.Linear(projected, grid_channels)
        self.radius_log_sigma = nn.Parameter(
            torch.tensor([math.log(self._cell(side)) for side in self.sides])
        )
        self.nearest_log_sigma = nn.Parameter(torch.tensor(math.log(UNIT)))
        self.query_log_sigma = nn.Parameter(torch.tensor(math.log(UNIT / 4)))
        self.flood = nn.Linear(FLOOD_CHANNELS, grid_channels)
        self.refine = GridRefinement(grid_channels, grid_channels, levels)
        self.reference_mlp = MLP(hidden_channels + 2 * grid_channels, hidden_channels, hidden_channels)
        self.agreed = NeighborAttention(hidden_channels, hidden_channels, **among)
        self.near = NeighborAttention(hidden_channels, hidden_channels, unit=UNIT)
        predicted_channels = out_channels * PREDICTED_CHANNELS[predicts]
        self.query_mlp = MLP(
            grid_channels + 2 * hidden_channels + CONTEXT_CHANNELS, 2 * hidden_channels, predicted_channels
        )
        if predicts != "value":
            begin_at_soft_distance(self.query_mlp)
        for level, cells in enumerate(self.sides):
            self.register_buffer(f"centres_{level}", cell_centres(cells), persistent=False)
        self.register_buffer("flood_centres", cell_centres(FINER * side), persistent=False)

    def encode(
        self,
        reference_points: Float[Tensor, "*batch n 3"],
        features: Float[Tensor, "*batch n c"] | None = None,
        *,
        index: Index | None = None,
    ) -> GridEncoding:
        """Do once what all queries share: everything but the last step.

        Parameters
        ----------
        reference_points : (N, 3) or (B, N, 3) float tensor
            The cloud, or a batch of clouds, in the query cube; at least ``neighbors`` points each.
        features : (N, C) or (B, N, C) float tensor, optional
            What else is known of the points.
        index : Index, optional
            Result of :func:`pointproj.build_index` on these reference points; built here without.

        Returns
        -------
        GridEncoding
            For :meth:`decode`.
        """
        batched = reference_points.dim() == 3
        if not batched:
            reference_points = reference_points[None]
            features = None if features is None else features[None]
            index = None  # one of a single cloud does not fit a batch of one
        if index is None:
            radius = RADIUS_IN_CELLS * self._cell(self.sides[0])
            index = build_index(reference_points, radius=radius, backend=self.backend)
        with full_precision(reference_points):
            distances, rows = self._nearest(reference_points, reference_points, self.neighbors, index)
            normals, fit = local_planes(reference_points, rows, UNIT)
            known = torch.cat([normals, fit] if features is None else [normals, fit, features], dim=-1)
        among = reference_points, reference_points, normals
        surface = self.surface(*among, known, rows, normals)
        surface = surface + self.around(*among, surface, rows, normals)
        with full_precision(reference_points):
            carried = self.carried(surface)
            levels = [
                self._project(level, reference_points, carried, index) for level in range(len(self.sides))
            ]
            spacing = distances[..., -1].mean(dim=1)
            levels[0] = levels[0] + self._flooded(reference_points, spacing, index)
        grid = self.refine(levels).flatten(2).mT.to(surface.dtype)
        with full_precision(reference_points):
            beside = self._cell(self.sides[0]) / 2 * normals
            both = reference_points + beside, reference_points - beside
            seen = [trilinear(grid, side, self.sides[0]) for side in both]
            hidden = self.reference_mlp(torch.cat([surface, *seen], dim=-1))
        hidden = hidden + self.agreed(*among, hidden, rows, normals)
        return GridEncoding(reference_points, normals, hidden, grid, index, batched)

    def decode(
        self, query_points: Float[Tensor, "*batch q 3"], encoding: GridEncoding
    ) -> Float[Tensor, "*batch q out"]:
        """Evaluate the network at query points; a large set may be given in parts.

        Parameters
        ----------
        query_points : (Q, 3) or (B, Q, 3) float tensor
            Where the result is wanted; (Q, 3) beside a batch of clouds means the same points for every cloud.
        encoding : GridEncoding
            From :meth:`encode`.

        Returns
        -------
        (Q, out) or (B, Q, out) float tensor
        """
        reference_points, normals, hidden, grid, index, batched = encoding
        if query_points.dim() == 2:
            query_points = query_points.expand(reference_points.shape[0], -1, -1)
        with full_precision(query_points):
            _, rows = self._nearest(query_points, reference_points, self.neighbors, index)
        near = self.near(query_points, reference_points, normals, hidden, rows)
        with full_precision(query_points):
            seen = trilinear(grid, query_points, self.sides[0])
            where = query_points, reference_points
            shared = {"sigma": self.query_log_sigma.exp(), "index": index, "backend": self.backend}
            aggregate = partial(knn_aggregate, *where, k=self.neighbors, neighbor_indices=rows, **shared)
            carried, *context = aggregate_with_context(aggregate, *where, hidden)
            parts = [seen, near, carried, *_scaled(context, UNIT)]
            predicted = self.query_mlp(torch.cat(parts, dim=-1))
            predicted = as_predicted(predicted, context[1], self.predicts)
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

    def _project(
        self, level: int, reference_points: Tensor, features: Tensor, index: Index
    ) -> Float[Tensor, "b grid_channels s s s"]:
        """Carry the reference points' features onto the cells of one level."""
        side = self.sides[level]
        cell = self._cell(side)
        where = self._centres(level, reference_points), reference_points
        sigma = self.radius_log_sigma[level].exp()
        shared = {"index": index, "backend": self.backend}
        aggregate = partial(radius_aggregate, *where, radius=RADIUS_IN_CELLS * cell, sigma=sigma, **shared)
        carried, *context = aggregate_with_context(aggregate, *where, features)
        projected = self.by_radius[level](torch.cat([carried, *_scaled(context, cell)], dim=-1))
        if level == min(NEAREST_LEVEL, len(self.sides) - 1):
            sigma = self.nearest_log_sigma.exp()
            aggregate = partial(knn_aggregate, *where, k=NEAREST, sigma=sigma, **shared)
            carried, *context = aggregate_with_context(aggregate, *where, features)
            projected = projected + self.by_nearest(torch.cat([carried, *_scaled(context, cell)], dim=-1))
        return projected.mT.unflatten(-1, (side,) * 3)

    def _flooded(
        self, reference_points: Tensor, spacing: Float[Tensor, " b"], index: Index
    ) -> Float[Tensor, "b grid_channels s s s"]:
        """Features of the paths from outside, for the cells of the finest level."""
        side = FINER * self.sides[0]
        cell = self._cell(side)
        centres = self.flood_centres.to(reference_points.dtype).expand(len(reference_points), -1, -1)
        distances, _ = self._nearest(centres, reference_points, 1, index)
        distance = distances.view(-1, side, side, side)
        width = widest_path(distance, side)
        spacing = spacing.view(-1, 1, 1, 1).expand_as(distance)
        # Lengths from 0 to infinity as numbers from 0 to 1, finest where they are about the unit.
        pairs = [(distance, cell), (width, cell), (width, spacing), (spacing, cell)]
        lengths = torch.stack([length / (length + unit) for length, unit in pairs], dim=1)
        for axis in range(3):  # the fine cells within each cell of the grid become its channels
            lengths = lengths.unflatten(2 + 2 * axis, (-1, FINER)).movedim(3 + 2 * axis, 1)
        return self.flood(lengths.flatten(1, 4).movedim(1, -1)).movedim(-1, 1)

    def _centres(self, level: int, reference_points: Tensor) -> Float[Tensor, "b side**3 3"]:
        centres = getattr(self, f"centres_{level}").to(reference_points.dtype)
        return centres.expand(reference_points.shape[0], -1, -1)

    def _nearest(
        self, query_points: Tensor, reference_points: Tensor, k: int, index: Index
    ) -> tuple[Float[Tensor, "b q k"], Int[Tensor, "b q k"]]:
        """Distances and rows of the nearest reference points; which these are has no gradient."""
        where = query_points.detach(), reference_points.detach()
        return knn(*where, k, index=index, backend=self.backend)

    @staticmethod
    def _cell(side: int) -> float:
        return 2 / side

    def extra_repr(self) -> str:
        """The network's arguments, for ``print(model)``."""
        arguments = f"sides={self.sides}, neighbors={self.neighbors}, predicts={self.predicts}"
        return f"{arguments}, backend={self.backend}"


def _scaled(context: list[Tensor], unit: float) -> list[Tensor]:
    """Context with its lengths in another unit."""
    displacement, soft_distance, spread, has_neighbour = context
    return [displacement / unit, soft_distance / unit, spread / unit, has_neighbour]

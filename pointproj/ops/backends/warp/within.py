"""Aggregation over all points within a radius: nothing is listed, nothing truncated.

The forward visits the reference points near each query and keeps a running softmax. Gradients that belong
to reference points are gathered by the transposed search, over the queries near each reference point, so
that no two threads ever add to one place.
"""

from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from pointproj.ops.backends.warp.row_sums import divide
from pointproj.ops.backends.warp.tiles import tile_shape
from pointproj.ops.backends.warp.within_positions import position_kernel
from pointproj.ops.backends.warp.within_sums import aggregate_kernel, gather_kernel
from pointproj.ops.backends.warp.within_tiles import aggregate_tiles, launch_tiles
from pointproj.ops.backends.warp.wrapped import WrappedCells, build_wrapped_cells, places_of
from pointproj.ops.bridge.warp_op import Launch, warp_op
from pointproj.ops.gradients import DIFFERENTIABLE, fill_second_backward
from pointproj.ops.pairs import chunks_within, largest_square_within
from pointproj.ops.registry import Clouds


def aggregate_within(
    clouds: Clouds, cells: WrappedCells | None, features: Tensor, sigma: Tensor, radius: float
) -> Tensor:
    """Weighted mean of the features within ``radius``: ``(Q, C)`` in their dtype."""
    points = clouds.detached()
    queries = points.query_points, points.query_offsets
    needs_queries = features.is_cuda or features.requires_grad or clouds.reference_points.requires_grad
    both = cells is None and needs_queries
    if cells is None:
        references = points.reference_points, points.reference_offsets, points.count
        cells = build_wrapped_cells(*references, radius, *(queries if both else (None, None)))
    tables = [*cells]
    if needs_queries and not both:
        tables = [*tables, *build_wrapped_cells(*queries, points.count, radius)]
    return _aggregate(*clouds, tables, both, features, sigma, radius)[0]


class Sets(NamedTuple):
    """Queries and references with their tables of cells, as arguments of kernels."""

    query_points: Tensor
    query_offsets: Tensor | None
    reference_points: Tensor
    reference_offsets: Tensor | None
    clouds: int
    cells: list[Tensor]  # a table of both, or that of the references; then that of the queries, if known
    both: bool

    def searched_references(self) -> tuple:
        return (*self.cells[:3], 0, self.reference_points.shape[0], self.reference_offsets)

    def searched_queries(self) -> tuple:
        first_place = places_of(self.reference_points.shape[0], self.clouds) if self.both else 0
        return (*self.cells[-3:], first_place, self.query_points.shape[0], self.query_offsets)

    def references_in_order(self) -> tuple:
        """Points sorted by cell, of them the first ones, and their clouds."""
        return (self.cells[2], self.reference_points.shape[0], self.reference_offsets, self.clouds)

    def queries_in_order(self) -> tuple:
        """Points sorted by cell, the first of the queries, how many, and their clouds."""
        first = self.reference_points.shape[0] if self.both else 0
        return (self.cells[-1], first, self.query_points.shape[0], self.query_offsets, self.clouds)


def _specs(
    query_points: Tensor,
    query_offsets: Any,
    reference_points: Tensor,
    reference_offsets: Any,
    clouds: int,
    cells: list[Tensor],
    both: bool,
    features: Tensor,
    sigma: Tensor,
    radius: float,
) -> dict:
    return {
        "aggregated": ((query_points.shape[0], features.shape[1]), features.dtype),
        "softmax": ((query_points.shape[0], 2), features.dtype),
    }


def _backward(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    cells: list[Tensor],
    both: bool,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    aggregated: Tensor,
    softmax: Tensor,
    grad_aggregated: Tensor,
    d_query_points: Tensor | None,
    d_reference_points: Tensor | None,
    d_features: Tensor | None,
    d_sigma: Tensor | None,
) -> None:
    limits = (radius, largest_square_within(radius, query_points.dtype))
    sets = Sets(query_points, query_offsets, reference_points, reference_offsets, clouds, cells, both)
    if d_features is not None:
        division = divide(features.shape[1], features.device.type, most_lanes=32)
        gather = gather_kernel(query_points.dtype, features.dtype, division)
        shape = (reference_points.shape[0] * division.searches, division.lanes)
        known = (softmax, grad_aggregated, sigma, *limits)
        launch(gather, shape, *sets.references_in_order(), *sets.searched_queries(), *known, d_features)
    if not (d_query_points is None and d_reference_points is None and d_sigma is None):
        lanes = 1 if features.device.type == "cpu" else 32
        kernel = partial(position_kernel, query_points.dtype, features.dtype, lanes)
        known = (features, aggregated, softmax, grad_aggregated, sigma, *limits)
        own = features.new_empty(query_points.shape)
        sigma_rows = features.new_empty(query_points.shape[0])
        shape = (query_points.shape[0], lanes)
        queries = (query_points, query_offsets, clouds)
        searched = sets.searched_references()
        launch(kernel(from_query=True), shape, *queries, *searched, *known, own, sigma_rows)
        if d_query_points is not None:
            d_query_points.copy_(own)
        if d_sigma is not None:
            d_sigma.copy_(sigma_rows.sum())
        if d_reference_points is not None:
            own = features.new_empty(reference_points.shape)
            shape = (reference_points.shape[0], lanes)
            references = (reference_points, reference_offsets, clouds)
            searched = sets.searched_queries()
            launch(kernel(from_query=False), shape, *references, *searched, *known, own, None)
            d_reference_points.copy_(own)


def _second_backward(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    grad_aggregated: Tensor,
    direction_query_points: Tensor,
    direction_reference_points: Tensor,
    direction_features: Tensor,
    direction_sigma: Tensor,
    d_grad_aggregated: Tensor,
    d_query_points: Tensor,
    d_reference_points: Tensor,
    d_features: Tensor,
    d_sigma: Tensor,
) -> None:
    fill_second_backward(locals(), chunks_within)


@warp_op(
    "pointproj::warp_aggregate_within",
    outputs=_specs,
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=_second_backward,
)
def _aggregate(
    launch: Launch,
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    cells: list[Tensor],
    both: bool,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    aggregated: Tensor,
    softmax: Tensor,
) -> None:
    sets = Sets(query_points, query_offsets, reference_points, reference_offsets, clouds, cells, both)
    known = (features, sigma, radius, largest_square_within(radius, query_points.dtype), aggregated, softmax)
    dtypes = (query_points.dtype, features.dtype)
    searched = sets.searched_references()
    if features.is_cuda:
        shape = tile_shape(query_points.shape[0], features.shape[1], features.dtype)
        launch_tiles(
            launch,
            aggregate_tiles(*dtypes, shape.held, shape.warps),
            shape,
            *sets.queries_in_order(),
            *searched,
            *known,
        )
    else:
        division = divide(features.shape[1], "cpu", most_lanes=1)
        threads = query_points.shape[0] * division.searches
        queries = (query_points, query_offsets, clouds)
        launch(aggregate_kernel(*dtypes, division), threads, *queries, *searched, *known)

"""Aggregation over all points within a radius: nothing is listed, nothing truncated.

The forward visits the reference points near each query and keeps a running softmax. Gradients that belong
to reference points are gathered by the transposed search, over the queries near each reference point, so
that no two threads ever add to one place.
"""

import functools
from typing import Any, NamedTuple

import torch
import warp as wp
from torch import Tensor

from pointproj.backends import Clouds
from pointproj.backends.warp.row_sums import Division, divide
from pointproj.backends.warp.within_positions import pull_kernel, push_kernel
from pointproj.backends.warp.within_sums import aggregate_kernel, gather_kernel
from pointproj.backends.warp.wrapped import WrappedCells, build_wrapped_cells, places_of
from pointproj.pairs import chunks_within, largest_square_within
from pointproj.pairwise import DIFFERENTIABLE, fill_second_backward
from pointproj.warp_op import Launch, warp_op


def aggregate_within(
    clouds: Clouds, cells: WrappedCells | None, features: Tensor, sigma: Tensor, radius: float
) -> Tensor:
    """Weighted mean of the features within ``radius``: ``(Q, C)`` in their dtype."""
    both = cells is None and (features.requires_grad or clouds.reference_points.requires_grad)
    if cells is None:
        points = clouds.detached()
        queries = (points.query_points, points.query_offsets) if both else (None, None)
        references = points.reference_points, points.reference_offsets, points.count
        cells = build_wrapped_cells(*references, radius, *queries)
    return _aggregate(*clouds, list(cells), both, features, sigma, radius)[0]


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
    kernels, (lanes, _, searches) = _kernels(query_points, features)
    limits = (radius, largest_square_within(radius, query_points.dtype))
    queries = (query_points, query_offsets, clouds)
    references = (reference_points, reference_offsets, clouds)
    reference_cells = (*cells, 0, reference_points.shape[0], reference_offsets)
    if d_features is not None or d_reference_points is not None:
        first_place = places_of(reference_points.shape[0], clouds) if both else 0
        table = cells if both else build_wrapped_cells(*queries, radius)
        query_cells = (*table, first_place, query_points.shape[0], query_offsets)
    if d_features is not None:
        shape = (reference_points.shape[0] * searches, lanes)
        known = (softmax, grad_aggregated, sigma, *limits)
        in_order = (WrappedCells(*cells).points, reference_points.shape[0], reference_offsets, clouds)
        launch(kernels.gather, shape, *in_order, *query_cells, *known, d_features)
    if not (d_query_points is None and d_reference_points is None and d_sigma is None):
        own = features.new_empty(query_points.shape)
        sigma_rows = features.new_empty(query_points.shape[0])
        known = (features, aggregated, softmax, grad_aggregated, sigma, *limits)
        shape = (query_points.shape[0], lanes)
        launch(kernels.pull, shape, *queries, *reference_cells, *known, own, sigma_rows)
        if d_query_points is not None:
            d_query_points.copy_(own)
        if d_sigma is not None:
            d_sigma.copy_(sigma_rows.sum())
        if d_reference_points is not None:
            own = features.new_empty(reference_points.shape)
            known = (features, aggregated, softmax, grad_aggregated, sigma, *limits)
            shape = (reference_points.shape[0], lanes)
            launch(kernels.push, shape, *references, *query_cells, *known, own)
            d_reference_points.copy_(own)


class Kernels(NamedTuple):
    aggregate: wp.Kernel
    gather: wp.Kernel
    pull: wp.Kernel
    push: wp.Kernel


@functools.cache
def kernels_for(positions: torch.dtype, sums: torch.dtype, division: Division) -> Kernels:
    """Kernels for positions of one dtype and sums in another, at least as wide."""
    return Kernels(
        aggregate_kernel(positions, sums, *division),
        gather_kernel(positions, sums, *division),
        pull_kernel(positions, sums, division.lanes),
        push_kernel(positions, sums, division.lanes),
    )


def _kernels(query_points: Tensor, features: Tensor) -> tuple[Kernels, Division]:
    division = divide(features.shape[1], features.device.type, most_lanes=32)
    return kernels_for(query_points.dtype, features.dtype, division), division


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
    kernels, (lanes, _, searches) = _kernels(query_points, features)
    limits = (radius, largest_square_within(radius, query_points.dtype))
    shape = (query_points.shape[0] * searches, lanes)
    queries = (query_points, query_offsets, clouds)
    known = (features, sigma, *limits)
    searched = (*cells, 0, reference_points.shape[0], reference_offsets)
    launch(kernels.aggregate, shape, *queries, *searched, *known, aggregated, softmax)

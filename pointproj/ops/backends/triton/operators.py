"""The functions of the backend, and what torch sees: a search and two sums, with CPU kernels and derivatives.

On a CPU there are no tables, and the torch backend does the work.
"""

import inspect

import torch
from torch import Tensor

from pointproj.ops.backends import torch as plain
from pointproj.ops.backends.torch import radius_list, radius_search
from pointproj.ops.backends.triton.cell_list import CellList, build_cell_list
from pointproj.ops.backends.triton.flops import count_aggregation, count_search
from pointproj.ops.backends.triton.gradients import gradients
from pointproj.ops.backends.triton.knn_search import nearest_rows
from pointproj.ops.backends.triton.sums import aggregate, listed, within
from pointproj.ops.bridge.torch_op import OptionalTensors, Saved, Tensors
from pointproj.ops.bridge.triton_op import runs_kernels, triton_op
from pointproj.ops.clouds import Clouds
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate_backward, second_backward_over
from pointproj.ops.pairs import chunks_within, listed_chunks
from pointproj.ops.records import fields_apart, record_of
from pointproj.ops.reference import Weighting
from pointproj.ops.registry import Summands, Tables

__all__ = ["aggregate_neighbors", "build_index", "radius_aggregate", "radius_list", "radius_search", "search"]
ONE_INDEX = True  # the cell list


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, count: int, radius: float | None
) -> Tables:
    if not runs_kernels(reference_points):
        return ()
    return build_cell_list(reference_points, reference_offsets, count)


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    return _search(*clouds, _cells(clouds, tables), k)


def aggregate_neighbors(clouds: Clouds, summands: Summands, rows: Tensor) -> Tensor:
    features, sigma, weighting = summands
    return _sum_lists(clouds.query_points, clouds.reference_points, features, sigma, rows, *weighting)[0]


def radius_aggregate(clouds: Clouds, tables: Tables | None, summands: Summands, radius: float) -> Tensor:
    features, sigma, weighting = summands
    return _sum_within(*clouds, _cells(clouds, tables), features, sigma, radius, *weighting)[0]


def _cells(clouds: Clouds, tables: Tables | None) -> list[Tensor]:
    """The cell list of the reference points, as operators take it."""
    if tables is None:
        points = clouds.detached().reference_points
        tables = build_index(points, clouds.reference_offsets, clouds.count, None)
    return list(tables)


@fields_apart
def _searched(clouds: Clouds, cells: list[Tensor], k: int) -> tuple[Tensor]:
    if not runs_kernels(clouds.query_points):
        return (plain.search(clouds, (), k).to(torch.int32),)
    return (nearest_rows(clouds, CellList(*cells), k),)


@fields_apart
def _summed_lists(
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    weighting: Weighting,
) -> tuple[Tensor, Tensor]:
    if not runs_kernels(query_points):
        clouds = Clouds(query_points, None, reference_points, None, 1)
        summed = plain.aggregate_neighbors(clouds, Summands(features, sigma, weighting), neighbor_indices)
        return summed, features.new_empty(0, 2)
    return aggregate(listed(query_points, reference_points, neighbor_indices), features, sigma, weighting)


@fields_apart
def _summed_within(
    clouds: Clouds,
    cells: list[Tensor],
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
) -> tuple[Tensor, Tensor]:
    if not runs_kernels(clouds.query_points):
        summed = plain.radius_aggregate(clouds, None, Summands(features, sigma, weighting), radius)
        return summed, features.new_empty(0, 2)
    return aggregate(within(clouds, CellList(*cells), radius), features, sigma, weighting)


def _by_torch(query_points: Tensor) -> bool:
    """Whether gradients are: torch sorts what it adds where deterministic algorithms are asked for."""
    return not runs_kernels(query_points) or torch.are_deterministic_algorithms_enabled()


def _lists_backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    points = [saved.inputs[n] for n in ("query_points", "reference_points", "neighbor_indices")]
    if _by_torch(points[0]):
        return aggregate_backward(grads[0], needs, saved.inputs, listed_chunks)
    return gradients(listed(*points), grads[0], needs, saved)


def _within_backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    inputs = saved.inputs
    if _by_torch(inputs["query_points"]):
        return aggregate_backward(grads[0], needs, inputs, chunks_within)
    source = within(record_of(Clouds, inputs), CellList(*inputs["cells"]), inputs["radius"])
    return gradients(source, grads[0], needs, saved)


def _outputs(query_points: Tensor, features: Tensor) -> tuple:
    """Shapes and dtypes of what :func:`pointproj.ops.backends.triton.sums.aggregate` makes."""
    queries, kept = query_points.shape[0], query_points.shape[0] if runs_kernels(query_points) else 0
    return ((queries, features.shape[1]), features.dtype), ((kept, 2), features.dtype)


_search = triton_op(
    "pointproj::triton_search",
    _searched,
    lambda query_points, *others: (((query_points.shape[0], others[-1]), torch.int32),),
)
_sum_lists = triton_op(
    "pointproj::triton_aggregate_neighbors",
    _summed_lists,
    lambda query_points, reference_points, features, *others: _outputs(query_points, features),
    differentiable=DIFFERENTIABLE,
    backward=_lists_backward,
    second_backward=second_backward_over(listed_chunks),
)
_sum_within = triton_op(
    "pointproj::triton_radius_aggregate",
    _summed_within,
    lambda query_points, *others: _outputs(query_points, others[5]),
    differentiable=DIFFERENTIABLE,
    backward=_within_backward,
    second_backward=second_backward_over(chunks_within),
)
count_search("triton_search")
count_aggregation("triton_aggregate_neighbors", list(inspect.signature(_summed_lists).parameters))
count_aggregation("triton_radius_aggregate", list(inspect.signature(_summed_within).parameters))

"""The functions of the backend, and its torch operators: a search and two sums, with derivatives.

On a CPU there are no tables, and plain torch computes the results.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.backends.torch import operators as plain
from pointproj.ops.backends.triton.cell_list import CellList, build_cell_list
from pointproj.ops.backends.triton.edge_chains import edge_mlp
from pointproj.ops.backends.triton.edge_mlp import edge_sums
from pointproj.ops.backends.triton.gradients import gradients
from pointproj.ops.backends.triton.knn_search import nearest_rows
from pointproj.ops.backends.triton.linear_rows import linear_of_rows
from pointproj.ops.backends.triton.sums import NeighborSource, listed, summed, within
from pointproj.ops.backends.triton.vector_attention import vector_attend
from pointproj.ops.bridge.flops import count_aggregation, count_search
from pointproj.ops.bridge.torch_op import signed
from pointproj.ops.bridge.triton_op import runs_kernels, triton_op
from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.gradients import (
    DIFFERENTIABLE,
    Chunks,
    aggregate,
    aggregate_backward,
    aggregate_second_backward,
)
from pointproj.ops.specification.pairs import chunks_within, listed_chunks
from pointproj.ops.specification.records import (
    FIELDS,
    OptionalTensors,
    Saved,
    Summands,
    Tables,
    Tensors,
    fields_apart,
    nearest_specs,
    record_of,
)
from pointproj.ops.specification.reference import Weighting

__all__ = [
    "aggregate_neighbors",
    "build_index",
    "edge_mlp",
    "edge_sums",
    "linear_of_rows",
    "radius_aggregate",
    "search",
    "vector_attend",
]
ONE_INDEX = True  # the cell list


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, count: int, radius: float | None
) -> Tables:
    if not runs_kernels(reference_points):
        return ()
    return build_cell_list(reference_points, reference_offsets, count)


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    return _search(*clouds, *_cells(clouds, tables), k)


def aggregate_neighbors(clouds: Clouds, summands: Summands, rows: Tensor) -> Tensor:
    features, sigma, weighting = summands
    return _sum_lists(clouds.query_points, clouds.reference_points, rows, features, sigma, *weighting)[0]


def radius_aggregate(clouds: Clouds, tables: Tables | None, summands: Summands, radius: float) -> Tensor:
    features, sigma, weighting = summands
    return _sum_within(*clouds, *_cells(clouds, tables), features, sigma, radius, *weighting)[0]


def _cells(clouds: Clouds, tables: Tables | None) -> Tables | CellList:
    """The cell list of the reference points as arguments of operators: on a CPU it is empty."""
    if tables is None:
        points = clouds.detached().reference_points
        tables = build_index(points, clouds.reference_offsets, clouds.count, None)
    return tables or CellList(None, None, None, None)


@fields_apart
def _searched(clouds: Clouds, cells: CellList, k: int) -> tuple[Tensor]:
    if not runs_kernels(clouds.query_points):
        return (plain.search(clouds, (), k).to(torch.int32),)
    return (nearest_rows(clouds, cells, k),)


Inputs = dict[str, Any]


def _sums(
    name: str, parameters: Inputs, source_of: Callable[[Inputs], NeighborSource], chunks: Chunks
) -> Callable[..., Tensors]:
    """The operator that sums over the neighbours of a source, on a CPU over chunks of pairs.

    In deterministic mode gradients are computed over chunks too: torch sorts before it adds.
    """

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        inputs = dict(zip(parameters, args, strict=True))
        features = inputs["features"]
        if not runs_kernels(features):
            return aggregate(inputs, chunks), features.new_empty(0, 2)
        return summed(source_of(inputs), features, inputs["sigma"], record_of(Weighting, inputs))

    def outputs(*args: Any) -> tuple:
        inputs = dict(zip(parameters, args, strict=True))
        features, queries = inputs["features"], inputs["query_points"].shape[0]
        kept = queries if runs_kernels(features) else 0
        return ((queries, features.shape[1]), features.dtype), ((kept, 2), features.dtype)

    def backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
        if not runs_kernels(grads[0]) or torch.are_deterministic_algorithms_enabled():
            return aggregate_backward(grads, needs, saved, chunks)
        return gradients(source_of(saved.inputs), grads[0], needs, saved)

    operator = triton_op(
        f"pointproj::{name}",
        signed(forward, parameters, tuple[Tensor, Tensor]),
        outputs,
        differentiable=DIFFERENTIABLE,
        backward=backward,
        second_backward=partial(aggregate_second_backward, chunks=chunks),
        numbers=[n for n, kind in parameters.items() if kind is float],
    )
    count_aggregation(name, parameters)
    return operator


_search = triton_op("pointproj::triton_search", _searched, nearest_specs(torch.int32))
count_search("triton_search", _search.parameters, "k")
_LISTED = "query_points", "reference_points", "neighbor_indices"
_sum_lists = _sums(
    "triton_aggregate_neighbors",
    dict.fromkeys((*_LISTED, "features", "sigma"), Tensor) | FIELDS[Weighting],
    lambda inputs: listed(*(inputs[name] for name in _LISTED)),
    listed_chunks,
)
_sum_within = _sums(
    "triton_radius_aggregate",
    FIELDS[Clouds]
    | FIELDS[CellList]
    | {"features": Tensor, "sigma": Tensor, "radius": float}
    | FIELDS[Weighting],
    lambda inputs: within(record_of(Clouds, inputs), record_of(CellList, inputs), inputs["radius"]),
    chunks_within,
)

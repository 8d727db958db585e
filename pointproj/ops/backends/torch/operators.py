"""The functions of the backend, and its operators: a search, lists, and two sums, over chunks of pairs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.backends.torch.attention import attend
from pointproj.ops.backends.torch.edge_mlp import edge_mlp
from pointproj.ops.backends.torch.farthest_points import farthest_points
from pointproj.ops.backends.torch.vector_attention import vector_attend
from pointproj.ops.backends.torch.weighted_sums import weighted_sums
from pointproj.ops.bridge.torch_op import signed, torch_op
from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.distances import distances_of
from pointproj.ops.specification.gradients import (
    DIFFERENTIABLE,
    Chunks,
    aggregate,
    aggregate_backward,
    aggregate_second_backward,
)
from pointproj.ops.specification.pairs import (
    chunks_within,
    listed_chunks,
    masks_within,
    nearest_rows,
    pairs_of_clouds,
)
from pointproj.ops.specification.records import FIELDS, Summands, Tables, fields_apart, nearest_specs
from pointproj.ops.specification.reference import Weighting, radii_of, squared_distances
from pointproj.ops.specification.rounding import rounded_root

__all__ = [
    "aggregate_neighbors",
    "attend",
    "edge_mlp",
    "farthest_points",
    "radius_aggregate",
    "radius_list",
    "radius_search",
    "search",
    "vector_attend",
    "weighted_sums",
]


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    return _search(*clouds, k)


def aggregate_neighbors(clouds: Clouds, summands: Summands, rows: Tensor) -> Tensor:
    features, sigma, weighting = summands
    points = clouds.query_points, clouds.reference_points
    return _aggregate_neighbors(*points, features, sigma, rows, *weighting)


def radius_aggregate(clouds: Clouds, tables: Tables | None, summands: Summands, radius: float) -> Tensor:
    features, sigma, weighting = summands
    return _radius_aggregate(*clouds, features, sigma, radius, *weighting)


def radius_search(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, k: int, knn_tables: Tables | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return _radius_search(*clouds, radii_of(radius, clouds.query_points), k)


def radius_list(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _radius_list(*clouds, radii_of(radius, clouds.query_points), capacity)


@fields_apart
def _search_body(clouds: Clouds, k: int) -> tuple[Tensor]:
    query_points, reference_points = clouds.query_points, clouds.reference_points
    found = query_points.new_full((len(query_points), k), -1, dtype=torch.int64)
    for query, reference, same_cloud in pairs_of_clouds(clouds):
        squared = squared_distances(query_points[query], reference_points[reference])
        if same_cloud is not None:
            squared.masked_fill_(~same_cloud, torch.inf)
        rows = nearest_rows(squared, min(k, squared.shape[1]), reference.start)
        found[query, : rows.shape[1]] = rows
    return (found,)


@fields_apart
def _radius_search_body(clouds: Clouds, radii: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    query_points = clouds.query_points
    found = query_points.new_full((len(query_points), k), -1, dtype=torch.int64)
    counts = query_points.new_zeros(len(query_points), dtype=torch.int64)
    for query, reference, squared, is_neighbor in masks_within(clouds, radii):
        squared.masked_fill_(~is_neighbor, torch.inf)
        rows = nearest_rows(squared, min(k, squared.shape[1]), reference.start)
        found[query, : rows.shape[1]] = rows
        counts[query] = is_neighbor.sum(1).clamp_(max=k + 1)
    return distances_of(clouds, found), found, counts


@fields_apart
def _radius_list_body(clouds: Clouds, radii: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    query_points = clouds.query_points
    row_splits = query_points.new_zeros(len(query_points) + 1, dtype=torch.int64)
    for query, _, _, is_neighbor in masks_within(clouds, radii):
        row_splits[1:][query] = is_neighbor.sum(1)
    row_splits.cumsum_(0)
    found = query_points.new_full((capacity + 1,), -1, dtype=torch.int64)  # the last slot takes all others
    distances = query_points.new_full((capacity + 1,), torch.inf)
    for query, reference, squared, is_neighbor in masks_within(clouds, radii):
        slots = row_splits[:-1][query][:, None] + is_neighbor.cumsum(1) - 1
        slots = torch.where(is_neighbor, slots, capacity).clamp_(max=capacity).flatten()
        rows = torch.arange(reference.start, reference.stop, device=slots.device)
        found.scatter_(0, slots, rows.expand_as(squared).flatten())
        distances.scatter_(0, slots, rounded_root(squared).flatten())
    return row_splits, found[:capacity].clone(), distances[:capacity].clone()


def _sums(name: str, parameters: dict[str, Any], chunks: Chunks) -> Callable[..., Tensor]:
    """The operator that sums over the chunks of its arguments."""

    def forward(*args: Any) -> tuple[Tensor]:
        return (aggregate(dict(zip(parameters, args, strict=True)), chunks),)

    def outputs(*args: Any) -> tuple:
        inputs = dict(zip(parameters, args, strict=True))
        features = inputs["features"]
        return (((inputs["query_points"].shape[0], features.shape[1]), features.dtype),)

    return torch_op(
        name,
        signed(forward, parameters, tuple[Tensor]),
        outputs,
        differentiable=DIFFERENTIABLE,
        backward=partial(aggregate_backward, chunks=chunks),
        second_backward=partial(aggregate_second_backward, chunks=chunks),
        numbers=[n for n, kind in parameters.items() if kind is float],
    )


_search = torch_op("pointproj::torch_search", _search_body, nearest_specs(torch.int64))
_radius_search = torch_op(
    "pointproj::torch_radius_search",
    _radius_search_body,
    lambda query_points, *others: (
        *nearest_specs(None, torch.int64)(query_points, *others),
        ((query_points.shape[0],), torch.int64),
    ),
)
_radius_list = torch_op(
    "pointproj::torch_radius_list",
    _radius_list_body,
    lambda query_points, *others: (
        ((query_points.shape[0] + 1,), torch.int64),
        ((others[-1],), torch.int64),
        ((others[-1],), query_points.dtype),
    ),
)
_aggregate_neighbors = _sums(
    "pointproj::aggregate_neighbors",
    dict.fromkeys(("query_points", "reference_points", "features", "sigma", "neighbor_indices"), Tensor)
    | FIELDS[Weighting],
    listed_chunks,
)
_radius_aggregate = _sums(
    "pointproj::torch_radius_aggregate",
    FIELDS[Clouds] | {"features": Tensor, "sigma": Tensor, "radius": float} | FIELDS[Weighting],
    chunks_within,
)

"""Plain torch: no kernels, every device. Pairs are formed in chunks, so memory stays bounded."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.bridge.torch_op import torch_op
from pointproj.ops.clouds import Clouds
from pointproj.ops.distances import distances_of
from pointproj.ops.gradients import DIFFERENTIABLE, aggregate, backward_over, second_backward_over
from pointproj.ops.pairs import chunks_within, listed_chunks, masks_within, pairs_of_clouds, radii_of
from pointproj.ops.reference import Weighting, squared_distances
from pointproj.ops.registry import Tables

OPERATORS = frozenset({"knn", "radius"})
RANK = {"cpu": 0, "cuda": 0}
EXPORTABLE = frozenset({"cpu", "cuda"})


def unavailable() -> str | None:
    return None


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, count: int, radius: float | None
) -> Tables:
    return ()


def search(clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
    return _search(*clouds, k)


def aggregate_neighbors(
    clouds: Clouds, features: Tensor, sigma: Tensor, rows: Tensor, weighting: Weighting
) -> Tensor:
    points = clouds.query_points, clouds.reference_points
    return _aggregate_neighbors(*points, features, sigma, rows, *weighting)


def radius_aggregate(
    clouds: Clouds,
    tables: Tables | None,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    weighting: Weighting,
) -> Tensor:
    return _radius_aggregate(*clouds, features, sigma, radius, *weighting)


def radius_search(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _radius_search(*clouds, radii_of(radius, clouds.query_points), k)


def radius_list(
    clouds: Clouds, tables: Tables | None, radius: float | Tensor, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _radius_list(*clouds, radii_of(radius, clouds.query_points), capacity)


def _search_body(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    k: int,
) -> tuple[Tensor]:
    found = query_points.new_full((len(query_points), k), -1, dtype=torch.int64)
    chunks = pairs_of_clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
    for query, reference, same_cloud in chunks:
        squared = squared_distances(query_points[query], reference_points[reference])
        if same_cloud is not None:
            squared.masked_fill_(~same_cloud, torch.inf)
        rows = nearest_rows(squared, min(k, squared.shape[1]), reference.start)
        found[query, : rows.shape[1]] = rows
    return (found,)


def nearest_rows(squared: Float[Tensor, "m n"], k: int, first_row: int | Tensor) -> Int[Tensor, "m k"]:
    """Rows of the k smallest squared distances, nearest first, -1 for those that are not finite.

    Column 0 is row ``first_row``.
    """
    squared = squared.nan_to_num(nan=torch.inf, posinf=torch.inf)
    columns = _smallest(squared, k)
    return torch.where(squared.gather(1, columns).isfinite(), columns + first_row, -1)


def _smallest(values: Tensor, k: int) -> Tensor:
    """Columns of the k smallest values in each row, in ascending order, ties by the lower column.

    ``topk`` leaves open which of several equal values it takes, so it only finds the k-th value; a second
    one over column numbers takes all below that value, then the first of those equal to it.
    """
    columns = torch.arange(values.shape[1], device=values.device)
    kth = values.topk(k, largest=False, sorted=False).values.amax(1, keepdim=True)
    order = torch.where(values < kth, columns, columns + len(columns))
    order = torch.where(values > kth, 2 * len(columns), order)
    chosen = order.topk(k, largest=False, sorted=True).values % len(columns)
    ranks = values.gather(1, chosen).argsort(dim=1, stable=True)
    return chosen.gather(1, ranks)


def _radius_search_body(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    radii: Tensor,
    k: int,
) -> tuple[Tensor, Tensor, Tensor]:
    packed = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
    found = query_points.new_full((len(query_points), k), -1, dtype=torch.int64)
    counts = query_points.new_zeros(len(query_points), dtype=torch.int64)
    for pairs, squared, is_neighbor in masks_within(packed, radii):
        squared.masked_fill_(~is_neighbor, torch.inf)
        rows = nearest_rows(squared, min(k, squared.shape[1]), pairs.reference.start)
        found[pairs.query, : rows.shape[1]] = rows
        counts[pairs.query] = is_neighbor.sum(1)
    return distances_of(packed, found), found, counts


def _radius_list_body(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    radii: Tensor,
    capacity: int,
) -> tuple[Tensor, Tensor, Tensor]:
    packed = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
    row_splits = query_points.new_zeros(len(query_points) + 1, dtype=torch.int64)
    for pairs, _, is_neighbor in masks_within(packed, radii):
        row_splits[1:][pairs.query] = is_neighbor.sum(1)
    row_splits.cumsum_(0)
    found = query_points.new_full((capacity + 1,), -1, dtype=torch.int64)  # the last slot takes all others
    distances = query_points.new_full((capacity + 1,), torch.inf)
    for pairs, squared, is_neighbor in masks_within(packed, radii):
        slots = row_splits[:-1][pairs.query][:, None] + is_neighbor.cumsum(1) - 1
        slots = torch.where(is_neighbor, slots, capacity).clamp_(max=capacity).flatten()
        rows = torch.arange(pairs.reference.start, pairs.reference.stop, device=slots.device)
        found.scatter_(0, slots, rows.expand_as(squared).flatten())
        distances.scatter_(0, slots, squared.sqrt().flatten())
    return row_splits, found[:capacity].clone(), distances[:capacity].clone()


_radius_search = torch_op(
    "pointproj::torch_radius_search",
    _radius_search_body,
    lambda query_points, qo, reference_points, ro, clouds, radii, k: (
        ((query_points.shape[0], k), query_points.dtype),
        ((query_points.shape[0], k), torch.int64),
        ((query_points.shape[0],), torch.int64),
    ),
)
_radius_list = torch_op(
    "pointproj::torch_radius_list",
    _radius_list_body,
    lambda query_points, qo, reference_points, ro, clouds, radii, capacity: (
        ((query_points.shape[0] + 1,), torch.int64),
        ((capacity,), torch.int64),
        ((capacity,), query_points.dtype),
    ),
)


_search = torch_op(
    "pointproj::torch_search",
    _search_body,
    lambda query_points, qo, reference_points, ro, clouds, k: (((query_points.shape[0], k), torch.int64),),
)


def _lists_body(
    query_points: Tensor,
    reference_points: Tensor,
    features: Tensor,
    sigma: Tensor,
    neighbor_indices: Tensor,
    kernel: str,
    reduce: str,
    power: float,
    eps: float,
    support: float,
) -> tuple[Tensor]:
    inputs = {
        "query_points": query_points,
        "reference_points": reference_points,
        "features": features,
        "sigma": sigma,
        "neighbor_indices": neighbor_indices,
        **Weighting(kernel, reduce, power, eps, support)._asdict(),
    }
    return (aggregate(inputs, listed_chunks),)


_aggregate_neighbors = torch_op(
    "pointproj::aggregate_neighbors",
    _lists_body,
    lambda query_points, reference_points, features, *others: (
        ((query_points.shape[0], features.shape[1]), features.dtype),
    ),
    differentiable=DIFFERENTIABLE,
    backward=backward_over(listed_chunks),
    second_backward=second_backward_over(listed_chunks),
)


def _radius_body(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    features: Tensor,
    sigma: Tensor,
    radius: float,
    kernel: str,
    reduce: str,
    power: float,
    eps: float,
    support: float,
) -> tuple[Tensor]:
    inputs = {
        "query_points": query_points,
        "query_offsets": query_offsets,
        "reference_points": reference_points,
        "reference_offsets": reference_offsets,
        "clouds": clouds,
        "features": features,
        "sigma": sigma,
        "radius": radius,
        **Weighting(kernel, reduce, power, eps, support)._asdict(),
    }
    return (aggregate(inputs, chunks_within),)


_radius_aggregate = torch_op(
    "pointproj::torch_radius_aggregate",
    _radius_body,
    lambda query_points, qo, reference_points, ro, clouds, features, *others: (
        ((query_points.shape[0], features.shape[1]), features.dtype),
    ),
    differentiable=DIFFERENTIABLE,
    backward=backward_over(chunks_within),
    second_backward=second_backward_over(chunks_within),
)

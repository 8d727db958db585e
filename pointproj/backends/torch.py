"""Plain torch: no kernels, every device. Pairs are formed in chunks, so memory stays bounded."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pointproj.backends import Tables
from pointproj.neighbor_lists import aggregate_neighbors
from pointproj.pairwise import (
    DIFFERENTIABLE,
    Block,
    Chunk,
    MaskedNeighbors,
    aggregate,
    aggregate_backward,
    aggregate_second_backward,
)
from pointproj.reference import squared_distances
from pointproj.torch_op import torch_op

OPERATORS = frozenset({"knn", "radius"})
RANK = {"cpu": 0, "cuda": 0}

PAIRS_AT_ONCE = {
    "cpu": 2**20,
    "cuda": 2**25,
}  # what a chunk may hold: cache on a CPU, 128 MiB of fp32 on a GPU


def unavailable() -> str | None:
    return None


def build_index(
    reference_points: Tensor, reference_offsets: Tensor | None, clouds: int, radius: float | None
) -> Tables:
    return ()


def search(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    tables: Tables,
    k: int,
) -> Tensor:
    points = (query_points, query_offsets, reference_points, reference_offsets)
    return _search(*points, clouds, k)


def knn_aggregate(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    tables: Tables,
    features: Tensor,
    sigma: Tensor | float,
    k: int,
) -> Tensor:
    points = (query_points, query_offsets, reference_points, reference_offsets)
    neighbor_indices = _search(*points, clouds, k)
    return aggregate_neighbors(query_points, reference_points, features, sigma, neighbor_indices)


def radius_aggregate(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    tables: Tables,
    features: Tensor,
    sigma: Tensor | float,
    radius: float,
) -> Tensor:
    points = (query_points, query_offsets, reference_points, reference_offsets)
    sigma = torch.as_tensor(sigma, dtype=features.dtype, device=features.device)
    return _radius_aggregate(*points, clouds, features, sigma, radius)


class Pairs(NamedTuple):
    """A chunk of queries and the reference points that may be their neighbours."""

    query: slice
    reference: slice
    same_cloud: Tensor | None  # (m, n); None: all pairs are of one cloud


def pairs_of_clouds(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
) -> Iterator[Pairs]:
    """All pairs of equal clouds, in chunks.

    Offsets on a GPU cannot be read without waiting for it; there all pairs are formed and masked.
    """
    sizes = len(query_points), len(reference_points)
    ends = [_ends(o, n, clouds) for o, n in zip((query_offsets, reference_offsets), sizes, strict=True)]
    if ends[0] is not None and ends[1] is not None:
        for (q0, q1), (r0, r1) in zip(*ends, strict=True):
            if q1 > q0 and r1 > r0:
                rows = _rows_at_once(reference_points, r1 - r0)
                yield from (
                    Pairs(slice(q, min(q + rows, q1)), slice(r0, r1), None) for q in range(q0, q1, rows)
                )
        return
    ids = [
        _cloud_ids(o, n, clouds, query_points.device)
        for o, n in zip((query_offsets, reference_offsets), sizes, strict=True)
    ]
    rows = _rows_at_once(reference_points, sizes[1])
    for q in range(0, sizes[0], rows):
        yield Pairs(slice(q, q + rows), slice(0, sizes[1]), ids[0][q : q + rows, None] == ids[1])


def _ends(offsets: Tensor | None, size: int, clouds: int) -> list[tuple[int, int]] | None:
    if offsets is None:
        return [(b * (size // clouds), (b + 1) * (size // clouds)) for b in range(clouds)]
    if offsets.device.type != "cpu":
        return None
    bounds = offsets.tolist()
    return list(zip(bounds, bounds[1:], strict=False))


def _rows_at_once(reference_points: Tensor, references: int) -> int:
    return max(1, PAIRS_AT_ONCE[reference_points.device.type] // max(1, references))


def _cloud_ids(offsets: Tensor | None, size: int, clouds: int, device: torch.device) -> Tensor:
    rows = torch.arange(size, device=device)
    if offsets is None:
        return rows // max(1, size // clouds)
    return torch.searchsorted(offsets.long(), rows, right=True)


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
        squared = squared.nan_to_num_(nan=torch.inf)
        if same_cloud is not None:
            squared.masked_fill_(~same_cloud, torch.inf)
        nearest = smallest(squared, min(k, squared.shape[1]))
        rows = torch.where(squared.gather(1, nearest).isfinite(), nearest + reference.start, -1)
        found[query, : rows.shape[1]] = rows
    return (found,)


def smallest(values: Tensor, k: int) -> Tensor:
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


_search = torch_op(
    "pointproj::torch_search",
    _search_body,
    lambda query_points, qo, reference_points, ro, clouds, k: (((query_points.shape[0], k), torch.int64),),
)


def _blocks(inputs: dict) -> Iterator[Chunk]:
    query_points, reference_points = inputs["query_points"], inputs["reference_points"]
    radius = torch.tensor(inputs["radius"], dtype=query_points.dtype)
    chunks = pairs_of_clouds(
        query_points, inputs["query_offsets"], reference_points, inputs["reference_offsets"], inputs["clouds"]
    )
    for pairs in chunks:
        query, reference = query_points[pairs.query], reference_points[pairs.reference]
        is_neighbor = squared_distances(query, reference).sqrt_() <= radius
        if pairs.same_cloud is not None:
            is_neighbor &= pairs.same_cloud
        block = Block(query, reference, inputs["sigma"], MaskedNeighbors(is_neighbor))
        yield Chunk(pairs.query, pairs.reference, block)


def _radius_forward(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    features: Tensor,
    sigma: Tensor,
    radius: float,
) -> tuple[Tensor]:
    return (aggregate(locals(), _blocks),)


_radius_aggregate = torch_op(
    "pointproj::torch_radius_aggregate",
    _radius_forward,
    lambda query_points, qo, reference_points, ro, clouds, features, sigma, radius: (
        ((query_points.shape[0], features.shape[1]), features.dtype),
    ),
    differentiable=DIFFERENTIABLE,
    backward=lambda grads, needs, saved: aggregate_backward(grads[0], needs, saved.inputs, _blocks),
    second_backward=lambda directions, grads, saved: aggregate_second_backward(
        directions, grads[0], saved.inputs, _blocks
    ),
)

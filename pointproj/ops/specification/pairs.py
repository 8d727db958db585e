"""Pairs of queries and reference points, all of a cloud or those of neighbour lists, in bounded memory."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.specification.clouds import Clouds, chunks_of
from pointproj.ops.specification.gradients import Chunk
from pointproj.ops.specification.records import record_of
from pointproj.ops.specification.reference import radii_of, squared_distances
from pointproj.ops.specification.rounding import largest_squares_within

# What a chunk may hold: cache on a CPU, 64 MiB of fp32 on a GPU.
PAIRS_AT_ONCE = {"cpu": 2**20, "cuda": 2**24}


def pairs_of_clouds(clouds: Clouds) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """All pairs of equal clouds, in chunks of queries and reference points.

    Reading offsets on a GPU would wait for it. There all pairs are formed, and the last value says which
    (m, n) are of one cloud; elsewhere it is None.
    """
    sides, numbers = (clouds[:2], clouds[2:4]), None  # points and offsets
    if all(_can_be_read(offsets) for _, offsets in sides):
        ends = [rows_of_clouds(offsets, len(points), clouds.count) for points, offsets in sides]
    else:
        ends = [[(0, len(points))] for points, _ in sides]
        numbers = [cloud_numbers(offsets, len(p), clouds.count, p.device) for p, offsets in sides]
    for (q0, q1), (r0, r1) in zip(*ends, strict=True):
        rows = max(1, PAIRS_AT_ONCE[clouds.query_points.device.type] // max(1, r1 - r0))
        for first in range(q0, q1, rows) if r1 > r0 else ():
            query = slice(first, min(first + rows, q1))
            yield query, slice(r0, r1), numbers and numbers[0][query, None] == numbers[1]


def _can_be_read(offsets: Tensor | None) -> bool:
    return offsets is None or offsets.device.type == "cpu"


def rows_of_clouds(offsets: Tensor | None, size: int, clouds: int) -> list[tuple[int, int]]:
    """First row and end of every cloud; waits for offsets on a GPU."""
    if offsets is None:
        return [(b * (size // clouds), (b + 1) * (size // clouds)) for b in range(clouds)]
    return list(itertools.pairwise(offsets.tolist()))


def cloud_numbers(offsets: Tensor | None, size: int, clouds: int, device: torch.device) -> Tensor:
    """The cloud of each of so many packed points, (size,) int64."""
    rows = torch.arange(size, device=device)
    if offsets is None:
        return rows // max(1, size // clouds)
    return torch.searchsorted(offsets.long(), rows, right=True) - 1


def chunks_within(inputs: dict[str, Any]) -> Iterator[Chunk]:
    """The chunks of an operator over all points within ``radius``: its inputs hold clouds and radius."""
    for query, reference, _, is_neighbor in masks_within(record_of(Clouds, inputs), inputs["radius"]):
        yield Chunk(query, reference, is_neighbor)


def listed_chunks(inputs: dict[str, Any]) -> Iterator[Chunk]:
    """The chunks of an operator over neighbour lists: its inputs hold ``neighbor_indices`` (Q, k)."""
    lists = inputs["neighbor_indices"]
    for query in chunks_of(lists, inputs["features"].shape[1]):
        yield Chunk(query, slice(None), lists[query] >= 0, lists[query].clamp(min=0).long())


def masks_within(clouds: Clouds, radius: float | Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Chunks of pairs, their squared distances (m, n), and which of them are within the radius."""
    limits = largest_squares_within(radii_of(radius, clouds.query_points))
    for query, reference, same_cloud in pairs_of_clouds(clouds):
        squared = squared_distances(clouds.query_points[query], clouds.reference_points[reference])
        is_neighbor = squared <= (limits[query] if len(limits) > 1 else limits)[:, None]
        if same_cloud is not None:
            is_neighbor &= same_cloud
        yield query, reference, squared, is_neighbor


def nearest_rows(
    squared: Float[Tensor, "m n"], k: int, first_row: int | Tensor, by_topk: bool = False
) -> Int[Tensor, "m k"]:
    """Rows of the k smallest squared distances, nearest first, -1 for those that are not finite.

    Column 0 is row ``first_row``. ``by_topk`` is for ONNX, whose ``topk`` takes the lower column at ties.
    """
    squared = squared.nan_to_num(nan=torch.inf, posinf=torch.inf)
    columns = squared.topk(k, largest=False).indices if by_topk else _smallest(squared, k)
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

"""Pairs of queries and reference points, all of a cloud or those of neighbour lists, in bounded memory."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointproj.ops.clouds import Clouds, chunks_of
from pointproj.ops.gradients import Chunk, ListedNeighbors, MaskedNeighbors
from pointproj.ops.records import record_of
from pointproj.ops.reference import squared_distances
from pointproj.ops.rounding import largest_squares_within

# What a chunk may hold: cache on a CPU, 64 MiB of fp32 on a GPU.
PAIRS_AT_ONCE = {"cpu": 2**20, "cuda": 2**24}


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
    offsets = query_offsets, reference_offsets
    if all(map(_can_be_read, offsets)):
        ends = [rows_of_clouds(o, n, clouds) for o, n in zip(offsets, sizes, strict=True)]
        for (q0, q1), (r0, r1) in zip(*ends, strict=True):
            if q1 > q0 and r1 > r0:
                rows = _rows_at_once(reference_points, r1 - r0)
                yield from (
                    Pairs(slice(q, min(q + rows, q1)), slice(r0, r1), None) for q in range(q0, q1, rows)
                )
        return
    ids = [cloud_numbers(o, n, clouds, query_points.device) for o, n in zip(offsets, sizes, strict=True)]
    rows = _rows_at_once(reference_points, sizes[1])
    for q in range(0, sizes[0], rows):
        yield Pairs(slice(q, q + rows), slice(0, sizes[1]), ids[0][q : q + rows, None] == ids[1])


def _can_be_read(offsets: Tensor | None) -> bool:
    return offsets is None or offsets.device.type == "cpu"


def rows_of_clouds(offsets: Tensor | None, size: int, clouds: int) -> list[tuple[int, int]]:
    """First row and end of every cloud; waits for offsets on a GPU."""
    if offsets is None:
        return [(b * (size // clouds), (b + 1) * (size // clouds)) for b in range(clouds)]
    return list(itertools.pairwise(offsets.tolist()))


def _rows_at_once(reference_points: Tensor, references: int) -> int:
    return max(1, PAIRS_AT_ONCE[reference_points.device.type] // max(1, references))


def cloud_numbers(offsets: Tensor | None, size: int, clouds: int, device: torch.device) -> Tensor:
    """The cloud of each of so many packed points, (size,) int64."""
    rows = torch.arange(size, device=device)
    if offsets is None:
        return rows // max(1, size // clouds)
    return torch.searchsorted(offsets.long(), rows, right=True) - 1


def chunks_within(inputs: dict[str, Any]) -> Iterator[Chunk]:
    """The chunks of an operator over all points within ``radius``: its inputs hold clouds and radius."""
    for pairs, _, is_neighbor in masks_within(record_of(Clouds, inputs), inputs["radius"]):
        yield Chunk(pairs.query, pairs.reference, MaskedNeighbors(is_neighbor))


def listed_chunks(inputs: dict[str, Any]) -> Iterator[Chunk]:
    """The chunks of an operator over neighbour lists: its inputs hold ``neighbor_indices`` (Q, k)."""
    lists = inputs["neighbor_indices"]
    for query in chunks_of(lists, inputs["features"].shape[1]):
        neighbors = ListedNeighbors(lists[query].clamp(min=0).long(), lists[query] >= 0)
        yield Chunk(query, slice(None), neighbors)


def masks_within(clouds: Clouds, radius: float | Tensor) -> Iterator[tuple[Pairs, Tensor, Tensor]]:
    """Chunks of pairs, their squared distances (m, n), and which of them are within the radius."""
    limits = largest_squares_within(radii_of(radius, clouds.query_points))
    for pairs in pairs_of_clouds(*clouds):
        squared = squared_distances(
            clouds.query_points[pairs.query], clouds.reference_points[pairs.reference]
        )
        is_neighbor = squared <= (limits[pairs.query] if len(limits) > 1 else limits)[:, None]
        if pairs.same_cloud is not None:
            is_neighbor &= pairs.same_cloud
        yield pairs, squared, is_neighbor


def radii_of(radius: float | Tensor, query_points: Tensor) -> Tensor:
    """The radius of each query, (Q,), or one for all of them, (1,), in the points' dtype."""
    if isinstance(radius, Tensor):
        return radius
    return torch.full((1,), radius, dtype=query_points.dtype, device=query_points.device)

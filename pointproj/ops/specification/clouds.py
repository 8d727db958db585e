"""Query and reference points as every backend takes them: packed, cloud after cloud, in three dimensions."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.torch_internals import is_transforming

VALUES_AT_ONCE = 2**26  # that a chunk of neighbour lists may gather


class Clouds(NamedTuple):
    """The packed points of one call; without offsets all clouds are of equal size."""

    query_points: Float[Tensor, "q 3"]  # q is the sum over all clouds; contiguous
    query_offsets: Int[Tensor, " count+1"] | None  # int32: cloud b has rows offsets[b]:offsets[b + 1]
    reference_points: Float[Tensor, "n 3"]
    reference_offsets: Int[Tensor, " count+1"] | None  # given if and only if query_offsets are
    count: int

    def detached(self) -> "Clouds":
        """The same points without their history."""
        query, reference = self.query_points, self.reference_points
        if not (query.requires_grad or reference.requires_grad or is_transforming()):
            return self
        return self._replace(query_points=query.detach(), reference_points=reference.detach())


def pack(
    points: Float[Tensor, "*batch n dims"], offsets: Int[Tensor, " count+1"] | None
) -> tuple[Float[Tensor, "rows 3"], Int[Tensor, " count+1"] | None, int]:
    """One cloud, a dense batch or a ragged one in the form that backends know: with offsets and their count.

    Points in the plane get a third coordinate of 0.
    """
    if offsets is not None:
        return packed(points), as_dtype(offsets, torch.int32), offsets.shape[0] - 1
    return packed(points), None, points.shape[0] or 1 if points.ndim == 3 else 1  # a batch of none is empty


def packed(points: Tensor) -> Tensor:
    """Points (..., 3 or 2) as (N, 3), contiguous."""
    if points.shape[-1] == 2:
        points = torch.nn.functional.pad(points, (0, 1))
    # A reshape to the same shape would still be a view with its own backward.
    return (points if points.ndim == 2 else points.reshape(-1, points.shape[-1])).contiguous()


def as_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """``values.to(dtype)``, but free of cost where the dtype is the same."""
    return values if values.dtype == dtype else values.to(dtype)


def rows_in_packed(
    indices: Tensor, points: Tensor, row_splits: Tensor | None = None, missing: int = -1
) -> Tensor:
    """Rows of the packed points for indices into clouds of a dense batch; ``missing`` for what is no row.

    Indices are (..., Q, k), or of a list with its ``row_splits``, whose queries count through the clouds.
    """
    exists = (indices >= 0) & (indices < points.shape[-2])
    clouds = _dense_clouds(points, indices, row_splits)
    rows = indices if clouds is None else indices + (clouds * points.shape[-2]).to(indices.dtype)
    return torch.where(exists, rows, missing)


def rows_in_cloud(rows: Tensor, points: Tensor, row_splits: Tensor | None = None) -> Tensor:
    """The inverse of :func:`rows_in_packed`."""
    clouds = _dense_clouds(points, rows, row_splits)
    if clouds is None:
        return rows
    return torch.where(rows >= 0, rows - (clouds * points.shape[-2]).to(rows.dtype), -1)


def _dense_clouds(points: Tensor, rows: Tensor, row_splits: Tensor | None) -> Tensor | None:
    """The number of each row's cloud, in a shape that goes with the rows; None if there is only one."""
    if points.ndim == 2 or points.shape[0] == 1:
        return None
    if row_splits is None:
        return torch.arange(points.shape[0], device=points.device)[:, None, None]
    queries = (row_splits.shape[0] - 1) // max(1, points.shape[0])
    return queries_of(row_splits, len(rows)) // max(1, queries)


def queries_of(row_splits: Int[Tensor, " q+1"], slots: int) -> Int[Tensor, " slots"]:
    """The query that each slot of a list belongs to; any query for slots that are not used."""
    if not row_splits.is_cuda and row_splits.shape[0] > 1:
        numbers = torch.arange(row_splits.shape[0] - 1, device=row_splits.device)
        ends = torch.cat([row_splits[:-1].clamp(max=slots), row_splits.new_full((1,), slots)])
        return numbers.repeat_interleave(ends.diff(), output_size=slots)
    numbers = torch.arange(slots, device=row_splits.device)
    # Not in row_splits[1:]: torch 2.11 compiles a search in a slice for a GPU without the slice's offset.
    queries = torch.searchsorted(row_splits, numbers, right=True) - 1
    return queries.clamp(max=max(0, row_splits.shape[0] - 2))


def rows_of(values: Tensor, rows: Int[Tensor, "*pairs"]) -> Tensor:
    """The rows (..., C) of values (N, C); zeros if there are none."""
    if not values.shape[0]:
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    return values.index_select(0, rows.flatten()).view(*rows.shape, values.shape[-1])


def distinct_rows(rows: Tensor, exists: Tensor, count: int) -> Tensor:
    """Rows (Q, K) or (M,), with distinct rows below ``count`` where none exists.

    What is added for those is 0, but a GPU adds to one row one after the other.
    """
    if not rows.is_cuda:
        return torch.where(exists, rows, 0)
    others = torch.arange(len(rows), device=rows.device) % max(1, count)
    return torch.where(exists, rows, others if rows.ndim == 1 else others[:, None])


def chunks_of(lists: Tensor, width: int) -> Iterator[slice]:
    """Parts of lists (Q, K) or (M,) that can be worked on together, with so many numbers of each pair."""
    size = max(1, VALUES_AT_ONCE // max(1, lists[:1].numel() * width))
    return (slice(first, first + size) for first in range(0, len(lists), size))


def linear_rows(finite: Tensor, missing: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight.T`` of :func:`finite_rows`, without a gradient of the weight from other rows.

    No pair may have such a row, and 0 times NaN is NaN. The result is NaN there.
    """
    return torch.addmm(missing.expand(-1, len(weight)), finite, weight.t())


def linear_of_rows(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    places: Tensor | None = None,
    of_places: Tensor | None = None,
    *,
    counts: Tensor | None = None,
) -> Tensor:
    """``rows @ weight.T + places @ of_places.T + counts * bias``, as :func:`linear_rows`.

    Products with places are no matrix products: these may round to TF32, or to autocast's type, and
    differences of the results matter.
    """
    made = linear_rows(*finite_rows(rows), weight) if rows.shape[1] else weight.new_zeros(rows.shape[0], 1)
    if places is not None:
        finite, missing = finite_rows(places)
        made = made + missing
        for place, column in zip(finite.unbind(1), of_places.unbind(1), strict=True):
            made = torch.addcmul(made, place[:, None], column)
    if bias is not None:
        made = made + (bias if counts is None else counts[:, None] * bias)
    return made.expand(-1, weight.shape[0])


def finite_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, C), those that are not finite as zeros; and (N, 1), NaN for these and 0 for the others."""
    if not rows.shape[1]:
        return rows, rows.new_zeros(rows.shape[0], 1)
    largest = torch.linalg.vector_norm(rows.detach(), torch.inf, dim=1, keepdim=True)
    missing = (largest * 0).to(rows.dtype)
    return torch.where(missing == 0, rows, 0.0), missing

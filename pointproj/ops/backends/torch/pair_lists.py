"""Chunks of neighbour lists: what their pairs take from queries and reference points, and give to them."""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pointproj.ops.specification.clouds import queries_of

# Numbers of a chunk's widest tensor: 2 MiB of fp32 on a CPU. On a GPU, whose launches small chunks wait for,
# one part in PART_OF_GPU of its memory: 280 MiB of 140 GiB. A derivative holds several such tensors.
VALUES_AT_ONCE = {"cpu": 2**19}
PART_OF_GPU = 512
SPARE = 256  # rows of zeros behind the others, for missing neighbours: a GPU adds to one row serially


def _values_at_once(device: torch.device) -> int:
    if device.type in VALUES_AT_ONCE:
        return VALUES_AT_ONCE[device.type]
    return torch.cuda.get_device_properties(device).total_memory // (4 * PART_OF_GPU)


class PairLists:
    """Neighbour lists, ``rows`` (Q, K), or (M,) with ``row_splits``; other rows are missing."""

    def __init__(self, rows: Tensor, row_splits: Tensor | None, references: int) -> None:
        self.exists = (rows >= 0) & (rows < references)
        spare = references
        if rows.is_cuda:
            numbers = torch.arange(rows.numel(), device=rows.device).view(rows.shape)
            spare = references + (numbers & (SPARE - 1))
        self.rows = torch.where(self.exists, rows, spare)
        self.references, self.padded = references, row_splits is None
        self.spare = SPARE if rows.is_cuda else 1
        self.queries = len(rows) if row_splits is None else len(row_splits) - 1
        self.query = None if row_splits is None else queries_of(row_splits, len(rows))

    def chunks(self, width: int) -> Iterator[slice]:
        """Parts of the lists whose pairs have at most so many numbers each."""
        if not (self.rows.numel() and self.queries and self.references):
            return
        size = max(1, _values_at_once(self.rows.device) // (self.rows[:1].numel() * width))
        for first in range(0, len(self.rows), size):
            yield slice(first, min(first + size, len(self.rows)))

    def with_spare(self, values: Tensor, missing: float = 0.0) -> Tensor:
        """Values (N, C) of reference points, and rows of what missing neighbours have."""
        return torch.nn.functional.pad(values, (0, 0, 0, self.spare), value=missing)

    def of_references(self, at: slice, padded: Tensor) -> Tensor:
        """Of each pair of a chunk: (m, K, C) or (m, C); the values are from :meth:`with_spare`."""
        rows = self.rows[at]
        return padded.index_select(0, rows.flatten()).view(*rows.shape, padded.shape[1])

    def of_queries(self, at: slice, values: Tensor) -> Tensor:
        """Values (Q, C) of each pair's query: (m, 1, C) or (m, C)."""
        return values[at, None] if self.padded else values.index_select(0, self.query[at])

    @functools.cached_property
    def counts(self) -> Tensor:
        """How many neighbours a query has: (Q,)."""
        if self.padded:
            return self.exists.sum(1)
        counts = self.exists.new_zeros(max(1, self.queries), dtype=torch.int64)
        return counts.index_add_(0, self.query, self.exists.long())[: self.queries]

    @functools.cached_property
    def has_pairs(self) -> Tensor:
        """Whether a query has a neighbour: (Q,)."""
        return self.counts > 0

    def masked(self, at: slice, values: Tensor) -> Tensor:
        """Values of pairs, 0 where there is none."""
        exists = self.exists[at]
        if not exists.is_cuda and bool(exists.all()):
            return values
        return torch.where(exists[..., None], values, 0.0)

    def is_chosen(self, at: slice, winners: Tensor) -> Tensor:
        """Whether a pair's slot is that of its query and channel."""
        return self.of_queries(at, winners) == self._slots(at)

    def largest(
        self, chunks: Callable[[], Iterator[tuple[slice, Tensor]]], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The largest value of each query and channel (Q, C), and its slot, the first of several; 0, and -1.

        ``chunks()`` gives values of pairs, chunk by chunk, the same each time that it is called.
        """
        best = torch.full_like(like, -torch.inf)
        winners = torch.full_like(like, -1, dtype=torch.int32)
        if self.padded:
            for at, values in chunks():
                values = torch.where(self.exists[at, :, None], values, -torch.inf)
                best[at], slots = values.max(1)
                winners[at] = slots.int()
        else:
            last = len(self.rows)
            for at, values in chunks():
                values = torch.where(self.exists[at, None], values, -torch.inf)
                best.scatter_reduce_(0, self.query[at, None].expand_as(values), values, "amax")
            winners.fill_(last)
            for at, values in chunks():
                own = self.of_queries(at, best)
                is_best = self.exists[at, None] & ((values == own) | (values.isnan() & own.isnan()))
                slots = torch.where(is_best, self._slots(at), last).int()
                winners.scatter_reduce_(0, self.query[at, None].expand_as(values), slots, "amin")
        has_pairs = self.has_pairs[:, None]
        return torch.where(has_pairs, best, 0.0), torch.where(has_pairs, winners, -1)

    def _slots(self, at: slice) -> Tensor:
        """Numbers of slots, of each query or, (M,), of all."""
        first, count = (0, self.rows.shape[1]) if self.padded else (at.start, at.stop - at.start)
        return torch.arange(first, first + count, dtype=torch.int32, device=self.rows.device)[:, None]

    def add_to_references(self, at: slice, total: Tensor, values: Tensor) -> None:
        """Add values of pairs to (N + spare, C)."""
        total.index_add_(0, self.rows[at].flatten(), values.reshape(-1, total.shape[1]).to(total.dtype))

    def add_to_queries(self, at: slice, total: Tensor | None, values: Tensor) -> Tensor:
        """Add values of pairs to (Q, C), of which None has none yet."""
        values = values.sum(1) if self.padded else values
        if self.padded and at == slice(0, len(self.rows)):
            return values
        if total is None:
            dtype = torch.promote_types(values.dtype, torch.float32)
            total = values.new_zeros(self.queries, values.shape[-1], dtype=dtype)
        if self.padded:
            total[at] = values
        else:
            total.index_add_(0, self.query[at], values.to(total.dtype))
        return total

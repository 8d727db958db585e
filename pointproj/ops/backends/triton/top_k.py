"""Lists of the k nearest of a tile of queries, (SLOTS, TILE): squared distances and rows, in no order.

Of equal distances the lower row is nearer. SLOTS is k rounded up to a power of two.
"""

import triton
import triton.language as tl

END = tl.constexpr(2**31 - 1)  # more than any row


@triton.jit
def precedes(squared, row, other, other_row):
    """Whether a neighbour is nearer than another."""
    return (squared < other) | ((squared == other) & (row < other_row))


@triton.jit
def empty_lists(real: tl.constexpr, k, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """k free places, with different rows so that a candidate takes only one; the other places are taken."""
    slot = tl.broadcast_to(tl.arange(0, SLOTS)[:, None], [SLOTS, TILE])
    best = tl.where(slot < k, float("inf"), -float("inf")).to(real)
    return best, tl.where(slot < k, END - slot, -1)


@triton.jit
def farthest(best, best_rows):
    """Squared distance and row of the farthest neighbour in each list."""
    worst = tl.max(best, 0)
    return worst, tl.max(tl.where(best == worst[None, :], best_rows, -1), 0)


@triton.jit
def insert(squared, rows, best, best_rows):
    """Replace the farthest neighbours in the lists by nearer candidates (STEP, TILE)."""
    worst, worst_row = farthest(best, best_rows)
    squared = tl.where(precedes(squared, rows, worst[None, :], worst_row[None, :]), squared, float("inf"))
    while tl.min(squared) < float("inf"):
        nearest = tl.min(squared, 0)
        nearest_row = tl.min(tl.where(squared == nearest[None, :], rows, END), 0)
        gives_way = (
            (best == worst[None, :]) & (best_rows == worst_row[None, :]) & (nearest < float("inf"))[None, :]
        )
        best = tl.where(gives_way, nearest[None, :], best)
        best_rows = tl.where(gives_way, nearest_row[None, :], best_rows)
        worst, worst_row = farthest(best, best_rows)
        closer = precedes(squared, rows, worst[None, :], worst_row[None, :])
        closer &= (squared != nearest[None, :]) | (rows != nearest_row[None, :])
        squared = tl.where(closer, squared, float("inf"))
    return best, best_rows


@triton.jit
def store_lists(
    best, best_rows, found, begin, k, exists, SLOTS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write rows, nearest first, from places ``begin`` of ``found`` on; -1 where there are fewer than k."""
    slot = tl.broadcast_to(tl.arange(0, SLOTS)[:, None], [SLOTS, TILE])
    best = tl.where(slot < k, best, float("inf"))
    for place in range(k):
        nearest = tl.min(best, 0)
        row = tl.min(tl.where(best == nearest[None, :], best_rows, END), 0)
        best = tl.where((best == nearest[None, :]) & (best_rows == row[None, :]), float("inf"), best)
        tl.store(found + begin + place, tl.where(nearest < float("inf"), row, -1), mask=exists)

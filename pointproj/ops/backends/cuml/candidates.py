"""Exact neighbours from a search that rounds, is in fp32, and returns any of the points with equal distances.

Libraries for any dimension compute the squared distance as |p|^2 + |q|^2 - 2 p.q. That is fast, but its
rounding error grows with the coordinates. So the search returns more candidates than neighbours. They are
ranked again by the distance as :mod:`pointproj.ops.specification.reference` rounds it. A row is certain if
the farthest candidate is farther than the k-th neighbour by more than all rounding errors: then no other
point can be nearer. The other rows (most have ties at the k-th place) are searched among all points.

For two points with equal |p|^2, cuML returns the distance 0 if its square is below 1e-3, in any unit. So
points are scaled until 1e-3 is less than the rounding error, by a power of two, which changes no digit.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.backends.torch.operators import search as search_all
from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.reference import squared_lengths

MARGIN = 4  # more candidates than neighbours: each costs time, but with fewer, more rows are uncertain
# Rounding errors of a squared distance by any formula, with positions rounded to fp32, in units of 2^-24
# times the squared lengths of both points from the centre.
ROUNDINGS = 32
LOST = 1e-3  # smaller squares may be returned as 0
LARGEST = 30  # coordinates are scaled up to 2 to this power
FARTHEST = 1e17  # scaled distance from the centre whose square is still a number of fp32
QUERIES_AT_ONCE = 2**20

# (m, 3) fp32 and a count -> (m, count) rows of the candidates, any integer dtype
CandidateSearch = Callable[[Float[Tensor, "m 3"], int], Int[Tensor, "m count"]]


class Candidates(NamedTuple):
    """The reference points of one cloud that can be neighbours."""

    rows: Tensor  # (n,) int64, ascending: rows of the finite points in the cloud
    points: Tensor  # (n, 3) as given
    center: Tensor  # (3,) of their bounding box
    scale: Tensor  # () fp64, a power of two
    shifted: Tensor  # (n, 3) fp32, relative to the centre and scaled: the points that are searched


def candidates_of(reference_points: Float[Tensor, "n 3"]) -> Candidates:
    """Prepare a cloud for a search that supports neither fp64 nor NaN. This waits for the device."""
    rows = reference_points.isfinite().all(1).nonzero().squeeze(1)
    points = reference_points[rows]
    low, high = (points if len(rows) else points.new_zeros(1, 3)).aminmax(dim=0)
    center = low / 2 + high / 2  # their sum may overflow
    exponent = (high / 2 - low / 2).amax().double().frexp().exponent
    scale = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), (LARGEST - exponent).clamp(max=1000))
    return Candidates(rows, points, center, scale, _shifted(points, center, scale).float())


def exact_neighbors(
    query_points: Float[Tensor, "q 3"], candidates: Candidates, search: CandidateSearch, k: int
) -> Int[Tensor, "q k"]:
    """Rows of the k nearest in the cloud, nearest first, ties by the lower row, -1 where there are fewer.

    ``search`` finds about the nearest of ``candidates.shifted``, for queries shifted and scaled alike. A
    query that is not finite has no neighbour. This waits for the device once in ``QUERIES_AT_ONCE`` queries.
    """
    found = query_points.new_full((len(query_points), k), -1, dtype=torch.int64)
    wanted = min(k + MARGIN, len(candidates.rows))
    if wanted:
        for first in range(0, len(query_points), QUERIES_AT_ONCE):
            some = slice(first, first + QUERIES_AT_ONCE)
            found[some, : min(k, wanted)] = _of_some(query_points[some], candidates, search, k, wanted)
    return found


def _of_some(
    query_points: Tensor, candidates: Candidates, search: CandidateSearch, k: int, wanted: int
) -> Tensor:
    is_finite = query_points.isfinite().all(1)
    at = torch.where(is_finite[:, None], query_points, candidates.center)
    # A variable keeps this alive until the device is waited for: another library's stream may still read it.
    shifted = _shifted(at, candidates.center, candidates.scale)
    proposals = search(shifted.float(), wanted)
    in_range = ((proposals >= 0) & (proposals < len(candidates.rows))).all(1)
    proposed = proposals.long().clamp(0, len(candidates.rows) - 1).sort(dim=1).values  # ties: lower row first
    is_repeated = (proposed.diff(dim=1) == 0).any(1)
    squared, order = squared_lengths(at[:, None] - candidates.points[proposed]).sort(dim=1, stable=True)
    nearest = proposed.gather(1, order)[:, :k]
    rows = torch.where(squared[:, :k].isfinite() & is_finite[:, None], candidates.rows[nearest], -1)

    is_certain = in_range & ~is_repeated
    if wanted < len(candidates.rows):
        is_certain &= _is_beyond_doubt(shifted, squared, candidates.scale, k)
    doubtful = (~is_certain & is_finite).nonzero().squeeze(1)  # waits
    if len(doubtful):
        among_all = Clouds(query_points[doubtful], None, candidates.points, None, 1)
        exact = search_all(among_all, None, rows.shape[1])
        rows[doubtful] = torch.where(exact >= 0, candidates.rows[exact.clamp(min=0)], -1)
    return rows


def _is_beyond_doubt(shifted: Tensor, squared: Tensor, scale: Tensor, k: int) -> Tensor:
    """Whether only candidates can be among the k nearest: (m, 3) and (m, wanted) to (m,).

    In the search, all other points were at least as far as the farthest candidate. Each distance had at most
    ``error``. The exact distance of that candidate is known, except for squares that vanish.
    """
    vanished = torch.full_like(scale, 16 * torch.finfo(squared.dtype).tiny)
    squared, vanished = (numbers.double() * scale * scale for numbers in (squared, vanished))
    length = shifted.square().sum(1)
    longest = length.sqrt() + squared[:, -1].sqrt()  # the farthest candidate's own length at most
    error = ROUNDINGS * 2.0**-24 * (length + longest.square()) + LOST + vanished
    return (squared[:, k - 1] + 2 * error < squared[:, -1]) & (longest < FARTHEST)


def _shifted(points: Tensor, center: Tensor, scale: Tensor) -> Tensor:
    return ((points.double() - center) * scale).clamp(-FARTHEST, FARTHEST).contiguous()

"""Exact nearest neighbours of points with more than three coordinates, in bounded memory.

Cells do not help there, so all pairs are compared, by |b|^2 - 2 a.b of points that were moved to their centre
and scaled: a matrix product, with the rounding of one. It chooses candidates, which are ranked by their
differences, squared and summed in float64, equal sums by the lower index.

For each query the k-th of them shows whether a point that is no candidate could be as near. With D
coordinates and u half the epsilon of the product's dtype, the product differs from the squared distance less
|a|^2 by at most s (|a|^2 + |b|^2), apart from numbers that vanish. In units of u, these roundings add up:

    4 (moving) + D + 2 (|b|^2) + 2 D + 2 (product, in any order) + 2 D + 6 (differences) + D (|a|^2)

which is less than s = 8 (D + 4). With |b|^2 (1 - s) in the product, (1 - s) |a|^2 and the largest value of a
candidate add up to less than the squared distance of every point that is none. Queries whose k-th neighbour
is not nearer than that are searched again with more candidates, in the end with all points.
"""

from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.bridge.torch_op import torch_op
from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.pairs import rows_of_clouds
from pointproj.ops.specification.records import Tables, fields_apart, nearest_specs
from pointproj.ops.specification.reference import nan_where_query_is_not_finite
from pointproj.ops.specification.rounding import rounded_root

VALUES_AT_ONCE = {"cpu": 2**20, "cuda": 2**27}  # products of a chunk: 512 MiB of float32 on a GPU
GROUP = 64  # products of which the least is looked at first
MORE = 8  # times as many candidates, where they were too few
EXACT_PRODUCTS = ("none", "ieee")  # torch's names for products that round as float32 does


def check_backend(backend: str, **others: object) -> None:
    """What goes with more than three coordinates: no backend but torch, and none of the others."""
    given = [name for name, value in others.items() if value is not None]
    if backend not in ("auto", "torch"):
        given.append(f"backend={backend!r}")
    if given:
        raise ValueError(
            f"points of more than 3 coordinates are searched by comparing all pairs, in torch: {given[0]} "
            "is for points of 2 or 3"
        )


def nearest(
    clouds: Clouds,
    tables: Tables | None,
    k: int,
    index_dtype: torch.dtype,
    max_radius: float | None = None,
) -> tuple[Float[Tensor, "q k"], Int[Tensor, "q k"]]:
    """Distances and packed rows of the k nearest, as a backend gives them, here of (Q, D) and (N, D) points.

    The host waits for the device, once for each group of clouds that are searched together.
    """
    distances, rows = _nearest(*clouds, k)
    return distances, rows.to(index_dtype)


def radius_list(
    clouds: Clouds, radius: Float[Tensor, " q"]
) -> tuple[Int[Tensor, " q+1"], Int[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """All within the radius of each query: row splits, packed rows in ascending order, and distances.

    The host waits for the device for each chunk of pairs.
    """
    query_points = clouds.query_points
    counts = torch.zeros(len(query_points) + 1, dtype=torch.int64, device=query_points.device)
    rows, distances = [counts[:0]], [query_points.new_empty(0)]
    with torch.autocast(query_points.device.type, enabled=False):
        for at, query, first_row, reference in _groups(clouds, one_by_one=True):
            radii = radius[at]
            for queries, columns in _candidates_within(query, reference, radii.double()):
                squared = _sum_of_squares(query[0, queries].double() - reference[0, columns].double())
                found = rounded_root(squared).to(query.dtype)
                within = (found <= radii[queries]).nonzero()[:, 0]
                counts[1:].index_add_(0, queries[within] + at.start, torch.ones_like(within))
                rows.append(columns[within] + first_row)
                distances.append(found[within])
    return counts.cumsum(0), torch.cat(rows), torch.cat(distances)


def _candidates_within(
    query: Float[Tensor, "1 m d"], reference: Float[Tensor, "1 n d"], radius: Float[Tensor, " m"]
) -> Iterator[tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]]:
    """Queries and columns of all pairs within the radius, and of few that are a little beyond, in chunks."""
    products = _Products.of(query, reference)
    limits = (radius * products.scale[0, 0]).square() * (1 + products.slack) - products.of_queries[0]
    limits = limits.masked_fill(~products.searched[0], -torch.inf).to(products.query.dtype)
    limits = torch.nextafter(limits, torch.full_like(limits, torch.inf))
    for rows in _parts(query.shape[1], reference.shape[1], query.device):
        values = products.values(rows)[0]
        pairs = ((values <= limits[rows, None]) & (values < torch.inf)).nonzero()
        for queries, columns in (part.T for part in pairs.split(_at_once(query.shape[2], query.device))):
            yield queries + rows.start, columns


@fields_apart
def _nearest_body(clouds: Clouds, k: int) -> tuple[Tensor, Tensor]:
    query_points = clouds.query_points
    squared = query_points.new_full((len(query_points), k), torch.inf, dtype=torch.float64)
    rows = torch.full_like(squared, -1, dtype=torch.int64)
    with torch.autocast(query_points.device.type, enabled=False):
        for at, query, first_row, reference in _groups(clouds):
            candidates = k + k // 4 + 8  # rounding confuses few of the neighbours with others
            least, columns = _nearest_of_group(query, reference, min(k, reference.shape[1]), candidates)
            squared[at, : least.shape[2]] = least.flatten(0, 1)
            firsts = first_row + reference.shape[1] * torch.arange(len(reference), device=rows.device)
            rows[at, : least.shape[2]] = (columns + firsts[:, None, None]).flatten(0, 1)
    found = squared.to(query_points.dtype).isfinite()
    distances = rounded_root(squared).to(query_points.dtype).masked_fill(~found, torch.inf)
    return nan_where_query_is_not_finite(distances, query_points), rows.masked_fill(~found, -1)


def _groups(clouds: Clouds, one_by_one: bool = False) -> Iterator[tuple[slice, Tensor, int, Tensor]]:
    """Clouds that are searched together: their queries' rows, (b, m, D) queries, first row and (b, n, D)."""
    points, sides = (clouds.query_points, clouds.reference_points), (clouds[:2], clouds[2:4])
    ends = [rows_of_clouds(offsets, len(p), clouds.count) for p, offsets in sides]
    sizes = {(q1 - q0, r1 - r0) for (q0, q1), (r0, r1) in zip(*ends, strict=True)}
    together = 1
    if len(sizes) == 1 and not one_by_one:
        m, n = sizes.pop()
        together = _at_once(n * max(m, points[0].shape[1]), points[0].device)
    for first in range(0, clouds.count, together):
        last = min(first + together, clouds.count) - 1
        size = last + 1 - first, -1
        query, reference = (slice(of[first][0], of[last][1]) for of in ends)
        if query.stop > query.start and reference.stop > reference.start:
            of_group = points[0][query].unflatten(0, size), points[1][reference].unflatten(0, size)
            yield query, of_group[0], reference.start, of_group[1]


def _nearest_of_group(
    query: Float[Tensor, "b m d"], reference: Float[Tensor, "b n d"], k: int, candidates: int
) -> tuple[Float[Tensor, "b m k"], Int[Tensor, "b m k"]]:
    """Squared distances in float64, inf where there is no neighbour, and the columns that they are of."""
    (b, m, dims), n = query.shape, reference.shape[1]
    if 2 * candidates >= n:  # then a product saves nothing
        every = torch.arange(n, device=query.device).expand(b, 1, n)
        parts = [
            _ranked(query[:, rows], reference, every, k) for rows in _parts(m, b * n * dims, query.device)
        ]
        return tuple(torch.cat(results, dim=1) for results in zip(*parts, strict=True))
    products, parts = _Products.of(query, reference), []
    for rows in _parts(m, b * max(n, 2 * candidates * dims), query.device):
        columns, bound = _smallest(products.values(rows), candidates)
        squared, columns = _ranked(query[:, rows], reference, columns.sort(dim=2).values, k)
        parts.append((squared, columns, products.are_nearest(rows, squared[..., -1], bound)))
    squared, columns, certain = (torch.cat(results, dim=1) for results in zip(*parts, strict=True))
    for cloud in (~certain).any(1).nonzero()[:, 0].tolist():
        again = (~certain[cloud]).nonzero()[:, 0]
        one = slice(cloud, cloud + 1)
        found = _nearest_of_group(query[one, again], reference[one], k, MORE * candidates)
        squared[cloud, again], columns[cloud, again] = found[0][0], found[1][0]
    return squared, columns


class _Products(NamedTuple):
    """What squared distances are computed from as a product, of points that were moved and scaled."""

    query: Float[Tensor, "b m d+1"]  # -2 a, and 1
    # b, and |b|^2 (1 - slack), which is inf for what is nobody's neighbour, also after the last point
    reference: Float[Tensor, "b d+1 n"]
    of_queries: Float[Tensor, "b m"]  # |a|^2 (1 - slack) less what may have vanished, in float64
    searched: Tensor  # (b, m): queries that are finite
    scale: Float[Tensor, "b 1 1"]  # of lengths, in float64
    slack: float

    @classmethod
    def of(cls, query: Float[Tensor, "b m d"], reference: Float[Tensor, "b n d"]) -> Self:
        finite = [points.isfinite().all(2, keepdim=True) for points in (query, reference)]
        a, b = (torch.where(f, p.double(), 0.0) for f, p in zip(finite, (query, reference), strict=True))
        centre = b.sum(1, keepdim=True) / finite[1].sum(1, keepdim=True).clamp(min=1)
        a, b = (torch.where(f, p - centre, 0.0) for f, p in zip(finite, (a, b), strict=True))
        largest = torch.maximum(*(p.abs().amax((1, 2), keepdim=True) for p in (a, b)))
        scale = torch.ldexp(torch.ones_like(largest), -largest.frexp().exponent.clamp(-1000, 1000))
        dtype = _product_dtype(query)
        a, b = (a * scale).to(dtype), (b * scale).to(dtype)
        limits = torch.finfo(dtype)
        slack = 8 * (a.shape[2] + 4) * limits.eps / 2
        bias = b.double().square().sum(2) * (1 - slack)
        bias = bias.to(dtype).masked_fill(~finite[1][..., 0], torch.inf)
        missing = -bias.shape[1] % GROUP
        bias = torch.nn.functional.pad(bias, (0, missing), value=torch.inf)
        b = torch.nn.functional.pad(b, (0, 0, 0, missing))
        of_queries = a.double().square().sum(2) * (1 - slack) - 32 * a.shape[2] * limits.tiny
        a = torch.cat([-2 * a, torch.ones_like(a[..., :1])], dim=2)
        b = torch.cat([b, bias[..., None]], dim=2)
        return cls(a, b.mT, of_queries, finite[0][..., 0], scale, slack)

    def values(self, rows: slice) -> Float[Tensor, "b rows n"]:
        """Below the scaled squared distance when ``of_queries`` is added, whatever was rounded."""
        return self.query[:, rows] @ self.reference

    def are_nearest(
        self, rows: slice, kth: Float[Tensor, "b rows"], bound: Float[Tensor, "b rows"]
    ) -> Tensor:
        """Whether no point is as near as the squared distance ``kth`` if its value is at least ``bound``."""
        nearer = kth * self.scale[..., 0].square() < bound.double() + self.of_queries[:, rows]
        return nearer | (bound == torch.inf) | ~self.searched[:, rows]


def _product_dtype(points: Tensor) -> torch.dtype:
    """float64 where torch was told to round float32 products more than float32 does."""
    device = torch.backends.cuda if points.is_cuda else torch.backends.mkldnn
    return points.dtype if device.matmul.fp32_precision in EXACT_PRODUCTS else torch.float64


def _smallest(
    values: Float[Tensor, "b m n"], count: int
) -> tuple[Int[Tensor, "b m count"], Float[Tensor, "b m"]]:
    """Columns of the least values in each row, and the largest of these values."""
    groups = values.unflatten(2, (-1, GROUP))
    chosen = None
    if groups.shape[2] > 2 * count:  # the least values are in the groups with the least first
        chosen = groups.amin(3).topk(count, largest=False, sorted=False).indices
        values = groups.gather(2, chosen[..., None].expand(-1, -1, -1, GROUP)).flatten(2)
    least = values.topk(count, largest=False, sorted=False)
    columns = least.indices
    if chosen is not None:
        columns = chosen.gather(2, columns // GROUP) * GROUP + columns % GROUP
    return columns, least.values.amax(2)


def _ranked(
    query: Float[Tensor, "b m d"], reference: Float[Tensor, "b n d"], columns: Int[Tensor, "b m c"], k: int
) -> tuple[Float[Tensor, "b m k"], Int[Tensor, "b m k"]]:
    """Squared distances and columns of the nearest among ascending columns, the lower of equal ones first."""
    n = reference.shape[1]
    firsts = n * torch.arange(len(reference), device=columns.device)[:, None, None]
    found = reference.flatten(0, 1)[columns.clamp(max=n - 1) + firsts]
    squared = _sum_of_squares(query[:, :, None].double() - found.double())
    squared = squared.nan_to_num(nan=torch.inf).masked_fill(columns >= n, torch.inf)
    squared, order = squared.sort(dim=2, stable=True)
    return squared[..., :k], columns.expand_as(order).gather(2, order[..., :k])


def _sum_of_squares(delta: Float[Tensor, "*pairs d"]) -> Float[Tensor, "*pairs"]:
    """Halves of the squares added until one is left: the same bits on every device."""
    squares = delta * delta
    while squares.shape[-1] > 1:
        half, rest = squares.tensor_split([(squares.shape[-1] + 1) // 2], dim=-1)
        half[..., : rest.shape[-1]] += rest
        squares = half
    return squares[..., 0]


def _parts(rows: int, values_per_row: int, device: torch.device) -> Iterator[slice]:
    size = _at_once(values_per_row, device)
    return (slice(first, min(first + size, rows)) for first in range(0, rows, size))


def _at_once(values_of_each: int, device: torch.device) -> int:
    """How many may be in a chunk."""
    return max(1, VALUES_AT_ONCE[device.type] // max(1, values_of_each))


_nearest = torch_op("pointproj::brute_force_nearest", _nearest_body, nearest_specs(None, torch.int64))

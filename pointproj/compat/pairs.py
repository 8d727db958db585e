"""What the drop-ins share: points as other libraries take them, and searches for all such points.

:func:`nearest` and :func:`within` take any number of coordinates, clouds without points, and a k larger than
the number of points.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.backends.torch import brute_force
from pointproj.ops.backends.torch.distances import with_gradient
from pointproj.ops.calls import checked_clouds
from pointproj.ops.functional import build_index, knn
from pointproj.ops.neighbor_lists import radius_neighbors
from pointproj.ops.specification.clouds import Clouds, queries_of
from pointproj.ops.specification.reference import squared_lengths
from pointproj.ops.specification.rounding import radius_in_range, rounded_root
from pointproj.ops.torch_internals import filled, is_known

Radius = float | Float[Tensor, "*batch q"]


class SortedPairs(NamedTuple):
    """Pairs of a query and a reference point, sorted by query, then by reference point.

    The pairs of query i are ``row_splits[i]:row_splits[i + 1]``; ``queries`` and ``rows`` number packed
    points. Distances are differentiable twice in both sets of points.
    """

    row_splits: Int[Tensor, " q+1"]
    queries: Int[Tensor, " pairs"]
    rows: Int[Tensor, " pairs"]
    distances: Float[Tensor, " pairs"]


def array(name: str, values: object) -> Tensor:
    """A tensor as it is; an array or list of numbers as a tensor on the CPU.

    What torch has no dtype for is rounded to float64: long doubles, and objects such as fractions.
    """
    if isinstance(values, Tensor):
        return values
    try:
        given = np.asarray(values)
        if given.dtype == np.longdouble or given.dtype == object:
            given = given.astype(np.float64)
        native = given.dtype.newbyteorder("=")
        return torch.from_numpy(np.require(given, native, ["C", "W"]))  # never on torch's default device
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be a tensor, an array or a list of numbers; got {type(values).__name__}"
        ) from error


def coordinates(**points: Tensor) -> tuple[Float[Tensor, "*points d"], ...]:
    """Points in one dtype and in shapes that the operators take, with the same distances.

    Half precision becomes float32 and integers become float64. Points on a line get a second coordinate,
    which is 0. The errors name the arguments given here: TypeError for what is no tensor of real numbers,
    ValueError for different numbers of coordinates or different devices.
    """
    widened = {}
    for name, values in points.items():
        if not isinstance(values, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(values).__name__}")
        if values.is_complex():
            raise TypeError(
                f"{name} must be real; got complex data: torch.view_as_real makes coordinates of it"
            )
        if values.ndim == 0 or values.shape[-1] == 0:
            raise ValueError(f"{name} must have shape (..., coordinates); got {tuple(values.shape)}")
        wide = torch.float32 if values.is_floating_point() else torch.float64
        widened[name] = values.to(torch.promote_types(values.dtype, wide))
    (first, like), *others = widened.items()
    for name, values in others:
        if values.shape[-1] != like.shape[-1]:
            raise ValueError(
                f"{first} and {name} must have equally many coordinates; got shapes {tuple(like.shape)} and "
                f"{tuple(values.shape)}"
            )
        if values.device != like.device:
            raise ValueError(f"{first} is on {like.device} and {name} on {values.device}: move one of them")
    dtype = functools.reduce(torch.promote_types, (values.dtype for values in widened.values()))
    on_a_line = like.shape[-1] == 1
    return tuple(
        torch.nn.functional.pad(values.to(dtype), (0, 1)) if on_a_line else values.to(dtype)
        for values in widened.values()
    )


def narrowed(values: Float[Tensor, "*shape"], *points: Tensor) -> Float[Tensor, "*shape"]:
    """Values computed from :func:`coordinates` of these points, in the dtype that these have together."""
    dtype = functools.reduce(torch.promote_types, (given.dtype for given in points))
    return values.to(dtype) if dtype.is_floating_point else values


def number_or_tensor(name: str, radius: object, shape: tuple[int, ...], like: Tensor) -> Radius:
    """A radius that the searches take: one number, or a tensor of this shape; ValueError for others.

    The radius 0 finds coincident points. A number beyond the dtype's largest finds all points at a finite
    distance.
    """
    if not isinstance(radius, float | int):
        radius = array(name, radius)
        if radius.ndim == 0:
            radius = radius.item()
    if isinstance(radius, Tensor):
        try:
            return radius.detach().to(like).expand(shape)
        except RuntimeError as error:
            raise ValueError(
                f"{name} must be a number, or have shape {shape}; got {tuple(radius.shape)}"
            ) from error
    if not radius >= 0:
        raise ValueError(f"{name} must not be negative; got {radius}")
    return radius_in_range(radius, like.dtype)


def nearest(
    query_points: Float[Tensor, "*batch q d"],
    reference_points: Float[Tensor, "*batch n d"],
    k: int,
    **search: object,
) -> tuple[Float[Tensor, "*batch q k"], Int[Tensor, "*batch q k"]]:
    """:func:`pointproj.knn` for any k: slots beyond the number of points have distance inf and row -1."""
    found = min(k, reference_points.shape[-2])
    if found:
        distances, rows = knn(query_points, reference_points, found, **search)
    else:
        rows = torch.empty(*query_points.shape[:-1], 0, dtype=torch.int64, device=query_points.device)
        distances = rows.to(query_points.dtype)
    if found == k:
        return distances, rows
    pad = torch.nn.functional.pad
    return pad(distances, (0, k - found), value=torch.inf), pad(rows, (0, k - found), value=-1)


def within(
    query_points: Float[Tensor, "*batch q d"],
    reference_points: Float[Tensor, "*batch n d"],
    radius: Radius,
    query_offsets: Int[Tensor, " clouds+1"] | None = None,
    reference_offsets: Int[Tensor, " clouds+1"] | None = None,
) -> SortedPairs:
    """All pairs with ``distance <= radius``; waits for the device.

    The radius is a normal number of the points' dtype. Unlike :func:`pointproj.radius_neighbors` with
    ``capacity=None``, it can be compiled.
    """
    points = query_points, reference_points
    if query_points.ndim == reference_points.ndim == 3:
        if len(query_points) > 1:
            clouds = torch.arange(len(query_points) + 1, device=query_points.device)
            query_offsets, reference_offsets = (clouds * p.shape[1] for p in points)
        points = (p.flatten(0, 1) for p in points)
    clouds = checked_clouds(*points, query_offsets, reference_offsets, in_space=False)
    radius = _of_queries(radius, query_points, query_points.dtype)
    number, radii = (0.0, radius.reshape(-1)) if isinstance(radius, Tensor) else (radius, None)
    row_splits, rows, distances = _within(*clouds.detached(), number, radii)
    distances = with_gradient(distances, rows, clouds, row_splits)
    return SortedPairs(row_splits, queries_of(row_splits, rows.shape[0]), rows, distances)


def _of_queries(radius: Radius, query_points: Tensor, dtype: torch.dtype) -> Radius:
    """The radius of each query instead of a number that torch.compile leaves open."""
    if isinstance(radius, Tensor) or is_known(radius):
        return radius
    return filled(query_points.shape[:-1], radius, dtype, query_points.device)


@torch.library.custom_op("pointproj::pairs_within", mutates_args=())
def _within(
    query_points: Tensor,
    query_offsets: Tensor | None,
    reference_points: Tensor,
    reference_offsets: Tensor | None,
    clouds: int,
    radius: float,
    radii: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Row splits, rows and distances for a radius, or the radius of each query if these are given."""
    if query_points.shape[1] > 3:
        packed = Clouds(query_points, query_offsets, reference_points, reference_offsets, clouds)
        every = query_points.new_full((len(query_points),), radius) if radii is None else radii
        return brute_force.radius_list(packed, every)
    offsets = {"query_offsets": query_offsets, "reference_offsets": reference_offsets}
    each = radius if radii is None else radii
    found = radius_neighbors(query_points, reference_points, each, capacity=None, **offsets)
    return found.row_splits, found.indices, found.distances


@_within.register_fake
def _(query_points: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    pairs = torch.library.get_ctx().new_dynamic_size()
    row_splits = query_points.new_empty(query_points.shape[0] + 1, dtype=torch.int64)
    return row_splits, row_splits.new_empty(pairs), query_points.new_empty(pairs)


def boundary(radius: Radius, points: Tensor) -> tuple[Radius, Radius]:
    """The radius to search with, and its square, for libraries that compare squared distances.

    These libraries compare a squared distance with radius * radius, which rounded square roots cannot decide.
    But rounding a root keeps the order: a search up to the root of the rounded square finds every pair whose
    square is as large or smaller, and the squares then decide. With more than three coordinates the search is
    in float64, so its radius is larger by the rounding error of the squares.
    """
    limits = torch.finfo(points.dtype)
    farther = 1 + (points.shape[-1] > 3) * points.shape[-1] * limits.eps
    radius = _of_queries(radius, points, torch.float64)
    if isinstance(radius, Tensor):
        squared = radius.square().to(points.dtype)
        return (rounded_root(squared) * farther).clamp(limits.tiny, limits.max), squared
    squared = torch.tensor(
        radius * radius, dtype=points.dtype, device="cpu"
    )  # the product in float64, then rounded
    return radius_in_range(rounded_root(squared).item() * farther, points.dtype), squared.item()


def of_pairs(radius: Radius, queries: Int[Tensor, " pairs"]) -> Radius:
    """The number, or that of each pair's query."""
    return radius.flatten()[queries] if isinstance(radius, Tensor) else radius


def pairs_within(
    query_points: Float[Tensor, "*batch q d"],
    reference_points: Float[Tensor, "*batch n d"],
    radius: Radius,
    *,
    inclusive: bool,
    box: tuple[float, ...] | None = None,
    **offsets: Int[Tensor, " clouds+1"] | None,
) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"], Float[Tensor, " pairs"]]:
    """All pairs within the radius, sorted by query, then by reference point; waits for the device twice.

    Points are those of :func:`coordinates`, one cloud or a dense batch; offsets are those of :func:`within`.
    ``inclusive`` says whether a pair belongs to it whose squared distance is exactly radius * radius. ``box``
    is that of :func:`pointproj.radius_neighbors`, for 2 or 3 coordinates.

    Returns
    -------
    queries : (pairs,) int64 tensor
        Packed rows of the query points.
    rows : (pairs,) int64 tensor
        Rows of the reference points; in a dense batch, rows within the cloud.
    squared : (pairs,) float tensor
        Squared distances, differentiable twice in both sets of points.
    """
    search_radius, squared_radius = boundary(radius, query_points)
    if box is None:
        found = within(query_points, reference_points, search_radius, **offsets)
        queries, rows = found.queries, found.rows
        delta = query_points.flatten(0, -2)[queries] - reference_points.flatten(0, -2)[rows]
    else:
        found = radius_neighbors(
            query_points, reference_points, search_radius, capacity=None, displacements=True, box=box
        )
        queries, rows, delta = found.query_indices, found.indices, found.displacements
    squared = squared_lengths(delta)
    limit = of_pairs(squared_radius, queries)
    chosen = (squared <= limit if inclusive else squared < limit).nonzero()[:, 0]
    queries, rows = queries[chosen], rows[chosen]
    if query_points.ndim == 3:
        rows = rows - queries // query_points.shape[1] * reference_points.shape[1]
    return queries, rows, squared[chosen]


def first_within(
    query_points: Float[Tensor, "b q d"], reference_points: Float[Tensor, "b n d"], radius: float, k: int
) -> tuple[Float[Tensor, "b q k"], Int[Tensor, "b q k"]]:
    """The first k reference points, by their index, that are nearer than the radius.

    The radius is rounded to the points' dtype before it is squared, as in the libraries that return the
    first. The squared distances are differentiable twice in both sets of points. The rows, those within the
    cloud, ascend. Where there are fewer than k, squared distances are 0 and rows -1.
    """
    if is_known(radius):
        radius = torch.tensor(radius, dtype=query_points.dtype, device="cpu").item()
    radius = _of_queries(radius, query_points, query_points.dtype)
    queries, found, squared = pairs_within(query_points, reference_points, radius, inclusive=False)
    shape = (*query_points.shape[:2], k)
    rank, count = ranks(queries), shape[0] * shape[1] * k
    slots = torch.where(rank < k, queries * k + rank, count)  # pairs beyond k go to the last slot
    indices = found.new_full((count + 1,), -1).scatter(0, slots, found)
    squares = squared.new_zeros(count + 1).scatter(0, slots, squared)
    return squares[:-1].view(shape), indices[:-1].view(shape)


class SearchedPoints:
    """Points that several calls search, and their index, if an index can be built."""

    def __init__(self, **points: Tensor) -> None:
        """Take one set of points; errors name it by the keyword."""
        self.given = points
        (searched,) = coordinates(**points)
        with_index = searched.shape[0] > 0 and searched.shape[1] <= 3
        self._index = build_index(searched.detach()) if with_index else None

    def beside(self, **query: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and these points as :func:`coordinates` gives them."""
        return coordinates(**query, **self.given)

    def nearest(self, k: int, box: tuple[float, ...] | None = None, **query: Tensor) -> tuple[Tensor, Tensor]:
        """:func:`nearest` of queries."""
        query_points, points = self.beside(**query)
        usable = self._index is not None and self._index.dtype == points.dtype
        return nearest(query_points, points, k, box=box, index=self._index if usable else None)


def random_rows(sizes: Int[Tensor, " clouds"]) -> Int[Tensor, " clouds"]:
    """A random row of each cloud, by torch's generator; 0 for a cloud without points."""
    drawn = torch.rand(sizes.shape, device=sizes.device) * sizes
    return torch.minimum(drawn.long(), sizes - 1).clamp(min=0)


def others(rows: Int[Tensor, "q k+1"]) -> Int[Tensor, "q k"]:
    """For each row, the columns that do not hold its own number; all but the last if none holds it."""
    own = rows == torch.arange(len(rows), device=rows.device)[:, None]
    own[:, -1] |= ~own.any(1)  # missing among many points that coincide
    return own.int().argsort(dim=1, stable=True)[:, :-1]


def ranks(queries: Int[Tensor, " pairs"]) -> Int[Tensor, " pairs"]:
    """For each pair, how many pairs of the same query stand before it; queries ascend."""
    return torch.arange(len(queries), device=queries.device) - torch.searchsorted(queries, queries)


def by_distance(queries: Int[Tensor, " pairs"], squared: Float[Tensor, " pairs"]) -> Int[Tensor, " pairs"]:
    """The order that sorts pairs by query, then by distance, and leaves ties as they are."""
    nearest_first = squared.argsort(stable=True)
    return nearest_first[queries[nearest_first].argsort(stable=True)]


def split(values: Tensor, counts: Int[Tensor, " rows"]) -> np.ndarray:
    """One tensor for each row, in an array of objects."""
    parts = values.split(counts.tolist())
    return np.fromiter(parts, dtype=object, count=len(parts))

"""``radius_search``, ``knn``, the ball query layer and FIGConvNet's search of nvidia-physicsnemo 2.2.

    install()  # all of the library's models search with pointproj from here on
    radius_search(points, queries, radius, max_points)  # or its functions, one by one

Empty slots of ``radius_search`` are as in the library: index 0, distance 0 and point (0, 0, 0). So index 0
may be an empty slot or the first point; a distance above 0 shows that it is the point. The lists of
:func:`pointproj.radius_neighbors` are unambiguous. As in the library, returned points have no gradient to the
queries.

Where the library's implementations differ, this one does what the documentation says. It returns the
``max_points`` nearest neighbours, nearest first, equal distances by the lower index (as the library's torch;
its Warp takes the first that it finds). Distances have a gradient to both sets of points (as in torch; with
Warp the gradient is None, without an error). float64 is searched in float64 (as in torch; Warp rounds to
float32). Indices are int32, as in Warp, the library's default.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pointproj.compat.pairs import coordinates, nearest, number_or_tensor, within
from pointproj.ops.specification.clouds import as_dtype, distinct_rows, rows_of

NAME = "pointproj"  # of the implementations
RANK = -1  # the implementation of lowest rank is chosen; the library's begin at 0
MOST_PAIRS = torch.iinfo(torch.int32).max
FIGCONVNET = ("radius_search_warp", "batched_radius_search_warp")

_replaced: list[Callable] = []  # the library's dispatcher while ours is installed


def radius_search(
    points: Tensor,
    queries: Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
    implementation: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Points within a radius of each query: the nearest ``max_points``, or all.

    Clouds are (N, 3) and (Q, 3), or (B, N, 3) and (B, Q, 3); of two dtypes both are searched in the wider
    one, float16 and bfloat16 in float32. A point at exactly the radius is within. ``implementation`` is not
    read: it chooses among the library's own implementations. With ``max_points`` shapes are fixed, and
    nothing waits for the device; None finds all neighbours and waits twice.

    Returns
    -------
    indices : int32 tensor
        (..., Q, max_points), 0 in empty slots. With ``max_points=None`` (2, M), query and point of each pair
        in the order of the queries, or (3, M) with the batch before them.
    points : tensor, with ``return_points``
        (..., Q, max_points, 3) with 0 in empty slots, or (M, 3). Differentiable in ``points``.
    distances : tensor, with ``return_dists``
        (..., Q, max_points) with 0 in empty slots, or (M,), in the dtype of ``points``. Differentiable in
        both sets of points.

    Raises
    ------
    TypeError, ValueError
        If the ranks or batches differ, as in the library; for a negative radius, and for points that are not
        real numbers or not on one device.
    RuntimeError
        If there are more pairs than int32 counts, as in the library.
    """
    if points.ndim != queries.ndim or points.ndim not in (2, 3):
        raise ValueError(
            f"points and queries must be 2D (N, 3) or 3D (B, N, 3), got {points.ndim}D and {queries.ndim}D"
        )
    if points.ndim == 3 and points.shape[0] != queries.shape[0]:
        raise ValueError(
            f"Batch dimensions must match: points has {points.shape[0]}, queries has {queries.shape[0]}"
        )
    dtype = points.dtype
    points, queries = coordinates(points=points, queries=queries)
    radius = number_or_tensor("radius", radius, (), points)
    if not return_dists:
        queries = queries.detach()
    search = _all_within if max_points is None else _nearest_within
    indices, neighbors, distances = search(points, queries, radius, max_points)
    found = [as_dtype(indices, torch.int32)]
    if return_points:
        found.append(as_dtype(neighbors(), dtype))
    if return_dists:
        found.append(as_dtype(distances(), dtype))
    return tuple(found) if len(found) > 1 else found[0]


def knn(points: Tensor, queries: Tensor, k: int, implementation: str | None = None) -> tuple[Tensor, Tensor]:
    """The k nearest points (N, D) of each query (Q, D), of the same dtype and on the same device.

    float16 and bfloat16 are searched in float32. With more than 3 coordinates all pairs are compared, in
    chunks, and the host waits for the device. ``implementation`` is not read.

    Returns
    -------
    indices : (Q, k) int64 tensor
        Nearest first, equal distances by the lower index. N in slots beyond the N-th, as with scipy there.
    distances : (Q, k) tensor
        In the dtype of the points, inf in slots beyond the N-th. Differentiable in both sets of points, as
        the library's torch implementation; scipy and cuML, which it prefers, have no gradient.

    Raises
    ------
    ValueError
        If devices or dtypes differ, as in the library, or k is below 1.
    """
    for what in ("device", "dtype"):
        one, other = getattr(points, what), getattr(queries, what)
        if one != other:
            raise ValueError(f"points and queries must have the same {what}, got {one} and {other}")
    reference_points, query_points = coordinates(points=points, queries=queries)
    distances, indices = nearest(query_points, reference_points, k)
    return torch.where(indices < 0, len(points), indices), distances.to(points.dtype)


class BQWarp(nn.Module):
    """The library's ball query layer: the neighbours of grid points, or of points on a grid.

    ``radius`` and ``neighbors_in_radius`` are those of :func:`radius_search`.
    """

    def __init__(self, radius: float = 0.25, neighbors_in_radius: int | None = 10) -> None:
        super().__init__()
        self.radius = radius
        self.neighbors_in_radius = neighbors_in_radius

    def forward(self, x: Tensor, p_grid: Tensor, reverse_mapping: bool = True) -> tuple[Tensor, Tensor]:
        """Indices and points of :func:`radius_search` for ``x`` (B, N, 3) and ``p_grid`` (B, ..., 3).

        The grid has 1 to 3 dimensions; ValueError for others, and for points without 3 coordinates.
        ``reverse_mapping`` finds points of ``x`` for each point of ``p_grid``; False finds points of
        ``p_grid`` for each of ``x``. So does the library, whose documentation says the opposite.
        """
        if not p_grid.shape[-1] == x.shape[-1] == 3:
            raise ValueError(
                f"The last dimension of p_grid and x must be 3, got {tuple(p_grid.shape)}, {tuple(x.shape)}"
            )
        if not 3 <= p_grid.ndim <= 5:
            raise ValueError(f"p_grid must have 3 to 5 dimensions, got {p_grid.ndim}")
        grid = p_grid.flatten(1, -2)
        points, queries = (x, grid) if reverse_mapping else (grid, x)
        return radius_search(points, queries, self.radius, self.neighbors_in_radius, return_points=True)


def radius_search_warp(
    points: Tensor, queries: Tensor, radius: float, grid_dim: int | tuple[int, int, int] = (128, 128, 128)
) -> tuple[Tensor, Tensor, Tensor]:
    """All points within a radius of each query, as FIGConvNet searches; waits for the device.

    Clouds are (N, 3) and (M, 3), or for ``batched_radius_search_warp``, which is the same function,
    (B, N, 3) and (B, M, 3). A point at exactly the radius is within. Points need not be contiguous, and
    float64 is searched in float64; theirs takes float32 alone. ``grid_dim`` is not read.

    Returns
    -------
    neighbor_index : (pairs,) int32 tensor
        Rows of the packed points, ascending for each query (theirs: as found).
    neighbor_distance : (pairs,) tensor
        In the points' dtype, without gradient.
    neighbor_split : (M + 1,) or (B * M + 1,) int32 tensor
        Where the pairs of each query begin and end.

    Raises
    ------
    ValueError
        If there are more pairs than int32 counts, as in the library.
    """
    dtype = points.dtype
    points, queries = coordinates(points=points.detach(), queries=queries.detach())
    found = within(queries, points, number_or_tensor("radius", radius, (), points))
    if len(found.rows) >= MOST_PAIRS:
        raise ValueError(f"found {len(found.rows)} neighbors, expected fewer than 2**31 - 1")
    return found.rows.int(), as_dtype(found.distances, dtype), found.row_splits.int()


batched_radius_search_warp = radius_search_warp


def install() -> None:
    """Make these functions the library's default, in its models too; a second call changes nothing.

    They are added as the implementation "pointproj". The others can still be named: ``radius_search(...,
    implementation="warp")``. Sharded tensors have an implementation only in Warp: name it for them.

    Raises
    ------
    ImportError
        If the library is not installed.
    """
    from physicsnemo.core.function_spec import Implementation
    from physicsnemo.models.figconvnet import neighbor_ops
    from physicsnemo.nn.functional.neighbors.knn import KNN
    from physicsnemo.nn.functional.neighbors.radius_search import RadiusSearch

    if NAME in RadiusSearch.implementations():
        return
    for spec, function in ((RadiusSearch, radius_search), (KNN, knn)):
        spec._register_impl(Implementation(NAME, function, required_imports=(), rank=RANK, baseline=False))
    theirs = KNN.dispatch  # chooses by name, not by rank

    def dispatch(cls, points: Tensor, queries: Tensor, k: int, implementation: str | None = None):
        return theirs(points, queries, k, implementation or NAME)

    KNN.dispatch = classmethod(dispatch)
    _replaced.append(theirs)
    for name in FIGCONVNET:
        setattr(neighbor_ops, name, radius_search_warp)


def uninstall() -> None:
    """Undo :func:`install`."""
    from physicsnemo.models.figconvnet import neighbor_ops, warp_neighbor_search
    from physicsnemo.nn.functional.neighbors.knn import KNN
    from physicsnemo.nn.functional.neighbors.radius_search import RadiusSearch

    while _replaced:
        for spec in (RadiusSearch, KNN):
            del spec._get_impls()[NAME]
        KNN.dispatch = _replaced.pop()
        for name in FIGCONVNET:
            setattr(neighbor_ops, name, getattr(warp_neighbor_search, name))


def _nearest_within(
    points: Tensor, queries: Tensor, radius: float, max_points: int
) -> tuple[Tensor, Callable[[], Tensor], Callable[[], Tensor]]:
    """Indices (..., Q, max_points), and functions that return the points there and the distances."""
    shape, size = (*queries.shape[:-1], max_points), points.shape[-2]
    if points.ndim == 3 and len(points) == 1:
        points, queries = points[0], queries[0]
    distances, rows = nearest(
        queries, points, min(max_points, size), max_radius=radius, index_dtype=torch.int32
    )
    missing = rows < 0

    def filled(found: Tensor, *of_pair: int) -> Tensor:
        """0 in empty slots."""
        found.masked_fill_(missing[..., None] if of_pair else missing, 0)
        if size < max_points:
            found = pad(found, (0, 0) * len(of_pair) + (0, max_points - size))
        return found.view(*shape, *of_pair)

    def neighbors() -> Tensor:
        at = distinct_rows(rows.flatten(0, -2), ~missing.flatten(0, -2), size).view(rows.shape)
        if points.ndim == 3:
            at = at + torch.arange(0, points.shape[:2].numel(), size, device=at.device)[:, None, None]
        return filled(rows_of(points.flatten(0, -2), at), points.shape[-1])

    return filled(rows.clone()), neighbors, lambda: filled(distances.clone())


def _all_within(
    points: Tensor, queries: Tensor, radius: float, _: None
) -> tuple[Tensor, Callable[[], Tensor], Callable[[], Tensor]]:
    """Indices (2 or 3, M), and functions that return the points there and the distances (M,)."""
    found = within(queries, points, radius)
    if not torch.compiler.is_compiling() and len(found.rows) >= MOST_PAIRS:
        raise RuntimeError(
            f"found {len(found.rows)} neighbors, expected fewer than 2**31 - 1: set max_points"
        )
    pairs = [found.queries, found.rows]
    if points.ndim == 3:
        clouds = found.queries // queries.shape[1]
        pairs = [clouds, found.queries % queries.shape[1], found.rows % points.shape[1]]
    chosen = points.flatten(0, -2)
    return torch.stack(pairs), lambda: chosen.index_select(0, found.rows), lambda: found.distances

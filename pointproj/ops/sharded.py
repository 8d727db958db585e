"""One cloud and several processes, each with a device: the operators, with the work divided among them.

Every process calls the operator with queries of its own and gets their results. The cloud is either

- replicated: every process holds all reference points and features, and an index over them; or
- in slabs: every process has some of the reference points, any of them, and :func:`make_slabs` gives each
  process a slab of space to search. A query is sent to the process of its slab, and the result is sent back.
  A reference point is sent to the other processes whose slabs lie within the radius of it. If points already
  are in the slab of their process, these are only the points near a border: the halo. Queries that the halo
  cannot reach are searched for among the process's own points, the others in a small cloud that has the halo.

Values and gradients are those of one device with all rows, for a loss that is summed over the processes. What
is replicated has its whole gradient in every process. All calls are collective: every process of the group
makes them, in the same order, even if it has no points.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from pointproj.ops import arguments, functional

SAMPLE = 2**18  # reference points, of all processes, that say where slabs of equal size end
SLACK = 16.0  # rounding errors, in units of the largest coordinate, that a distance can have


class Route(NamedTuple):
    """Rows that one process sends to the others, and how many it gets."""

    rows: Tensor  # int64: rows to send, those for process 0 first
    sent: list[int]  # how many to each process
    received: list[int]


class Slabs(NamedTuple):
    """Which process searches where, from :func:`make_slabs`; valid for the points it was made from."""

    radius: float
    axis: int
    queries: Route  # rows in other processes' slabs
    references: Route  # rows that other processes need; each process also keeps its own
    others: (
        Tensor  # rows of the queries that halo may be within the radius of (border), then of those sent away
    )
    near: Tensor  # rows of the reference points within the radius of border queries and of those that arrive
    sizes: tuple[int, int]  # queries and reference points of this process
    dtype: torch.dtype
    group: ProcessGroup | None


def replicated(tensor: Float[Tensor, "*shape"], group: ProcessGroup | None = None) -> Float[Tensor, "*shape"]:
    """Return ``tensor``, which is the same in every process; its gradient is summed over the processes.

    With it a loss of any function of replicated tensors, evaluated on each process's own queries, has the
    gradient that it has on one device.

    Parameters
    ----------
    tensor : float tensor of any shape
        The same values in every process.
    group : ProcessGroup, optional
        Of torch.distributed; None for all processes.

    Returns
    -------
    float tensor of that shape
    """
    tensor = tensor.view_as(tensor)
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: _Sum.apply(grad, group))
    return tensor


def knn_aggregate(
    query_points: Float[Tensor, "*batch q 3"],
    reference_points: Float[Tensor, "*batch n 3"],
    features: Float[Tensor, "*batch n c"],
    k: int,
    *,
    sigma: float | Float[Tensor, ""] = 0.1,
    index: functional.Index | None = None,
    backend: str = "auto",
    group: ProcessGroup | None = None,
) -> Float[Tensor, "*batch q c"]:
    """:func:`pointproj.knn_aggregate` for this process's queries in a replicated cloud.

    Parameters
    ----------
    query_points : (..., Q, 3) float tensor
        Of this process.
    reference_points : (..., N, 3) float tensor
        The same in every process; its gradient is summed over the processes.
    features, sigma
        Likewise.
    k, index, backend
        As for one device.
    group : ProcessGroup, optional
        Of torch.distributed; None for all processes.

    Returns
    -------
    (..., Q, C) float tensor
        For the queries of this process.
    """
    *cloud, sigma = _replicated(group, reference_points, features, sigma)
    return functional.knn_aggregate(query_points, *cloud, k, sigma=sigma, index=index, backend=backend)


def radius_aggregate(
    query_points: Float[Tensor, "*batch q 3"],
    reference_points: Float[Tensor, "*batch n 3"],
    features: Float[Tensor, "*batch n c"],
    radius: float,
    *,
    sigma: float | Float[Tensor, ""] = 0.1,
    index: functional.Index | None = None,
    backend: str = "auto",
    group: ProcessGroup | None = None,
    slabs: Slabs | None = None,
) -> Float[Tensor, "*batch q c"]:
    """:func:`pointproj.radius_aggregate` for this process's queries, in a replicated cloud or in slabs.

    Parameters
    ----------
    query_points : (..., Q, 3) float tensor
        Of this process.
    reference_points : (..., N, 3) float tensor
        The same in every process, with the gradient summed over the processes. With ``slabs``: the points of
        this process that :func:`make_slabs` was given, with their own gradient.
    features : (..., N, C) float tensor
        One row for each of these points, with its gradient as for them.
    radius, backend
        As for one device.
    sigma : float or float tensor of one element
        The same in every process; its gradient is summed over the processes.
    index : Index, optional
        Over the replicated cloud. Not with ``slabs``, which build their own.
    group : ProcessGroup, optional
        Of torch.distributed; None for all processes. Ignored with ``slabs``, which have their own group.
    slabs : Slabs, optional
        Division of the cloud, from :func:`make_slabs`; None for a replicated cloud.

    Returns
    -------
    (..., Q, C) float tensor
        For the queries of this process.

    Raises
    ------
    ValueError
        If ``slabs`` belong to other points, to a smaller radius, or come with an index.
    """
    if slabs is None:
        *cloud, sigma = _replicated(group, reference_points, features, sigma)
        return functional.radius_aggregate(
            query_points, *cloud, radius, sigma=sigma, index=index, backend=backend
        )
    arguments.check_points(query_points, reference_points)
    _check_slabs(slabs, query_points, reference_points, radius, index)
    arguments.check_features(features, reference_points)
    group, away = slabs.group, slabs.queries
    here = len(slabs.others) - len(away.rows)
    others = query_points.index_select(0, slabs.others)
    arrived = _Exchange.apply(others[here:], away.sent, away.received, group)
    (sigma,) = _replicated(group, sigma)
    clouds = (_Border.apply(tensor, slabs) for tensor in (reference_points, features))
    whole, border = zip(*clouds, strict=True)
    # A query that is no point finds nothing: results are in the order of the queries, without a copy.
    inner = query_points.index_fill(0, slabs.others, torch.nan)
    results, found = [
        functional.radius_aggregate(queries, *cloud, radius, sigma=sigma, backend=backend)
        for queries, cloud in ((inner, whole), (torch.cat([others[:here], arrived]), border))
    ]
    returned = _Exchange.apply(found[here:], away.received, away.sent, group)
    return _Place.apply(results, slabs.others, torch.cat([found[:here], returned]))


@torch.no_grad()
def make_slabs(
    query_points: Float[Tensor, "q 3"],
    reference_points: Float[Tensor, "n 3"],
    radius: float,
    *,
    group: ProcessGroup | None = None,
) -> Slabs:
    """Divide space into one slab for each process, with about equally many reference points in each.

    Slabs lie along the longest side of the cloud. This waits for the device, once for a cloud; the operator
    calls that follow do not.

    Parameters
    ----------
    query_points : (Q, 3) float tensor
        Queries of this process, float32 or float64.
    reference_points : (N, 3) float tensor
        Reference points of this process, of the same dtype. The cloud may be divided among the processes in
        any way, but points outside of their process's slab are stored and searched by two processes.
    radius : float
        The largest radius that :func:`radius_aggregate` will be called with.
    group : ProcessGroup, optional
        Of torch.distributed; None for all processes.

    Returns
    -------
    Slabs
        For :func:`radius_aggregate` with these points.
    """
    arguments.check_points(query_points, reference_points)
    radius = arguments.checked_radius(radius, reference_points.dtype)
    if query_points.ndim != 2:
        raise ValueError(f"slabs divide one cloud, points (n, 3); got {tuple(query_points.shape)}")
    finite = reference_points.isfinite().all(1)
    axis, bounds, largest = _bounds(reference_points[finite], group)
    farthest = radius + SLACK * torch.finfo(reference_points.dtype).eps * (largest + radius)
    along = reference_points[:, axis]
    first, last = (torch.searchsorted(bounds, along + way, right=True) for way in (-farthest, farthest))
    places = range(dist.get_world_size(group))
    near = [torch.nonzero(finite & (first <= place) & (place <= last)).squeeze(1) for place in places]
    near[dist.get_rank(group)] = near[0][:0]  # a process has its own rows
    across = query_points[:, axis].contiguous()
    owner = torch.searchsorted(bounds, across, right=True)
    away = [torch.nonzero(owner == place).squeeze(1) for place in places]
    here = away[dist.get_rank(group)]
    away[dist.get_rank(group)] = here[:0]
    queries, references = _route(away, group), _route(near, group)
    reached = _any_within(_sent(along, references, group), across[here], farthest)
    border = here[reached]
    asked = torch.cat([across[border], _sent(across, queries, group)])
    close = torch.nonzero(_any_within(asked, along, farthest)).squeeze(1)
    others = torch.cat([border, queries.rows])
    sizes = len(query_points), len(reference_points)
    dtype = reference_points.dtype
    return Slabs(radius, axis, queries, references, others, close, sizes, dtype, group)


def _sent(values: Tensor, route: Route, group: ProcessGroup | None) -> Tensor:
    return _Exchange.apply(values[route.rows], route.sent, route.received, group)


def _any_within(values: Tensor, of: Tensor, distance: float) -> Tensor:
    """Which numbers have one of ``values`` within ``distance``."""
    values = values.sort().values
    first = torch.searchsorted(values, of - distance)
    return first < torch.searchsorted(values, of + distance, right=True)


def _bounds(points: Tensor, group: ProcessGroup | None) -> tuple[int, Tensor, float]:
    """The longest axis of the whole cloud, where its slabs end, and its largest coordinate."""
    sizes = _gathered(torch.tensor([len(points)], device=points.device), group).flatten().tolist()
    empty = points.new_full((1, 3), torch.inf)
    corners = torch.cat([torch.cat([points, empty]).amin(0), torch.cat([-points, empty]).amin(0)])
    low, minus_high = _gathered(corners, group).amin(0).view(2, 3)
    extent = torch.where(low.isfinite(), -minus_high - low, 0)
    axis = int(extent.argmax())
    step = -(-max(sum(sizes), 1) // SAMPLE)
    sample = points.new_full((-(-max(*sizes, 1) // step),), torch.nan)
    some = points[::step, axis]
    sample[: len(some)] = some
    sample = _gathered(sample, group).flatten()
    sample = sample[sample.isfinite()].sort().values
    count = len(sizes)
    if not len(sample):
        return axis, points.new_zeros(count - 1), 0.0
    ends = [len(sample) * place // count for place in range(1, count)]
    return axis, sample[ends], max(low.abs().max().item(), minus_high.abs().max().item())


def _route(rows_for: list[Tensor], group: ProcessGroup | None) -> Route:
    sent = [len(rows) for rows in rows_for]
    table = _gathered(torch.tensor(sent, device=rows_for[0].device), group)
    return Route(torch.cat(rows_for), sent, table[:, dist.get_rank(group)].tolist())


def _gathered(tensor: Tensor, group: ProcessGroup | None) -> Tensor:
    """Every process's tensor of one shape, stacked in the order of the ranks."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return torch.stack(parts)


def _check_slabs(
    slabs: Slabs,
    query_points: Tensor,
    reference_points: Tensor,
    radius: float,
    index: functional.Index | None,
) -> None:
    radius = arguments.checked_radius(radius, query_points.dtype)
    if index is not None:
        raise ValueError("slabs build an index of their own; leave index out")
    if radius > slabs.radius:
        raise ValueError(f"the slabs' halo is for a radius up to {slabs.radius}; got {radius}: make new ones")
    made = slabs.sizes
    if query_points.ndim != 2 or (len(query_points), len(reference_points)) != made:
        raise ValueError(
            f"the slabs were made for {made[0]} queries and {made[1]} reference points (n, 3) here; "
            f"got {tuple(query_points.shape)} and {tuple(reference_points.shape)}: make slabs for these"
        )
    if (query_points.dtype, query_points.device) != (slabs.dtype, slabs.others.device):
        raise ValueError(
            f"the slabs were made for points in {slabs.dtype} on {slabs.others.device}; got "
            f"{query_points.dtype} on {query_points.device}: make slabs for these"
        )


def _replicated(group: ProcessGroup | None, *values: float | Tensor) -> list[float | Tensor]:
    return [replicated(value, group) if isinstance(value, Tensor) else value for value in values]


def _selected(tensor: Tensor, rows: Tensor) -> Tensor:
    """``tensor[rows]``, for which torch starts a block of a GPU for each row."""
    return tensor.gather(0, rows.unsqueeze(1).expand(-1, tensor.shape[1]))


class _Sum(torch.autograd.Function):
    """The sum over all processes, in each."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.group), None


class _Exchange(torch.autograd.Function):
    """Send rows to other processes, and receive theirs."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup | None
    ) -> Tensor:
        ctx.way_back = received, sent, group
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, *ctx.way_back), None, None, None


class _Place(torch.autograd.Function):
    """Write rows over those of queries that are no points, on which no gradient but their own depends."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        ctx.rows = rows
        results.data[rows] = values  # unseen by autograd, since the operator may have saved its results
        return results.view_as(results)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        rest = grad.index_fill(0, ctx.rows, 0) if torch.is_grad_enabled() else grad
        return rest, None, grad.index_select(0, ctx.rows)


class _Border(torch.autograd.Function):
    """A process's rows; and the small cloud at its borders, which are those near, then the halo."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slabs: Slabs) -> tuple[Tensor, Tensor]:
        ctx.slabs = slabs
        route = slabs.references
        own, sent = (_selected(rows, chosen) for chosen in (slabs.near, route.rows))
        halo = _Exchange.apply(sent, route.sent, route.received, slabs.group)
        return rows.view_as(rows), torch.cat([own, halo])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, border: Tensor) -> tuple[Tensor, None]:
        slabs, near = ctx.slabs, len(ctx.slabs.near)
        route = slabs.references
        back = _Exchange.apply(border[near:], route.received, route.sent, slabs.group)
        # In place is safe: the operator has just made this gradient, of a tensor that nobody else has.
        add = Tensor.index_add if torch.is_grad_enabled() else Tensor.index_add_
        grad = grad.contiguous()
        return add(add(grad, 0, slabs.near, border[:near]), 0, route.rows, back), None

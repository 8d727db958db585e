"""The named workloads: which clouds, what is searched or summed in them, and what is called."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.cases import W1, W2, W2_WIDE, Case, Problem, clustered, gaussian
from pointproj.benchmark.clouds import MakeCloud, crystal, ellipsoid, graded, surface, uniform
from pointproj.benchmark.config import EXECUTIONS, LISTS, NETWORK, OF_LISTS, SEARCH, SUMS, BenchConfig
from pointproj.ops.specification import reference

SIZES = {"cuda": (10**4, 10**5, 10**6, 10**7, 10**8), "cpu": (10**4, 10**5, 10**6)}  # uniform points
SIZE = {"cuda": 10**7, "cpu": 10**6}  # of the other clouds
LIST_SIZES = {"cuda": (10**5,), "cpu": (10**4, 10**5)}
CRYSTAL_SIZES = {"cuda": (10**5, 4 * 128**3), "cpu": (10**5,)}
SELF_K = 8  # of a cloud searched within itself

UNCOMPILED = (
    "eager",
    "captured",
)  # torch compiles no second derivatives; w1 and w2 show what the compiler gains; compiling all takes minutes
GRID = 30**3
RAGGED = tuple((GRID, size) for size in (1_000, 3_000, 6_000, 9_000, 10_000, 12_000, 16_000, 23_000))

ATTEND_SIZES = {"cuda": (10**5, 10**6), "cpu": (10**4,)}
ATTEND_K, ATTEND_CHANNELS, HEADS = 16, 64, 4

LIST_K = 32  # the most neighbours within the radius
LIST_CAPACITY = 40  # pairs per query that csr has room for
LIST_MOST = 256  # neighbours that a query has at most
CROWDED_RADIUS, CROWDED_K = 0.6, (32, 128)  # of 10^5 uniform points: 7,800 neighbours within the radius
CFD_SIZES = {"cuda": (10**5, 10**6), "cpu": (10**4,)}  # points of the volume
WALL_RADIUS = 0.01
WALL = 10**5  # points of the wall, or all that the volume has
CHANNELS = 25
CRYSTAL_K = 43  # a point and the three shells of 12, 6 and 24 around it
CRYSTAL_RADIUS = 1.3  # between the third shell and the fourth, in units of the cell's edge
ATOMS, ATOM_PAIRS = 137_842, 13_000_000  # the second is room for pairs
ATOM_RADIUS = 0.111  # 12.8 million pairs, as in the largest case of nvalchemiops's published times
SAMPLE = 256  # queries from which a radius is chosen


class Inputs(NamedTuple):
    """What an implementation is given: tensors, and how many neighbours, within which radius, or both."""

    problem: Problem
    k: int | None = None
    radius: float | None = None
    sigma: float | Tensor = 0.1
    capacity: int = 0  # pairs that a list has room for
    most: int = LIST_MOST  # neighbours that a query has at most, for libraries that take it
    neighbors: pointproj.Neighbors | None = None  # of attention
    attended: tuple[Tensor, ...] = ()  # queries and keys of attention

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors whose gradients are taken: features, or queries, keys and values of attention."""
        return *self.attended, self.problem.features

    @property
    def points(self) -> tuple[Tensor, Tensor]:
        """Query and reference points: the same tensor where a cloud is searched within itself."""
        return self.problem[:2]

    @property
    def pairs(self) -> int:
        """All pairs of a query and a reference point of the same cloud."""
        return sum(len(q) * len(r) for q, r in self.problem.ranges())


@dataclass(frozen=True, eq=False)
class Workload:
    """Inputs, and what is measured on them."""

    name: str  # as in the results
    operator: str  # knn | radius | farthest_points | attend
    modes: tuple[str, ...]
    make_inputs: Callable[[torch.device], Inputs]
    peers: str = "all"  # all | batched (those that take batches) | none
    executions: tuple[str, ...] = EXECUTIONS  # unless the config names some
    fewer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by mode, where it has fewer
    host: bool = False  # whether the time that the host takes to issue a call is measured


def workloads(config: BenchConfig, device_type: str) -> Iterator[Workload]:
    """The workloads of this module that a config names, in the order of the results."""
    for name in config.workloads:
        yield from _of_cases(name, device_type)
        yield from _within_itself(name, config.sizes, device_type)
        if name == "cfd":
            for size in config.sizes or CFD_SIZES[device_type]:
                yield from _of_flow(size)


def of_case(case: Case, operator: str) -> Callable[[torch.device], Inputs]:
    """A function that makes the inputs of a case."""
    neighborhood = {"k": case.k} if operator == "knn" else {"radius": case.radius}
    return lambda device: Inputs(case.problem(device), **neighborhood, sigma=case.sigma)


def within_itself(
    points: MakeCloud, k: int, device: torch.device, *, clouds: int | None = None, channels: int | None = None
) -> Inputs:
    """The k nearest of each point of a cloud, or of so many clouds: queries and references are one tensor."""
    generator = torch.Generator().manual_seed(0)
    cloud = points(generator).float().to(device)
    cloud = cloud.view(clouds, -1, 3) if clouds else cloud
    features = cloud.new_zeros(*cloud.shape[:-1], 1)
    if channels:
        features = torch.randn(len(cloud), channels, generator=generator).to(device)
    return Inputs(Problem(cloud, cloud, features), k)


def between(
    queries: MakeCloud, points: MakeCloud, device: torch.device, *, channels: int = 1, **neighborhood: float
) -> Inputs:
    """Neighbours of the points of one cloud among those of another, or of the same, with random features."""
    generator = torch.Generator().manual_seed(0)
    cloud = points(generator).float().to(device)
    query = cloud if queries is points else queries(generator).float().to(device)
    features = torch.randn(len(cloud), channels, generator=generator).to(device)
    return Inputs(Problem(query, cloud, features), **neighborhood)


def list_inputs(points: MakeCloud, device: torch.device) -> Inputs:
    """Lists of a cloud within itself, with features of its points."""
    inputs = within_itself(points, LIST_K, device, channels=CHANNELS)
    cloud = inputs.points[0]
    return inputs._replace(radius=radius_of(cloud), capacity=LIST_CAPACITY * len(cloud))


def crystal_inputs(size: int, device: torch.device) -> Inputs:
    """The 42 neighbours that a point of a crystal has, and itself."""
    inputs = within_itself(crystal(size), CRYSTAL_K, device)
    return inputs._replace(radius=CRYSTAL_RADIUS, capacity=CRYSTAL_K * size, most=CRYSTAL_K)


def atom_inputs(device: torch.device) -> Inputs:
    """All neighbours of as many uniform points as nvalchemiops has atoms, about 93 each."""
    inputs = within_itself(uniform(ATOMS), LIST_K, device)
    return inputs._replace(radius=ATOM_RADIUS, capacity=ATOM_PAIRS)


def attention_inputs(size: int, device: torch.device) -> Inputs:
    """Attention over the nearest of uniform points, with random queries, keys and values."""
    inputs = within_itself(uniform(size), ATTEND_K, device, channels=3 * ATTEND_CHANNELS)
    *attended, values = (part.contiguous() for part in inputs.problem.features.chunk(3, dim=1))
    distances, indices = pointproj.knn(*inputs.points, ATTEND_K)
    lists = pointproj.Neighbors(indices.long(), distances)
    problem = inputs.problem._replace(features=values)
    return inputs._replace(problem=problem, neighbors=lists, attended=tuple(attended))


def radius_of(points: Tensor) -> float:
    """The radius within which half of the points have at least :data:`LIST_K`, themselves included."""
    some = points[torch.randperm(len(points), generator=torch.Generator().manual_seed(1))[:SAMPLE]]
    squared = reference.squared_distances(some, points)
    return float(f"{squared.kthvalue(LIST_K, dim=1).values.sqrt().median().item():.3g}")


def _of_cases(name: str, device_type: str) -> Iterator[Workload]:
    """W1 and W2, small clouds for the host's time, and batches."""
    if name == "w1":
        fewer = dict.fromkeys(("build", "search", "aggregate", "gradients", "second", "forward"), UNCOMPILED)
        yield Workload("w1", "knn", (*SEARCH, *SUMS, *NETWORK), of_case(W1, "knn"), fewer=fewer)
    elif name in ("w2", "w2_wide"):
        captured = dict.fromkeys(("operator", "gradients", "second", "step"), UNCOMPILED)
        fewer = {**captured, "aggregate": ("eager",)}
        make_inputs = of_case(W2 if name == "w2" else W2_WIDE, "radius")
        yield Workload(name, "radius", (*SUMS, "step"), make_inputs, fewer=fewer)
    elif name == "host":
        few = Case("host_64", gaussian(64, 64), k=W1.k, radius=0.8, channels=W1.channels)
        cases = [(few, "knn"), (few, "radius")]
        if device_type == "cuda":  # on a CPU it would be the time of the whole call
            cases.append((replace(W1, id="host_w1"), "knn"))
        for case, operator in cases:
            modes = ("aggregate", "operator", "step")
            yield Workload(case.id, operator, modes, of_case(case, operator), "none", ("eager",), host=True)
    elif name == "batches":
        shared = {"k": 7, "radius": 0.1, "channels": CHANNELS}
        dense = Case("batch_dense", gaussian(8 * GRID, 8 * 10_000), batch=8, **shared)
        totals = (sum(column) for column in zip(*RAGGED, strict=True))
        ragged = Case("batch_ragged", gaussian(*totals), sizes=RAGGED, **shared)
        for case, operator in product((dense, ragged), ("knn", "radius")):
            yield Workload(case.id, operator, ("operator",), of_case(case, operator), "none", ("eager",))


def _within_itself(name: str, sizes: list[int] | None, device_type: str) -> Iterator[Workload]:
    """Clouds that are searched within themselves, of these sizes or of those of the device."""
    sizes = sorted(sizes or ())
    if name == "scaling":
        settings = {"operator": "knn", "modes": ("knn",), "executions": UNCOMPILED}
        for kind, points in (("uniform", uniform), ("clustered", clustered), ("surface", surface)):
            every = bool(sizes) or kind == "uniform"
            peers = "all" if every or device_type == "cpu" else "none"
            for size in sizes or SIZES[device_type] if every else [SIZE[device_type]]:
                make_inputs = partial(within_itself, points(size), SELF_K)
                yield Workload(f"scaling_{kind}", make_inputs=make_inputs, peers=peers, **settings)
        make_inputs = partial(within_itself, uniform(16 * 10_000), SELF_K, clouds=16)
        yield Workload("scaling_batch", make_inputs=make_inputs, peers="batched", **settings)
    elif name == "farthest":
        for size, count, clouds in ((16_384, 1_024, None), (10_000, 2_500, 16), (10**5, 10**4, None)):
            if device_type == "cuda" or size * count <= 10**8:
                make_inputs = partial(within_itself, uniform(size * (clouds or 1)), count, clouds=clouds)
                peers = "batched" if clouds else "all"
                yield Workload("farthest", "farthest_points", ("farthest",), make_inputs, peers, ("eager",))
    elif name == "lists":
        for size in sizes or LIST_SIZES[device_type]:
            for kind, points, of in (("uniform", uniform, UNCOMPILED), ("surface", surface, ("eager",))):
                make_inputs = partial(list_inputs, points(size))
                yield Workload(f"lists_{kind}", "radius", OF_LISTS, make_inputs, executions=of)
            cloud = uniform(size)
            for k in CROWDED_K:
                make_inputs = partial(between, cloud, cloud, radius=CROWDED_RADIUS, k=k)
                yield Workload("lists_crowded", "radius", LISTS[:1], make_inputs, executions=UNCOMPILED)
        for size in sizes or CRYSTAL_SIZES[device_type]:
            make_inputs = partial(crystal_inputs, size)
            yield Workload("lists_crystal", "radius", LISTS, make_inputs, executions=UNCOMPILED)
        if device_type == "cuda" and not sizes:
            yield Workload("lists_atoms", "radius", LISTS[1:], atom_inputs, executions=UNCOMPILED)
    elif name == "attend":
        for size in sizes or ATTEND_SIZES[device_type]:
            make_inputs = partial(attention_inputs, size)
            yield Workload("attend", "attend", SUMS[:2], make_inputs, executions=UNCOMPILED)


def _of_flow(size: int) -> Iterator[Workload]:
    """Searches in the graded cloud around a body, of its own points, of the body's wall and of a box."""
    volume, wall, box = graded(size), ellipsoid(min(size, WALL)), uniform(GRID)
    found = {"operator": "knn", "modes": ("knn",)}
    for name, queries, points, k, of in (
        ("cfd_volume", volume, volume, SELF_K, found),
        ("cfd_wall", wall, volume, 16, found),
        ("cfd_far", volume, wall, SELF_K, found),
        ("cfd_box", box, volume, W1.k, {"operator": "knn", "modes": SUMS[:2]}),
        ("cfd_lists", wall, volume, LIST_K, {"operator": "radius", "modes": LISTS[:1]}),
    ):
        neighborhood = {"k": k} | ({"radius": WALL_RADIUS} if of["operator"] == "radius" else {})
        make_inputs = partial(between, queries, points, channels=32, **neighborhood)
        yield Workload(name, make_inputs=make_inputs, executions=UNCOMPILED, **of)

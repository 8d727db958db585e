"""The named workloads: which clouds, which operator, and what is called on them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pointproj.benchmark.config import EXECUTIONS, BenchConfig
from pointproj.data.furniture import CLASSES, make_furniture
from pointproj.geometry.meshes import normalize
from pointproj.geometry.sampling import sample_surface
from pointproj.ops.cases import W1, W2, W2_WIDE, Case, Problem, clustered, gaussian, grid_in_gaussian, itself

Points = Callable[[torch.Generator], Tensor]

SIZES = {"cuda": (10**4, 10**5, 10**6, 10**7), "cpu": (10**4, 10**5, 10**6)}
MEMORY_SIZES = (10**4, 10**5, 10**6)
ELEMENTS = {"cuda": 3 * 10**8, "cpu": 10**7}
SELF_K = 8

SEARCH = ("build", "search", "knn")
SUMS = ("aggregate", "operator", "gradients")
NETWORK = ("forward", "step")
UNCOMPILED = ("eager", "captured")  # w1 and w2 show what the compiler gains; compiling all takes minutes
GRID = 30**3
RAGGED = tuple((GRID, size) for size in (1_000, 3_000, 6_000, 9_000, 10_000, 12_000, 16_000, 23_000))


@dataclass(frozen=True)
class Workload:
    """One set of clouds and what is measured on it."""

    name: str  # as in the results
    case: Case
    operator: str  # knn | radius
    modes: tuple[str, ...]
    with_peers: bool = True  # they take one cloud only
    executions: tuple[str, ...] = EXECUTIONS  # unless the config names some
    fewer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # modes that run fewer of them
    host: bool = False  # whether the time that the host takes to issue a call is asked for

    @property
    def neighborhood(self) -> float:
        """k for "knn", the radius for "radius"."""
        return self.case.neighborhood(self.operator)

    def problem(self, device: torch.device) -> Problem:
        """The tensors on a device. A cloud that is searched within itself is one tensor, not two."""
        problem = self.case.problem()
        if self.name.startswith("scaling"):
            query, *others = problem.reference_points.to(device), *problem[2:]
            return Problem(query, query, *_moved(others, device))
        return Problem(*_moved(problem, device))


Family = Callable[[BenchConfig, str], Iterable[Workload]]


def workloads(config: BenchConfig, device_type: str) -> Iterator[Workload]:
    """The workloads of this module that a config names, in the order of the results.

    Parameters
    ----------
    config : BenchConfig
    device_type : str
        "cpu" or "cuda".

    Yields
    ------
    Workload
    """
    for name in config.workloads:
        yield from _FAMILIES[name](config, device_type) if name in _FAMILIES else ()


def _w1(*_: object) -> list[Workload]:
    fewer = dict.fromkeys(("build", "search", "aggregate", "gradients", "forward"), UNCOMPILED)
    return [Workload("w1", W1, "knn", (*SEARCH, *SUMS, *NETWORK), fewer=fewer)]


def _w2(name: str, case: Case) -> Family:
    fewer = {**dict.fromkeys(("operator", "gradients", "step"), UNCOMPILED), "aggregate": ("eager",)}
    return lambda *_: [Workload(name, case, "radius", (*SUMS, "step"), fewer=fewer)]


def _host(config: BenchConfig, device_type: str) -> Iterator[Workload]:
    few = Case("host_64", gaussian(64, 64), k=W1.k, radius=0.8, channels=W1.channels)
    settings = {"modes": ("aggregate", "operator", "step"), "with_peers": False, "executions": ("eager",)}
    for operator in ("knn", "radius"):
        yield Workload("host_64", few, operator, host=True, **settings)
    if device_type == "cuda":  # elsewhere the host does the work itself
        yield Workload("host_w1", W1, "knn", host=True, **settings)


def _scaling(config: BenchConfig, device_type: str) -> Iterator[Workload]:
    sizes = sorted(config.sizes or SIZES[device_type])
    for kind, points in (("uniform", uniform), ("clustered", clustered), ("surface", surface)):
        every = bool(config.sizes) or kind == "uniform"
        with_peers = every or device_type == "cpu"
        for size in sizes if every else sizes[-1:]:
            case = Case(f"scaling_{kind}", itself(points(size)), k=SELF_K, radius=None, channels=1)
            yield Workload(case.id, case, "knn", ("knn",), with_peers, UNCOMPILED)


def _batches(config: BenchConfig, device_type: str) -> Iterator[Workload]:
    shared = {"k": 7, "radius": 0.1, "channels": 25}
    dense = Case("batch_dense", gaussian(8 * GRID, 8 * 10_000), batch=8, **shared)
    totals = (sum(column) for column in zip(*RAGGED, strict=True))
    ragged = Case("batch_ragged", gaussian(*totals), sizes=RAGGED, **shared)
    for case in (dense, ragged):
        for operator in ("knn", "radius"):
            yield Workload(case.id, case, operator, ("operator",), with_peers=False, executions=("eager",))


def _memory(config: BenchConfig, device_type: str) -> Iterator[Workload]:
    for size in MEMORY_SIZES:
        case = Case("memory", grid_in_gaussian(30, size), k=W1.k, radius=None, channels=W1.channels)
        yield Workload(case.id, case, "knn", ("step",), executions=("eager",))


_FAMILIES = {
    "w1": _w1,
    "w2": _w2("w2", W2),
    "w2_wide": _w2("w2_wide", W2_WIDE),
    "host": _host,
    "scaling": _scaling,
    "batches": _batches,
    "memory": _memory,
}


def _moved(tensors: Iterable[Tensor | None], device: torch.device) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def uniform(count: int) -> Points:
    """Points in [-1, 1]^3."""
    return lambda g: torch.rand(count, 3, generator=g, dtype=torch.float64) * 2 - 1


def surface(count: int) -> Points:
    """Points on the surfaces of ten pieces of furniture, each in a cube of its own, side by side."""

    def points(g: torch.Generator) -> Tensor:
        rng = np.random.default_rng(torch.randint(2**31, (), generator=g).item())
        shares = np.diff(np.linspace(0, count, len(CLASSES) + 1).astype(int))
        clouds = []
        for place, (class_name, share) in enumerate(zip(CLASSES, shares, strict=True)):
            sampled = furniture_surface(class_name, int(share), rng)
            sampled[:, 0] += 2 * place
            clouds.append(sampled)
        cloud = torch.from_numpy(np.concatenate(clouds))
        return cloud[torch.randperm(count, generator=g)].double()

    return points


def furniture_surface(class_name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, 3) points on the surface of one piece, within [-1, 1]^3."""
    return sample_surface(normalize(make_furniture(class_name, seed=1)), count, rng)[0]

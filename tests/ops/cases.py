"""Small inputs with ids that every backend is tested with.

Warp compiles kernels for each number of channels and each small k: cases have few of them.
"""

import math
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pointproj.benchmark.cases import W1, W2, W2_WIDE, Case, MakePoints, clustered, cube, gaussian
from pointproj.ops.specification.reference import KERNELS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # seconds for each few queries


def uniform(queries: int, references: int) -> MakePoints:
    """Both uniform in [-1, 1]^3."""
    return lambda g: (cube(g, queries), cube(g, references))


def itself(points: Callable[[torch.Generator], Tensor]) -> MakePoints:
    """Every reference point is a query: each finds itself at distance 0."""

    def clouds(g: torch.Generator) -> tuple[Tensor, Tensor]:
        reference = points(g)
        return reference.clone(), reference

    return clouds


def _far(g: torch.Generator) -> tuple[Tensor, Tensor]:
    directions = torch.randn(12, 3, generator=g, dtype=torch.float64)
    distances = torch.tensor([2.0, 10.0, 100.0, 1e4], dtype=torch.float64).repeat(3)[:, None]
    return directions / directions.norm(dim=1, keepdim=True) * distances, cube(g, 70)


def _coincident(g: torch.Generator) -> tuple[Tensor, Tensor]:
    point = cube(g, 1)
    return point.repeat(9, 1), point.repeat(13, 1)


def _lattice(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Integer points, each of them twice, in random order: nearly every distance is an exact tie."""
    axis = torch.arange(3 if INTERPRETED else 4, dtype=torch.float64)
    lattice = torch.cartesian_prod(axis, axis, axis).repeat(2, 1)
    queries = torch.cat([lattice[:9], lattice[:9] + 0.5])[:: 4 if INTERPRETED else 1]
    return queries, lattice[torch.randperm(len(lattice), generator=g)]


def _planar(g: torch.Generator) -> tuple[Tensor, Tensor]:
    flat = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    return cube(g, 31), cube(g, 90) * flat


def _collinear(g: torch.Generator) -> tuple[Tensor, Tensor]:
    line = torch.tensor([[1.0, 2.0, -1.0]], dtype=torch.float64)
    return cube(g, 31), cube(g, 90)[:, :1] * line


def _duplicates(g: torch.Generator) -> tuple[Tensor, Tensor]:
    some = cube(g, 12)
    return cube(g, 29), some[torch.randint(12, (80,), generator=g)]


def _offset(g: torch.Generator) -> tuple[Tensor, Tensor]:
    return cube(g, 33) + 1000, cube(g, 77) + 1000


def _two_clumps(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries on the far side of empty space: a search must cross many empty cells."""
    clumps = torch.tensor([[-50.0, 0.0, 0.0], [50.0, 0.0, 0.0]], dtype=torch.float64)
    return cube(g, 15) + clumps[0], cube(g, 40) + clumps[torch.arange(40) % 2]


def _of_total(sizes: tuple[tuple[int, int], ...]) -> MakePoints:
    return uniform(*(sum(s) for s in zip(*sizes, strict=True)))


RAGGED = ((5, 17), (0, 9), (12, 40), (1, 1), (7, 1), (3, 30))
WITH_EMPTY = ((4, 0), (6, 11), (0, 0), (8, 1), (2, 25), (5, 0))
if INTERPRETED:
    WITH_EMPTY = ((1, 0), (3, 11), (0, 0), (2, 1), (2, 25), (1, 0))
ONE_POINT_CLOUDS = ((1, 1), (3, 1), (2, 1), (1, 1))
FP64 = {"positions": torch.float64, "features": torch.float64}

CASES = (
    Case("plain", uniform(64, 128), channels=8),
    Case("odd-sizes", gaussian(37, 101), channels=25),
    Case("larger", gaussian(150, 777), radius=0.3),
    Case("one-query", uniform(1, 50)),
    Case("one-reference", uniform(20, 1), k=1, radius=1.0),
    Case("one-of-each", uniform(1, 1), k=1, radius=4.0, channels=1),
    Case("no-query", uniform(0, 10)),
    Case("nearest-only", uniform(33, 65), k=1, radius=None),
    Case("k-is-n", uniform(21, 35), k=35, radius=None),
    Case("large-k", uniform(9, 150), k=100, radius=None),
    Case("radius-covers-all", uniform(21, 35), k=None, radius=4.0),
    Case("radius-without-neighbor", uniform(30, 20), k=None, radius=1e-4),
    Case("radius-tiny-in-large-box", itself(clustered(60)), k=None, radius=1e-5),
    Case("far-queries", _far, radius=150.0),
    Case("two-clumps", _two_clumps, radius=99.0),
    Case("all-coincident", _coincident),
    Case("lattice-radius-1", _lattice, k=9, radius=1.0, sigma=0.5),
    Case("lattice-radius-root-2", _lattice, k=1, radius=math.sqrt(2), sigma=0.5),
    Case("lattice-radius-root-3-half", _lattice, k=17, radius=math.sqrt(0.75), sigma=0.5),
    Case("lattice-fp64", _lattice, k=9, radius=math.sqrt(3), sigma=0.5, **FP64),
    Case("itself", itself(lambda g: cube(g, 75))),
    Case("clustered", itself(clustered(120)), radius=0.02, sigma=0.05),
    Case("planar", _planar),
    Case("collinear", _collinear),
    Case("duplicates", _duplicates, k=9),
    Case("large-offset", _offset),
    Case("small-sigma", uniform(25, 60), sigma=1e-2),
    Case("large-sigma", uniform(25, 60), sigma=100.0),
    Case("channels-1", uniform(20, 40), channels=1),
    Case("channels-33", uniform(20, 40), channels=33),
    Case("channels-130", uniform(20, 40), channels=130),
    Case("fp64", uniform(40, 90), **FP64),
    Case("fp64-positions", uniform(40, 90), positions=torch.float64),
    Case("fp64-features", uniform(40, 90), features=torch.float64),
    Case("bf16", uniform(40, 90), features=torch.bfloat16, channels=25),
    Case("fp16", uniform(40, 90), features=torch.float16, channels=25),
    Case("fp16-fp64-positions", uniform(40, 90), positions=torch.float64, features=torch.float16),
    Case("dense", uniform(3 * 19, 3 * 41), batch=3),
    Case("dense-of-one", uniform(19, 41), batch=1),
    Case("dense-one-point-clouds", uniform(4 * 3, 4), batch=4, k=1, radius=2.0),
    Case("dense-bf16", uniform(2 * 19, 2 * 41), batch=2, features=torch.bfloat16, channels=25),
    Case("ragged", _of_total(RAGGED), sizes=RAGGED),
    Case("ragged-with-empty-clouds", _of_total(WITH_EMPTY), sizes=WITH_EMPTY, radius=0.8),
    Case("ragged-one-point-clouds", _of_total(ONE_POINT_CLOUDS), sizes=ONE_POINT_CLOUDS, radius=2.0),
    Case("ragged-fp64", _of_total(RAGGED), sizes=RAGGED, **FP64),
)

# Warp compiles each form of a sum for a second: a GPU runs them all, a CPU a third of them. Every two of
# kernel, reduction and dtypes are together in some.
REDUCTIONS = ("mean", "sum", "weighted")
DTYPES = (torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.float64)


def is_compiled(kernel: str, reduce: str, positions: torch.dtype, features: torch.dtype) -> bool:
    """Whether Warp's sums of this form are tested on a CPU."""
    sums = torch.promote_types(torch.promote_types(positions, features), torch.float32)
    place = KERNELS.index(kernel) + REDUCTIONS.index(reduce) + DTYPES.index((positions, sums))
    return place % 3 == 0


WORKLOADS = {case.id: case for case in (W1, W2, W2_WIDE)}


def calls(cases: tuple[Case, ...] = CASES) -> Iterator[tuple[str, Case, str]]:
    """(id, case, operator) for every operator that a case is meant for."""
    for case in cases:
        for operator in case.operators:
            yield f"{operator}-{case.id}", case, operator


def by_id(name: str) -> Case:
    """The case of that id."""
    return next(case for case in CASES if case.id == name)

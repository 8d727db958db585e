"""The workload ``large``: a cloud close to the largest that fits, on one GPU or in slabs on several.

In one process the operator is called like everywhere else. Started by torchrun, each process makes the points
of its own slab, and the operator is :func:`pointproj.ops.sharded.radius_aggregate`. For some queries, the
result is compared with the reference, which gets the points near them from all processes.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.implementations import OURS
from pointproj.benchmark.parity import relative_error
from pointproj.benchmark.recorder import NoTime, Part, Recorder, one_row
from pointproj.benchmark.results import MISSING, SKIPPED, Row
from pointproj.benchmark.selection import backend_names, missing_backend
from pointproj.benchmark.timing import measure
from pointproj.ops import sharded
from pointproj.ops.specification import reference
from pointproj.runtime import distributed
from pointproj.runtime.distributed import Processes

SIZES = {"cuda": (10**8, 10**7), "cpu": (10**5, 10**4)}  # reference points, queries
CHANNELS = 32
NEIGHBORS = 32  # on average within the radius
SIGMA = 1e-3  # of the order of the radius
CHECKED = 8  # queries per process that are compared with the reference
REPETITIONS = 5  # the same number in every process: all take part in each call


def parts(config: BenchConfig, device_type: str) -> Iterator[Part]:
    """One for each row; all processes of torchrun measure it together."""
    references, queries = SIZES[device_type]
    of_all = {"workload": "large", "operator": "radius", "channels": CHANNELS}
    of_all |= {"queries": queries, "references": references, "radius": radius_for(references)}
    for name in backend_names(config.backends, "radius"):
        for mode in ("aggregate", "operator"):
            yield from one_row(config, partial(_measured, name), implementation=name, mode=mode, **of_all)


def _measured(backend: str, recorder: Recorder, blank: Row) -> Row:
    if missing := missing_backend(backend, recorder.device.type, "radius"):
        raise NoTime(MISSING, missing)
    if backend == "torch":
        raise NoTime(SKIPPED, f"compares all {blank.queries * blank.references:.0e} pairs")
    cloud = LargeCloud(distributed.join(), recorder.device, backend)
    timer = partial(measure, repetitions=REPETITIONS)
    return recorder.timed(blank, partial(cloud.call, blank.mode), cloud.error, OURS, timer)


class LargeCloud:
    """Points and queries, uniform in [0, 1]^3, of which each process has those of one slab."""

    def __init__(self, processes: Processes, device: torch.device, backend: str) -> None:
        self.processes = processes
        references, queries = SIZES[device.type]
        self.radius = radius_for(references)
        generator = torch.Generator(device).manual_seed(processes.rank)

        def points(count: int) -> Tensor:
            made = torch.rand(count // processes.count, 3, generator=generator, device=device)
            made[:, 0] = (made[:, 0] + processes.rank) / processes.count
            return made

        self.reference_points, self.query_points = points(references), points(queries)
        rows = len(self.reference_points), len(self.query_points)
        normal = (torch.randn(count, CHANNELS, generator=generator, device=device) for count in rows)
        self.features, self._upstream = normal
        self.features.requires_grad_()
        chosen = torch.randint(rows[1], (CHECKED,), generator=generator, device=device)
        self.checked = chosen.unique()
        self.upstream = torch.zeros_like(self._upstream)
        self.upstream[self.checked] = self._upstream[self.checked]
        module, division = pointproj, {}
        if not processes.is_single:
            slabs = sharded.make_slabs(self.query_points, self.reference_points, self.radius)
            module, division = sharded, {"slabs": slabs}
        self.aggregate = partial(module.radius_aggregate, sigma=SIGMA, backend=backend, **division)

    def call(self, mode: str) -> Callable[[], tuple[Tensor, ...]]:
        """The call to time: ``aggregate`` gives the values, ``operator`` the gradient of the features too."""
        features = self.features if mode == "operator" else self.features.detach()

        def call() -> tuple[Tensor, ...]:
            values = self.aggregate(self.query_points, self.reference_points, features, self.radius)
            gradient = torch.autograd.grad(values, features, self.upstream) if features.requires_grad else ()
            return values.detach(), *gradient

        return call

    def error(self, result: tuple[Tensor, ...]) -> float:
        """Largest relative error, in norm, of values and gradient in any process."""
        values, gradient, rows = self._by_reference()
        errors = [relative_error(result[0][self.checked], values)]
        if len(result) > 1:
            errors.append(relative_error(result[1][rows], gradient))
            result[1][rows] = 0.0  # all other rows should be 0
            outside = result[1].norm() / gradient.norm().clamp(min=1e-30)
            errors.append(outside.nan_to_num(nan=math.inf).item())
            self.upstream.copy_(self._upstream)  # for the calls that are timed
        return max(self.processes.gather(max(errors)))

    def _by_reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values of this process's checked queries; the features' gradient, and the rows that it is of."""

        def everywhere(tensor: Tensor) -> list[Tensor]:
            """The tensor of each process."""
            parts = self.processes.gather(tensor.detach().cpu())
            return [part.to(self.features.device) for part in parts]

        queries = everywhere(self.query_points[self.checked])
        chunks = self.reference_points.split(2**20)
        near = [reference.within(torch.cat(queries), chunk, self.radius).any(0) for chunk in chunks]
        rows = torch.cat(near).nonzero().squeeze(1)
        points, features = (everywhere(of[rows]) for of in (self.reference_points, self.features))
        upstream = everywhere(self.upstream[self.checked])
        leaf = torch.cat(features).requires_grad_()
        cloud = torch.cat(queries), torch.cat(points), leaf
        values = reference.radius_aggregate(*cloud, self.radius, SIGMA)
        (gradient,) = torch.autograd.grad(values, leaf, torch.cat(upstream))
        own = self.processes.rank
        values = values.detach().split([len(part) for part in queries])[own]
        return values, gradient.split([len(part) for part in features])[own], rows


def radius_for(references: int) -> float:
    """The radius within which a uniform cloud in the unit cube has about :data:`NEIGHBORS` points."""
    return float(f"{(NEIGHBORS / (references * 4 / 3 * math.pi)) ** (1 / 3):.3g}")

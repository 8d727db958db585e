"""The workload ``large``: a cloud close to the largest that fits, on one GPU or in slabs on several.

In one process the operator is called like everywhere else. Started by torchrun, each process makes the points
of its own slab, and the operator is :func:`pointproj.ops.sharded.radius_aggregate`. Some queries are compared
with the reference: each process adds up what its points contribute to them, so that no process needs all
pairs at once.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import pointproj
from pointproj.benchmark.config import EXECUTIONS, BenchConfig
from pointproj.benchmark.contenders import backend_names, missing_backend
from pointproj.benchmark.peers import OURS
from pointproj.benchmark.recorder import NoTime, Part, Recorder
from pointproj.benchmark.results import MISSING, SKIPPED, Row
from pointproj.ops import reference, sharded
from pointproj.runtime import distributed
from pointproj.runtime.distributed import Processes

SIZES = {"cuda": (10**8, 10**7), "cpu": (10**5, 10**4)}  # reference points, queries
CHANNELS = 32
NEIGHBORS = 32  # on average within the radius
SIGMA = 1e-3  # of the order of the radius
CHECKED = 8  # queries per process that are compared with the reference
REPETITIONS = 5  # the same in every process: each call is made by all of them
MODES = ("aggregate", "operator")


def parts(config: BenchConfig, device_type: str) -> Iterator[Part]:
    """One for each backend; all processes of torchrun measure it together."""
    if "large" not in config.workloads or "eager" not in (config.execution or EXECUTIONS):
        return
    modes = [mode for mode in MODES if mode in config.modes]
    for name in backend_names(config.backends, "radius"):
        yield Part(len(modes), partial(_measure, name=name, modes=modes))


def _measure(recorder: Recorder, name: str, modes: list[str]) -> None:
    references, queries = SIZES[recorder.device.type]
    sizes = {"queries": queries, "references": references, "radius": radius_for(references)}
    of_workload = {"workload": "large", "operator": "radius", "channels": CHANNELS, **sizes}

    def measured(row: Row) -> Row:
        if missing := missing_backend(name, recorder.device.type, "radius"):
            raise NoTime(MISSING, missing)
        if name == "torch":
            raise NoTime(SKIPPED, f"compares all {queries * references:.0e} pairs")
        cloud = LargeCloud(distributed.join(), recorder.device, name)
        return recorder.timed(row, partial(cloud.call, row.mode), cloud.error, OURS, REPETITIONS)

    for mode in modes:
        recorder.record(recorder.blank(contender=name, mode=mode, **of_workload), measured)


class LargeCloud:
    """Points and queries, uniform in [0, 1]^3, of which each process has those of one slab."""

    def __init__(self, processes: Processes, device: torch.device, backend: str) -> None:
        self.processes, self.backend = processes, backend
        self.references, self.queries = SIZES[device.type]
        self.radius = radius_for(self.references)
        generator = torch.Generator(device).manual_seed(processes.rank)

        def points(count: int) -> Tensor:
            made = torch.rand(count // processes.count, 3, generator=generator, device=device)
            made[:, 0] = (made[:, 0] + processes.rank) / processes.count
            return made

        self.reference_points, self.query_points = points(self.references), points(self.queries)
        rows = len(self.reference_points), len(self.query_points)
        normal = (torch.randn(count, CHANNELS, generator=generator, device=device) for count in rows)
        self.features, self._upstream = normal
        self.features.requires_grad_()
        chosen = torch.randint(rows[1], (CHECKED,), generator=generator, device=device)
        self.checked = chosen.unique()
        self.upstream = torch.zeros_like(self._upstream)
        self.upstream[self.checked] = self._upstream[self.checked]
        self.slabs = None
        if not processes.alone:
            self.slabs = sharded.make_slabs(self.query_points, self.reference_points, self.radius)

    def call(self, mode: str) -> Callable[[], tuple[Tensor, ...]]:
        """The call to time: ``aggregate`` gives the values, ``operator`` the gradient of the features too."""
        cloud = self.query_points, self.reference_points
        module, division = (pointproj, {}) if self.slabs is None else (sharded, {"slabs": self.slabs})
        settings = {"sigma": SIGMA, "backend": self.backend, **division}

        def aggregate() -> tuple[Tensor]:
            return (module.radius_aggregate(*cloud, self.features.detach(), self.radius, **settings),)

        def operator() -> tuple[Tensor, Tensor]:
            values = module.radius_aggregate(*cloud, self.features, self.radius, **settings)
            return values.detach(), *torch.autograd.grad(values, self.features, self.upstream)

        return {"aggregate": aggregate, "operator": operator}[mode]

    def error(self, result: tuple[Tensor, ...]) -> float:
        """Largest relative error, in norm, of values and gradient in any process."""
        values, gradient, rows = self._by_reference()
        errors = [_relative(result[0][self.checked], values)]
        if len(result) > 1:
            errors.append(_relative(result[1][rows], gradient))
            outside = _norm(result[1]) ** 2 - _norm(result[1][rows]) ** 2
            errors.append(max(outside, 0.0) ** 0.5 / max(_norm(gradient), 1e-30))
            self.upstream.copy_(self._upstream)  # from now on every query counts
        worst = max(math.inf if error != error else error for error in errors)
        return max(self.processes.gather(worst))

    def _by_reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """Values of the queries checked here; the features' gradient near all checked queries; its rows."""
        checked = (tensor[self.checked].cpu() for tensor in (self.query_points, self.upstream))
        asked = self.processes.gather(tuple(checked))
        device, features = self.features.device, self.features.detach()
        queries, upstream = (torch.cat(parts).to(device) for parts in zip(*asked, strict=True))
        near = [self._neighbors(query) for query in queries]
        sums = [torch.cat([w.sum()[None], w @ features[rows].double()]) for rows, w in near]
        whole = sum(self.processes.gather(torch.stack(sums).cpu())).to(device)
        before = sum(len(part) for part, _ in asked[: self.processes.rank])
        values = (whole[:, 1:] / whole[:, :1])[before : before + len(self.checked)]
        rows, place = torch.cat([rows for rows, _ in near]).unique(return_inverse=True)
        scaled = [
            w[:, None] / total * up for (_, w), total, up in zip(near, whole[:, 0], upstream, strict=True)
        ]
        gradient = torch.zeros(len(rows), CHANNELS, dtype=torch.float64, device=device)
        return values, gradient.index_add_(0, place, torch.cat(scaled)), rows

    def _neighbors(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this process within the radius of a query, and their weights in fp64."""
        chunks = self.reference_points.split(2**24)
        found = [reference.squared_distances(query[None], chunk)[0].sqrt() for chunk in chunks]
        distances = torch.cat(found)
        rows = torch.nonzero(distances <= distances.new_tensor(self.radius)).squeeze(1)
        exact = (self.reference_points[rows].double() - query.double()).norm(dim=1)
        return rows, torch.exp(-exact / SIGMA)


def radius_for(references: int) -> float:
    """The radius within which a uniform cloud in the unit cube has about :data:`NEIGHBORS` points."""
    return float(f"{(NEIGHBORS / (references * 4 / 3 * math.pi)) ** (1 / 3):.3g}")


def _relative(got: Tensor, expected: Tensor) -> float:
    return _norm(got.double() - expected) / max(_norm(expected), 1e-30)


def _norm(tensor: Tensor) -> float:
    """The norm in fp64, part by part: a copy of a whole gradient might not fit."""
    parts = torch.stack([part.double().square().sum() for part in tensor.detach().split(2**22)])
    return parts.sum().sqrt().item()

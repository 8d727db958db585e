"""The workloads ``gino`` and ``geotransolver``: a step of a model, with its library's search and with ours.

GINO (neuraloperator, its defaults) searches for the neighbours of 32^3 grid points among points on a surface,
and the other way round, and puts a network between each pair; the library's own search forms all pairs, and
its sums are a loop over the queries. A step of GeoTransolver (PhysicsNeMo) with local features of six scales
makes twelve ball queries of 32 neighbours among the points themselves; the library's search takes the first
that it finds, ours the nearest ones.

A step is the forward, the mean square of the output, the backward, and SGD, which holds no state.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.parity import relative_error
from pointproj.benchmark.peers import OURS, import_failure
from pointproj.benchmark.recorder import MIB, NoTime, Part, Recorder, check_error, one_row
from pointproj.benchmark.results import MISSING, Row
from pointproj.benchmark.workloads import furniture_surface
from pointproj.runtime.memory import allocated_bytes

LONGEST_S = 1800
Made = tuple[nn.Module, dict[str, Tensor]]


@dataclass(frozen=True)
class Model:
    """A library's model, and what is measured of it; ``make`` takes whether the search is ours."""

    package: str
    imports: str
    make: Callable[[bool, int, torch.device], Made]
    make_small: Callable[[bool, torch.device], Made]  # few points and a small network, to compare results
    seconds_on_cpu: dict[tuple[str, int], float]  # of each contender and number of points that is measured
    radius: float
    channels: int
    queries: int | None = None  # None: as many as points
    executions: tuple[str, ...] = ("eager",)


def _surface(count: int, device: torch.device) -> Tensor:
    points = furniture_surface("chair", count, np.random.default_rng(0))
    return torch.from_numpy(points).float().to(device)


def _random(device: torch.device) -> Tensor:
    return torch.rand(300, 3, generator=torch.Generator().manual_seed(0)).to(device)


def _gino(ours: bool, points: Tensor, side: int, radius: float, **settings) -> Made:
    """A model on points in the unit cube and a grid."""
    from neuralop.models import GINO

    from pointproj.compat.neuraloperator import replace_search

    # Without Open3D and torch-scatter, which are made for no recent torch.
    without = {"gno_use_open3d": False, "gno_use_torch_scatter": False}
    radii = {"in_gno_radius": radius, "out_gno_radius": radius}
    model = GINO(in_channels=3, out_channels=1, **radii, **without, **settings).to(points.device)
    if ours:
        replace_search(model)
    inputs = {"input_geom": points[None], "latent_queries": _grid(side, points)[None]}
    return model, inputs | {"output_queries": points[None], "x": points[None] - 0.5}


def _grid(side: int, points: Tensor) -> Tensor:
    ticks = torch.linspace(0, 1, side, device=points.device)
    return torch.stack(torch.meshgrid(ticks, ticks, ticks, indexing="ij"), dim=-1)


def make_gino(ours: bool, points: int, device: torch.device) -> Made:
    return _gino(ours, (_surface(points, device) + 1) / 2, 32, GINO.radius)


def make_small_gino(ours: bool, device: torch.device) -> Made:
    points = _random(device)
    grid = _grid(8, points).view(-1, 3).double()
    # At the radius itself the library's rounding, of a matrix product, decides what is a neighbour.
    near = ((torch.cdist(points.double(), grid) - 0.25).abs() < 1e-3).any(1)
    return _gino(ours, points[~near], 8, 0.25, fno_n_modes=(4, 4, 4), fno_hidden_channels=8)


def _geotransolver(points: Tensor, radii: tuple[float, ...], **settings) -> Made:
    from physicsnemo.models.geotransolver import GeoTransolver

    scales = {"radii": [*radii], "neighbors_in_radius": [32] * len(radii)}
    local = {"geometry_dim": 3, "include_local_features": True, **scales}
    model = GeoTransolver(functional_dim=6, out_dim=4, **local, **settings).to(points.device)
    features = torch.cat([points, points.square()], dim=1)
    inputs = {"local_embedding": features[None], "local_positions": points[None], "geometry": points[None]}
    return model, inputs


def _use_our_search(ours: bool) -> None:
    from pointproj.compat import physicsnemo

    physicsnemo.install() if ours else physicsnemo.uninstall()


def make_geotransolver(ours: bool, points: int, device: torch.device) -> Made:
    _use_our_search(ours)
    return _geotransolver(_surface(points, device) / 2, (0.01, 0.02, 0.05, 0.1, 0.25, 0.5))  # 1 long


def make_small_geotransolver(ours: bool, device: torch.device) -> Made:
    from physicsnemo.nn.functional import radius_search
    from physicsnemo.nn.module import ball_query

    _use_our_search(ours)
    if not ours:  # in torch it finds the nearest, too
        radius_search = functools.partial(radius_search, implementation="torch")
    ball_query.radius_search = radius_search
    settings = {"n_layers": 1, "n_hidden": 16, "n_head": 2, "slice_num": 4}
    return _geotransolver(_random(device), (0.1, 0.3), **settings)


OURS_NAMED = "pointproj"
GINO = Model(
    "neuraloperator",
    "neuralop.models",
    make_gino,
    make_small_gino,
    # Of 10^6 points the library would form 3e10 pairs.
    seconds_on_cpu={("neuraloperator", 10**4): 180, ("pointproj", 10**4): 5, ("pointproj", 10**6): 150},
    **{"radius": 0.033, "channels": 3, "queries": 32**3},  # the radius is the default
)  # the number of pairs is a shape, so only eager
GEOTRANSOLVER = Model(
    "nvidia-physicsnemo",
    "physicsnemo.models.geotransolver",
    make_geotransolver,
    make_small_geotransolver,
    seconds_on_cpu={("nvidia-physicsnemo", 10**5): 90, ("pointproj", 10**5): 90},
    **{"radius": 0.5, "channels": 6, "executions": ("eager", "compiled")},
)
MODELS = {"gino": GINO, "geotransolver": GEOTRANSOLVER}


def parts(config: BenchConfig, device_type: str) -> Iterator[Part]:
    """One for each row."""
    for name, contender, points, execution in rows_of(config):
        model = MODELS[name]
        columns = {
            **{"workload": name, "operator": "radius", "mode": "step", "execution": execution},
            **{"contender": contender, "kind": "backend" if contender == OURS_NAMED else "peer"},
            **{"radius": model.radius, "channels": model.channels, "package": contender},
            **{"queries": model.queries or points, "references": points},
        }
        yield one_row(columns, partial(_measured, model, contender == OURS_NAMED), LONGEST_S)


def rows_of(config: BenchConfig) -> list[tuple[str, str, int, str]]:
    """(workload, contender, points, execution) of each row."""
    return [
        (name, contender, points, execution)
        for name, model in MODELS.items()
        if name in config.workloads and "step" in config.modes
        for contender, points in model.seconds_on_cpu
        if contender == OURS_NAMED or config.peers != []
        for execution in model.executions
        if execution in (config.execution or model.executions)
    ]


def _measured(model: Model, ours: bool, recorder: Recorder, blank: Row) -> Row:
    device, points = recorder.device, blank.references
    if device.type == "cpu":
        recorder.limits.refuse_if_slow(model.seconds_on_cpu[blank.contender, points])
    if missing := import_failure(model.imports):
        raise NoTime(MISSING, missing)
    before: list[int] = []

    def make() -> Callable[[], None]:
        torch.manual_seed(0)
        call = step_of(*model.make(ours, points, device), compiled=blank.execution == "compiled")
        before.append(allocated_bytes(device))
        return call

    try:
        error = disagreement(model, device) if ours else None
        if ours:
            check_error("output and gradients of a small model", error, OURS)
        timed = recorder.timed(blank, make, lambda _: None, OURS)
    finally:
        torch.compiler.reset()
        if model is GEOTRANSOLVER:
            _use_our_search(False)
    return replace(timed, parity_error=error, note=f"{before[0] / MIB:.0f} MiB before the first step")


def disagreement(model: Model, device: torch.device) -> float:
    """The largest relative error of output and parameters' gradients of the small model with our search."""
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        network, inputs = model.make_small(ours, device)
        output = network(**inputs)
        gradients = torch.autograd.grad(output.square().mean(), [*network.parameters()], allow_unused=True)
        found = [output, *(gradient for gradient in gradients if gradient is not None)]
        results.append([torch.view_as_real(t) if t.is_complex() else t for t in found])
    return max(relative_error(got, expected) for expected, got in zip(*results, strict=True))


def step_of(network: nn.Module, inputs: dict[str, Tensor], *, compiled: bool) -> Callable[[], None]:
    """A training step."""
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    called = torch.compile(network) if compiled else network

    def step() -> None:
        optimizer.zero_grad()
        called(**inputs).square().mean().backward()
        optimizer.step()

    return step

"""The workloads ``gino`` and ``geotransolver``: a step of a model, with its library's search and with ours.

GINO's own search forms all pairs, and its sums are a loop over the queries. GeoTransolver's own search takes
the first neighbours that it finds; ours takes the nearest. A step is the forward, the mean square of the
output, the backward, and SGD, which has no state.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pointproj.benchmark.clouds import furniture_surface
from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.implementations import OURS, import_failure
from pointproj.benchmark.parity import relative_error
from pointproj.benchmark.recorder import MIB, NoTime, Part, Recorder, check_error, one_row
from pointproj.benchmark.results import MISSING, Row
from pointproj.runtime.memory import allocated_bytes

LONGEST_S = 1800  # of a row
RADIUS = 0.033  # of GINO, its default
Made = tuple[nn.Module, dict[str, Tensor]]


class Model(NamedTuple):
    """A library's model, and what is measured of it.

    ``make`` takes whether the search is ours, the number of points, and the device. For None points it makes
    a small model, whose results are compared.
    """

    imports: str
    make: Callable[[bool, int | None, torch.device], Made]
    seconds_on_cpu: dict[tuple[str, int], float]  # estimates; a row for each implementation, number of points
    columns: dict[str, Any]  # of all rows
    executions: tuple[str, ...] = ("eager",)


def _points(count: int | None, device: torch.device) -> Tensor:
    """Points on a surface within [0, 1]^3; for None a few random ones."""
    if count is None:
        return torch.rand(300, 3, generator=torch.Generator().manual_seed(0)).to(device)
    points = furniture_surface("chair", count, np.random.default_rng(0))
    return (torch.from_numpy(points).float().to(device) + 1) / 2


def make_gino(ours: bool, count: int | None, device: torch.device) -> Made:
    from neuralop import models as neural

    from pointproj.compat.neuraloperator import replace_search

    points, side, radius, small = _points(count, device), 32, RADIUS, {}
    if count is None:
        side, radius, small = 8, 0.25, {"fno_n_modes": (4, 4, 4), "fno_hidden_channels": 8}
    ticks = torch.linspace(0, 1, side, device=device)
    grid = torch.stack(torch.meshgrid(ticks, ticks, ticks, indexing="ij"), dim=-1)
    if count is None:
        # The library rounds distances as a matrix product does, so near the radius it may decide otherwise.
        distances = torch.cdist(points.double(), grid.view(-1, 3).double())
        points = points[((distances - radius).abs() >= 1e-3).all(1)]
    # Without Open3D and torch-scatter, which have no build for recent versions of torch.
    without = {"gno_use_open3d": False, "gno_use_torch_scatter": False}
    radii = {"in_gno_radius": radius, "out_gno_radius": radius}
    model = neural.GINO(in_channels=3, out_channels=1, **radii, **without, **small).to(device)
    if ours:
        replace_search(model)
    inputs = {"input_geom": points[None], "latent_queries": grid[None], "output_queries": points[None]}
    return model, inputs | {"x": points[None] - 0.5}


def make_geotransolver(ours: bool, count: int | None, device: torch.device) -> Made:
    from physicsnemo.models.geotransolver import GeoTransolver
    from physicsnemo.nn.functional import radius_search
    from physicsnemo.nn.module import ball_query

    _use_our_search(ours)
    points, radii, small = _points(count, device) - 0.5, (0.01, 0.02, 0.05, 0.1, 0.25, 0.5), {}
    if count is None:
        radii, small = (0.1, 0.3), {"n_layers": 1, "n_hidden": 16, "n_head": 2, "slice_num": 4}
        # Of the library's searches, only the one in torch finds the nearest, as ours does.
        ball_query.radius_search = radius_search if ours else partial(radius_search, implementation="torch")
    scales = {"radii": [*radii], "neighbors_in_radius": [32] * len(radii)}
    local = {"geometry_dim": 3, "include_local_features": True, **scales}
    model = GeoTransolver(functional_dim=6, out_dim=4, **local, **small).to(device)
    features = torch.cat([points, points.square()], dim=1)
    inputs = {"local_embedding": features[None], "local_positions": points[None], "geometry": points[None]}
    return model, inputs


def _use_our_search(ours: bool) -> None:
    from pointproj.compat import physicsnemo

    physicsnemo.install() if ours else physicsnemo.uninstall()


GINO = Model(
    "neuralop.models",
    make_gino,
    # With 10^6 points the library would form 3e10 pairs.
    {("neuraloperator", 10**4): 180, ("pointproj", 10**4): 5, ("pointproj", 10**6): 150},
    {"radius": RADIUS, "channels": 3, "queries": 32**3},
)  # only eager: the number of pairs is a shape
GEOTRANSOLVER = Model(
    "physicsnemo.models.geotransolver",
    make_geotransolver,
    {("nvidia-physicsnemo", 10**5): 90, ("pointproj", 10**5): 90},
    {"radius": 0.5, "channels": 6},
    ("eager", "compiled"),
)
MODELS = {"gino": GINO, "geotransolver": GEOTRANSOLVER}


def parts(config: BenchConfig, name: str) -> Iterator[Part]:
    """One for each row of a model."""
    model = MODELS[name]
    for implementation, points in model.seconds_on_cpu:
        ours = implementation == "pointproj"
        of = {
            "implementation": implementation,
            "package": implementation,
            "kind": "backend" if ours else "peer",
        }
        of |= {"workload": name, "operator": "radius", "mode": "step", "queries": points, **model.columns}
        for execution in model.executions:
            measured = partial(_measured, model, ours)
            yield from one_row(config, measured, LONGEST_S, execution=execution, references=points, **of)


def _measured(model: Model, ours: bool, recorder: Recorder, blank: Row) -> Row:
    device, points = recorder.device, blank.references
    if device.type == "cpu":
        recorder.limits.refuse_if_slow(model.seconds_on_cpu[blank.implementation, points])
    if missing := import_failure(model.imports):
        raise NoTime(MISSING, missing)
    before, error = 0, None

    def make() -> Callable[[], None]:
        nonlocal before
        torch.manual_seed(0)
        call = step_of(*model.make(ours, points, device), compiled=blank.execution == "compiled")
        before = allocated_bytes(device)
        return call

    try:
        if ours:
            error = disagreement(model, device)
            check_error("output and gradients of a small model", error, OURS)
        timed = recorder.timed(blank, make, lambda _: None, OURS)
    finally:
        torch.compiler.reset()
        if model is GEOTRANSOLVER:
            _use_our_search(False)
    return replace(timed, parity_error=error, note=f"{before / MIB:.0f} MiB before the first step")


def disagreement(model: Model, device: torch.device) -> float:
    """The largest relative error of output and parameters' gradients of the small model with our search."""
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        network, inputs = model.make(ours, None, device)
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

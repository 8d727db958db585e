"""The model of the workload ``geotransolver``: PhysicsNeMo's GeoTransolver with local features of six scales.

A step makes twelve ball queries, two for each scale, of 32 neighbours each, among the points themselves. The
library's own search takes the first neighbours that it meets, ours the nearest ones.
"""

import functools

import numpy as np
import torch
from torch import Tensor, nn

from pointproj.benchmark.workloads import furniture_surface

PACKAGE = "nvidia-physicsnemo"
IMPORTS = "physicsnemo.models.geotransolver"
EXECUTIONS = ("eager", "compiled")
RADII = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5)  # the surface is 1 long
NEIGHBORS = 32
RADIUS = max(RADII)
CHANNELS = 6
SIZES = {PACKAGE: (10**5,), "pointproj": (10**5,)}
SECONDS_ON_CPU = {(PACKAGE, 10**5): 90.0, ("pointproj", 10**5): 90.0}


def make(replaced: bool, points: int, device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    """As :func:`pointproj.benchmark.gino.make`."""
    if replaced:
        _install()
    surface = (
        torch.from_numpy(furniture_surface("chair", points, np.random.default_rng(0))).float().to(device)
    )
    return _model(device, RADII), _inputs(surface / 2)


def make_small(replaced: bool, device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    """The same with few points and a small network; the library searches in torch, for the nearest."""
    from physicsnemo.nn.functional import radius_search
    from physicsnemo.nn.module import ball_query

    if replaced:
        _install()
    else:
        nearest = functools.partial(radius_search, implementation="torch")
    ball_query.radius_search = radius_search if replaced else nearest
    points = torch.rand(300, 3, generator=torch.Generator().manual_seed(0)).to(device)
    settings = {"n_layers": 1, "n_hidden": 16, "n_head": 2, "slice_num": 4}
    return _model(device, (0.1, 0.3), **settings), _inputs(points)


def _install() -> None:
    from pointproj.compat import physicsnemo

    physicsnemo.install()


def _model(device: torch.device, radii: tuple[float, ...], **settings) -> nn.Module:
    from physicsnemo.models.geotransolver import GeoTransolver

    scales = {"radii": [*radii], "neighbors_in_radius": [NEIGHBORS] * len(radii)}
    local = {"geometry_dim": 3, "include_local_features": True, **scales}
    return GeoTransolver(functional_dim=CHANNELS, out_dim=4, **local, **settings).to(device)


def _inputs(points: Tensor) -> dict[str, Tensor]:
    features = torch.cat([points, points.square()], dim=1)
    return {"local_embedding": features[None], "local_positions": points[None], "geometry": points[None]}

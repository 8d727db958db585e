"""The model of the workload ``gino``: neuraloperator's GINO with its defaults, on a surface.

A step searches for the neighbours of 32^3 grid points among the surface points, and of the surface points
among the grid points, and puts a network between each pair. The library's own search forms all pairs, and its
own sums are a loop over the queries.
"""

import numpy as np
import torch
from torch import Tensor, nn

from pointproj.benchmark.workloads import furniture_surface

PACKAGE = "neuraloperator"
IMPORTS = "neuralop.models"
EXECUTIONS = ("eager",)  # the number of pairs is a shape
GRID = 32
RADIUS = 0.033  # the default
CHANNELS = 3
SIZES = {PACKAGE: (10**4,), "pointproj": (10**4, 10**6)}  # of 10^6 points the library would form 3e10 pairs
SECONDS_ON_CPU = {(PACKAGE, 10**4): 180.0, ("pointproj", 10**4): 5.0, ("pointproj", 10**6): 150.0}


def make(replaced: bool, points: int, device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model, and what a step calls it with.

    Parameters
    ----------
    replaced : bool
        Whether its search and its integral are ours.
    points : int
        On the surface.
    device : torch.device

    Returns
    -------
    nn.Module, dict of str to tensor
    """
    surface = (
        torch.from_numpy(furniture_surface("chair", points, np.random.default_rng(0))).float().to(device)
    )
    return _model(replaced, device, radius=RADIUS), _inputs((surface + 1) / 2, GRID)


def make_small(replaced: bool, device: torch.device) -> tuple[nn.Module, dict[str, Tensor]]:
    """The same with few points and a small network, for a comparison of results."""
    points = torch.rand(300, 3, generator=torch.Generator().manual_seed(0)).to(device)
    inputs = _inputs(points, side=8)
    grid = inputs["latent_queries"].view(-1, 3).double()
    # At the radius itself the library's rounding, of a matrix product, decides what is a neighbour.
    near = ((torch.cdist(points.double(), grid) - 0.25).abs() < 1e-3).any(1)
    settings = {"fno_n_modes": (4, 4, 4), "fno_hidden_channels": 8}
    return _model(replaced, device, radius=0.25, **settings), _inputs(points[~near], side=8)


def _model(replaced: bool, device: torch.device, radius: float, **settings) -> nn.Module:
    from neuralop.models import GINO

    # Without Open3D and torch-scatter, which are made for no recent torch.
    without = {"gno_use_open3d": False, "gno_use_torch_scatter": False}
    radii = {"in_gno_radius": radius, "out_gno_radius": radius}
    model = GINO(in_channels=CHANNELS, out_channels=1, **radii, **without, **settings).to(device)
    if replaced:
        from pointproj.compat.neuraloperator import replace_search

        replace_search(model)
    return model


def _inputs(points: Tensor, side: int) -> dict[str, Tensor]:
    ticks = torch.linspace(0, 1, side, device=points.device)
    grid = torch.stack(torch.meshgrid(ticks, ticks, ticks, indexing="ij"), dim=-1)
    function = points[None] - 0.5
    return {
        "input_geom": points[None],
        "latent_queries": grid[None],
        "output_queries": points[None],
        "x": function,
    }

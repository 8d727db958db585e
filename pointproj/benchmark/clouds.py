"""The clouds of the workloads: functions of a random generator that give (N, 3) points in float64."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pointproj.benchmark.cases import cube
from pointproj.data.furniture import CLASSES, make_furniture
from pointproj.geometry.meshes import normalize
from pointproj.geometry.sampling import sample_surface

MakeCloud = Callable[[torch.Generator], Tensor]

SEMI_AXES = (2.0, 0.9, 0.7)  # of the body in a graded cloud
FIRST_LAYER, LAST_LAYER = 1e-5, 5.0  # distances from its wall
WAKE = (1.5, -0.75, -0.5), (6.0, 1.5, 1.0)  # corner and size of the refined box behind it
FAR_FIELD = (80.0, 40.0, 40.0)  # size of the box around it


def uniform(count: int) -> MakeCloud:
    """Points in [-1, 1]^3."""
    return lambda g: cube(g, count)


def surface(count: int) -> MakeCloud:
    """Points on the surfaces of ten pieces of furniture, each in a cube of its own, side by side."""

    def points(g: torch.Generator) -> Tensor:
        rng = np.random.default_rng(torch.randint(2**31, (), generator=g).item())
        shares = np.diff(np.linspace(0, count, len(CLASSES) + 1).astype(int))
        clouds = [furniture_surface(name, int(n), rng) for name, n in zip(CLASSES, shares, strict=True)]
        for place, sampled in enumerate(clouds):
            sampled[:, 0] += 2 * place
        cloud = torch.from_numpy(np.concatenate(clouds))
        return cloud[torch.randperm(count, generator=g)].double()

    return points


def crystal(count: int) -> MakeCloud:
    """The first points of a face-centred cubic crystal of edge 1, cell by cell."""

    def points(g: torch.Generator) -> Tensor:
        side = next(side for side in range(1, count) if 4 * side**3 >= count)
        ticks = torch.arange(side, dtype=torch.float64) + 0.25  # no point at 0: some libraries fill with it
        cells = torch.cartesian_prod(ticks, ticks, ticks)
        of_cell = torch.tensor([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]], dtype=torch.float64)
        return (cells[:, None] + of_cell).view(-1, 3)[:count]

    return points


def furniture_surface(class_name: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, 3) points on the surface of one piece, within [-1, 1]^3."""
    return sample_surface(normalize(make_furniture(class_name, seed=1)), count, rng)[0]


def ellipsoid(count: int) -> MakeCloud:
    """Points on the wall of the body that :func:`graded` clouds surround."""
    return lambda g: _directions(g, count) * torch.tensor(SEMI_AXES, dtype=torch.float64)


def graded(count: int, first_layer: float = FIRST_LAYER) -> MakeCloud:
    """Points as cells of a flow around a body lie.

    Half of them are graded towards its wall, with equally many in each decade of the distance from
    ``first_layer`` on, a quarter refines its wake, the others fill the far field.
    """

    def points(g: torch.Generator) -> Tensor:
        near, wake = count // 2, count // 4
        outward = _directions(g, near)
        distances = first_layer * (LAST_LAYER / first_layer) ** torch.rand(
            near, 1, generator=g, dtype=torch.float64
        )
        wall = outward * (distances + torch.tensor(SEMI_AXES, dtype=torch.float64))
        corner, size, far = (torch.tensor(of, dtype=torch.float64) for of in (*WAKE, FAR_FIELD))
        behind = corner + size * torch.rand(wake, 3, generator=g, dtype=torch.float64)
        around = far / 2 * cube(g, count - near - wake)
        cloud = torch.cat([wall, behind, around])
        return cloud[torch.randperm(count, generator=g)]

    return points


def _directions(g: torch.Generator, count: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(count, 3, generator=g, dtype=torch.float64))

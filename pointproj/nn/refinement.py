"""Features on a grid of cells of the query cube: convolutions that refine them, and their interpolation."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pointproj.nn.attention import take_rows

GROUPS = 8  # of channels, for normalisation


class Residual(nn.Module):
    """Two 3^3 convolutions with normalisation, added to what came in."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv3d(in_channels, channels, 3, padding=1)
        self.first_norm = nn.GroupNorm(GROUPS, channels)
        self.second = nn.Conv3d(channels, channels, 3, padding=1)
        self.second_norm = nn.GroupNorm(GROUPS, channels)
        self.passed = nn.Conv3d(in_channels, channels, 1) if in_channels != channels else nn.Identity()

    def forward(self, grid: Float[Tensor, "b c s s s"]) -> Float[Tensor, "b channels s s s"]:
        """Refine; the side stays the same."""
        hidden = self.first_norm(self.first(grid)).relu()
        return (self.second_norm(self.second(hidden)) + self.passed(grid)).relu()


class GridRefinement(nn.Module):
    """A U-Net over grids of halving sides: what is far away reaches every node through the coarse ones.

    Each level gets an input of its own; the finest comes first. From level to level the side halves and the
    channels double.

    Parameters
    ----------
    in_channels : int
        Of every level's input.
    channels : int
        Of the finest level and of the result; a multiple of 8.
    levels : int

    Raises
    ------
    ValueError
        If ``channels`` is not a multiple of 8.
    """

    def __init__(self, in_channels: int, channels: int, levels: int) -> None:
        super().__init__()
        if channels % GROUPS:
            raise ValueError(f"expected channels to be a multiple of {GROUPS}, got {channels}")
        widths = [channels * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            Residual(in_channels + (widths[level - 1] if level else 0), width)
            for level, width in enumerate(widths)
        )
        self.up = nn.ModuleList(Residual(coarse + fine, fine) for fine, coarse in pairwise(widths))

    def forward(self, inputs: Sequence[Float[Tensor, "b c s s s"]]) -> Float[Tensor, "b channels s s s"]:
        """Refine.

        Parameters
        ----------
        inputs : sequence of (B, in_channels, S, S, S) float tensors
            One a level; S of the first is the side of the result, and halves from one to the next.

        Returns
        -------
        (B, channels, S, S, S) float tensor
        """
        kept = []
        grid = self.down[0](inputs[0])
        for level, refine in enumerate(self.down[1:], start=1):
            kept.append(grid)
            pooled = nn.functional.max_pool3d(grid, 2)
            grid = refine(torch.cat([pooled, inputs[level].to(pooled.dtype)], dim=1))
        for fine, refine in zip(reversed(kept), reversed(self.up), strict=True):
            grid = nn.functional.interpolate(grid, scale_factor=2)
            grid = refine(torch.cat([fine, grid], dim=1))
        return grid


def cell_centres(side: int) -> Float[Tensor, "side**3 3"]:
    """Centres of the side^3 equal cells of the query cube [-1, 1]^3, x slowest and z fastest."""
    axis = (torch.arange(side, dtype=torch.float32) + 0.5) * (2 / side) - 1
    return torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), dim=-1).view(-1, 3)


def trilinear(
    grid: Float[Tensor, "b side**3 c"], points: Float[Tensor, "b q 3"], side: int
) -> Float[Tensor, "b q c"]:
    """Values between the centres of the cells, linear along each axis; the border's go on outside.

    Differentiable twice in grid and points (torch's ``grid_sample`` is not, in 3D).

    Parameters
    ----------
    grid : (B, side**3, C) float tensor
        Values at :func:`cell_centres`.
    points : (B, Q, 3) float tensor
        In the query cube. One that is not finite gets a row of NaN.
    side : int

    Returns
    -------
    (B, Q, C) float tensor
        In the grid's dtype.
    """
    place = (points + 1) * (side / 2) - 0.5
    place = torch.where(place.isfinite(), place.clamp(0, side - 1), place)
    low = place.detach().nan_to_num(0, 0, 0).clamp(max=max(side - 2, 0)).long()
    share = (place - low).to(grid.dtype)
    high = (low + 1).clamp(max=side - 1)
    total = 0
    for corner in range(8):
        upper = [corner >> axis & 1 for axis in range(3)]
        x, y, z = (high[..., axis] if upper[axis] else low[..., axis] for axis in range(3))
        weights = [share[..., axis] if upper[axis] else 1 - share[..., axis] for axis in range(3)]
        weight = weights[0] * weights[1] * weights[2]
        total = total + weight[..., None] * take_rows(grid, (x * side + y) * side + z)
    return total

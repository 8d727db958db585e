"""The width of the widest path from outside to each cell of a grid: a measure of how enclosed it is."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


def widest_path(distance: Float[Tensor, "b s s s"], rounds: int) -> Float[Tensor, "b s s s"]:
    """Radius of the largest ball that comes from outside the grid to each cell without touching the cloud.

    A path goes from cell to cell through their faces, and is as wide as its narrowest cell. Each cell gets
    the width of its widest path: a flood through gaps of at least some width fills the cells whose width is
    larger, so this holds the floods for all widths at once. Inside a closed surface it is about the radius of
    the largest hole between the samples.

    Parameters
    ----------
    distance : (B, S, S, S) float tensor
        From each cell's centre to the nearest point of the cloud.
    rounds : int
        A path may take that many cells along each axis; longer ones do not count.

    Returns
    -------
    (B, S, S, S) float tensor
        At most ``distance``, and 0 where no path was found. Without gradients.
    """
    return torch.ops.pointproj.widest_path(distance.detach(), rounds)


def plain_widest_path(distance: Tensor, rounds: int) -> Tensor:
    """The same as operators of torch, some hundreds of them."""
    side = distance.shape[-1]
    width = torch.zeros_like(distance)
    for _ in range(rounds):
        for axis in (1, 2, 3):
            ends = [0] * 6
            ends[6 - 2 * axis] = ends[7 - 2 * axis] = 1  # pad begins with the last axis
            padded = nn.functional.pad(width, ends, value=torch.inf)
            before, after = (padded.narrow(axis, start, side) for start in (0, 2))
            # max_pool3d would take ten times as long
            widest = torch.maximum(torch.maximum(before, after), width)
            width = torch.minimum(distance, widest)
    return width


# One operator to torch.compile, which would take a minute to look through the loop.
_operator = torch.library.custom_op("pointproj::widest_path", plain_widest_path, mutates_args=())
_operator.register_fake(lambda distance, rounds: torch.empty_like(distance))

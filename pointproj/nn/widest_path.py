"""How wide the way from outside is: what a flood knows of a cloud, as numbers that a network can read."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


def widest_passage(distance: Float[Tensor, "b s s s"], rounds: int) -> Float[Tensor, "b s s s"]:
    """Radius of the largest ball that comes from outside the grid to each cell without touching the cloud.

    A way is as wide as its narrowest cell, and a cell has the widest of all ways that lead to it from face to
    face of cells. A flood that stops at walls of some thickness fills the cells whose passage is wider; so
    this holds the floods of all thicknesses at once. Inside a closed surface it is about the radius of the
    largest hole between the samples.

    Parameters
    ----------
    distance : (B, S, S, S) float tensor
        From each cell's centre to the nearest point of the cloud.
    rounds : int
        A way may take that many cells along each axis; longer ones do not count.

    Returns
    -------
    (B, S, S, S) float tensor
        At most ``distance``, and 0 where no way was found. Without gradients.
    """
    return torch.ops.pointproj.widest_passage(distance.detach(), rounds)


def plain_widest_passage(distance: Tensor, rounds: int) -> Tensor:
    """The same as operators of torch, some hundreds of them."""
    side = distance.shape[-1]
    passage = torch.zeros_like(distance)
    for _ in range(rounds):
        for axis in (1, 2, 3):
            ends = [0] * 6
            ends[6 - 2 * axis] = ends[7 - 2 * axis] = 1  # pad begins with the last axis
            padded = nn.functional.pad(passage, ends, value=torch.inf)
            before, after = (padded.narrow(axis, start, side) for start in (0, 2))
            # max_pool3d would take ten times as long
            widest = torch.maximum(torch.maximum(before, after), passage)
            passage = torch.minimum(distance, widest)
    return passage


# One operator to torch.compile, which would take a minute to look through the loop.
_operator = torch.library.custom_op("pointproj::widest_passage", plain_widest_passage, mutates_args=())
_operator.register_fake(lambda distance, rounds: torch.empty_like(distance))

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
    outside = (1,) * 6
    capacity = nn.functional.pad(distance, outside, value=torch.inf)
    passage = nn.functional.pad(torch.zeros_like(distance), outside, value=torch.inf)
    for _ in range(rounds):
        for axis in range(3):
            window = [1, 1, 1]
            window[axis] = 3
            widest = nn.functional.max_pool3d(passage, window, stride=1, padding=[n // 2 for n in window])
            passage = torch.minimum(capacity, widest)
    return passage[:, 1:-1, 1:-1, 1:-1].contiguous()


# One operator to torch.compile, which would take a minute to look through the loop.
_operator = torch.library.custom_op("pointproj::widest_passage", plain_widest_passage, mutates_args=())
_operator.register_fake(lambda distance, rounds: torch.empty_like(distance))

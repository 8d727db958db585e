"""Directions that many planes of a cloud share, since shapes that people make repeat them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import normalize

from pointproj.nn.rows import take_rows
from pointproj.nn.visibility.constants import SharedDirection


def shared_directions(
    normals: Float[Tensor, "b n 3"], *, same: float, rounds: int, least: int
) -> Float[Tensor, "b d 3"]:
    """Find the directions that most planes of a cloud have.

    Some of the points vote. Each asks which others have its own direction, and goes on with the mean of
    theirs. Of those who end up at the same direction, one stands for all: the one with most votes, the first
    of equals.

    Parameters
    ----------
    normals : (B, N, 3) float tensor
        Unit normals of either sign; 0 for points that do not vote.
    same : float
        Sine of the angle between planes of one direction, at most.
    rounds : int
        How often directions are replaced by means.
    least : int
        Votes for a direction.

    Returns
    -------
    (B, 16, 3) float tensor
        The one with most votes first; 0 where there are no more.
    """
    number = torch.arange(SharedDirection.VOTERS, device=normals.device)
    # Spread over the cloud; each several times in a small one.
    voters = normals[:, number * normals.shape[1] // SharedDirection.VOTERS].nan_to_num(0.0)
    votes, own = voters.any(-1), voters
    for _ in range(rounds):
        agree = _is_close(own, voters, same) & own.any(-1)[:, :, None] & voters.any(-1)[:, None]
        pairs = zip(own[:, :, None].unbind(-1), voters[:, None].unbind(-1), strict=True)
        signs = sum(one * other for one, other in pairs).sign() * agree
        total = [(signs * part[:, None]).sum(-1) for part in voters.unbind(-1)]
        own = normalize(torch.stack(total, dim=-1), dim=-1, eps=1e-20)
        votes = agree.sum(-1)
    order = torch.where(votes > 0, (votes + 1) * SharedDirection.VOTERS - 1 - number, 0)
    surpassed = (_is_close(own, own, same) & (order[:, None] > order[:, :, None])).any(-1)
    largest, places = torch.where(surpassed, 0, order).topk(SharedDirection.COUNT, dim=1)
    enough = largest >= least * SharedDirection.VOTERS
    return torch.where(enough[..., None], take_rows(own, places), 0.0)


def _is_close(
    one: Float[Tensor, "b n 3"], other: Float[Tensor, "b n 3"], same: float
) -> Bool[Tensor, "b n n"]:
    """Of each pair of unit vectors, whether the sine of the angle between them is less than ``same``."""
    (x, y, z), (u, v, w) = one[:, :, None].unbind(-1), other[:, None].unbind(-1)
    across = y * w - z * v, z * u - x * w, x * v - y * u
    return sum(part.square() for part in across) < same**2

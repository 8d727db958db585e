"""Directions that many planes of a cloud share, since shapes that people make repeat them."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from pointproj.nn.rows import take_rows
from pointproj.nn.visibility.constants import SharedDirection


def shared_directions(
    normals: Float[Tensor, "b n 3"], *, same: float, rounds: int, least: int
) -> Float[Tensor, "b d 3"]:
    """Find the directions that most planes of a cloud have: (B, 16, 3), most votes first, 0 for none.

    Some of the points vote, by normals of either sign; 0 does not vote. Each asks which others have its own
    direction (sine of the angle ``same`` at most), and goes on with the mean of theirs, ``rounds`` times. Of
    those who end up at the same direction, one stands for all: the one with most votes, the first of equals.
    It takes ``least`` votes.
    """
    cosine = (1 - same**2) ** 0.5
    number = torch.arange(SharedDirection.VOTERS, device=normals.device)
    # Spread over the cloud; each several times in a small one. In double precision, since the cosine of a
    # small angle is too close to 1 for single.
    voters = normals[:, number * normals.shape[1] // SharedDirection.VOTERS].double().nan_to_num(0.0)
    own = voters = normalize(voters, dim=-1)
    for _ in range(rounds):
        along = own @ voters.mT
        agree = along.abs() > cosine
        own = normalize((along.sign() * agree) @ voters, dim=-1)
    votes = agree.sum(-1)
    order = torch.where(votes > 0, (votes + 1) * SharedDirection.VOTERS - 1 - number, 0)
    surpassed = ((own @ own.mT).abs() > cosine) & (order[:, None] > order[:, :, None])
    largest, places = torch.where(surpassed.any(-1), 0, order).topk(SharedDirection.COUNT, dim=1)
    enough = largest >= least * SharedDirection.VOTERS
    return torch.where(enough[..., None], take_rows(own, places), 0.0).to(normals.dtype)

"""Directions that many planes of a cloud share; shapes that people make often repeat directions."""

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

    Some of the points vote with their normals, which may have either sign; a normal of 0 does not vote. The
    direction of each voter is replaced by the mean of all normals close to it (sine of the angle at most
    ``same``), ``rounds`` times. The number of these normals are its votes. Of voters with the same direction,
    the one with most votes is kept, and the first of several with equal votes. A direction needs at least
    ``least`` votes.
    """
    cosine = (1 - same**2) ** 0.5
    number = torch.arange(SharedDirection.VOTERS, device=normals.device)
    # Voters are distributed over the cloud; in a small cloud each point votes several times. Double precision
    # is needed, since the cosine of a small angle rounds to 1 in single precision.
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

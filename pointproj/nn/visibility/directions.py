"""Directions that many planes of a cloud share, since shapes that people make repeat them: Warp kernels."""

import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.rows import take_rows
from pointproj.nn.visibility.constants import SharedDirection
from pointproj.nn.visibility.kernels import kernel


def shared_directions(
    launch, normals: Float[Tensor, "b n 3"], *, same: float, rounds: int, least: int
) -> Float[Tensor, "b d 3"]:
    """Find the directions that most planes of a cloud have.

    Some of the points vote. Each asks which others have its own direction, and goes on with the mean of
    theirs. Of those who end up at the same direction, one stands for all.

    Parameters
    ----------
    launch : callable
        Of the operator that asks.
    normals : (B, N, 3) float32 tensor
        Unit normals of either sign; 0 for points that do not vote.
    same : float
        Sine of the angle between planes of one direction, at most.
    rounds : int
        How often directions are replaced by means.
    least : int
        Votes for a direction.

    Returns
    -------
    (B, 16, 3) float32 tensor
        The one with most votes first; 0 where there are no more.
    """
    voters = normals.index_select(1, _asked_rows(normals)).contiguous()
    votes = torch.empty(voters.shape[:2], dtype=torch.int32, device=normals.device)
    order, directions = torch.empty_like(votes), torch.empty_like(voters)
    launch(votes_kernel, votes.shape, voters, same, rounds, votes, directions, block_dim=64)
    launch(order_kernel, votes.shape, votes, directions, same, order, block_dim=64)
    return _chosen(order, directions, least)


def _asked_rows(points: Float[Tensor, "b n 3"]) -> Int[Tensor, " A"]:
    """Rows of the points that vote, spread over the cloud; each several times in a small one."""
    return (
        torch.arange(SharedDirection.VOTERS, device=points.device) * points.shape[1] // SharedDirection.VOTERS
    )


@wp.func
def is_close(one: wp.vec3, other: wp.vec3, same: float):
    across = wp.cross(one, other)
    return wp.dot(across, across) < same * same


@kernel
def votes_kernel(
    voters: wp.array2d(dtype=wp.vec3),
    same: float,
    rounds: int,
    votes: wp.array2d(dtype=wp.int32),
    directions: wp.array2d(dtype=wp.vec3),
):
    """One thread a voter, launched over (B, A): how many have its direction; their mean."""
    cloud, number = wp.tid()
    own = voters[cloud, number]
    found = int(0)
    for _ in range(rounds):
        if wp.dot(own, own) > 0.0:
            total = wp.vec3()
            found = int(0)
            for other in range(voters.shape[1]):
                normal = voters[cloud, other]
                if wp.dot(normal, normal) > 0.0 and is_close(own, normal, same):
                    found += 1
                    total += wp.sign(wp.dot(own, normal)) * normal
            own = wp.normalize(total)
    votes[cloud, number] = found
    directions[cloud, number] = own


@kernel
def order_kernel(
    votes: wp.array2d(dtype=wp.int32),
    directions: wp.array2d(dtype=wp.vec3),
    same: float,
    order: wp.array2d(dtype=wp.int32),
):
    """One thread a voter: a number that is larger for more votes, 0 where others stand for it.

    Of voters with the same direction, the one with most votes stands for all, the first of equals.
    """
    cloud, number = wp.tid()
    own = votes[cloud, number]
    count = votes.shape[1]
    result = own * count + count - 1 - number
    if own == 0:
        result = int(0)
    else:
        for other in range(count):
            ahead = votes[cloud, other] > own or (votes[cloud, other] == own and other < number)
            if ahead and is_close(directions[cloud, number], directions[cloud, other], same):
                result = int(0)
    order[cloud, number] = result


def _chosen(
    order: Int[Tensor, "b A"], directions: Float[Tensor, "b A 3"], least: int
) -> Float[Tensor, "b d 3"]:
    """Directions with the most votes; 0 for those with too few."""
    largest, places = order.topk(SharedDirection.COUNT, dim=1)
    enough = largest >= least * SharedDirection.VOTERS
    return torch.where(enough[..., None], take_rows(directions, places), 0.0)


def plain_shared_directions(
    normals: Float[Tensor, "b n 3"], *, same: float, rounds: int, least: int
) -> Float[Tensor, "b d 3"]:
    """The same as operators of torch: what the kernels are held to."""

    def close(one: Tensor, other: Tensor) -> Tensor:
        pairs = (
            one[:, :, None].expand(-1, -1, SharedDirection.VOTERS, -1),
            other[:, None].expand(-1, SharedDirection.VOTERS, -1, -1),
        )
        return torch.linalg.cross(*pairs).square().sum(-1) < same**2

    voters = normals[:, _asked_rows(normals)]
    own = voters
    for _ in range(rounds):
        agree = close(own, voters) & own.any(-1)[:, :, None] & voters.any(-1)[:, None]
        signs = torch.where(agree, (own @ voters.mT).sign(), 0)
        own = torch.nn.functional.normalize(signs @ voters, dim=-1, eps=1e-20)
        votes = agree.sum(-1)
    number = torch.arange(SharedDirection.VOTERS, device=normals.device)
    order = torch.where(votes > 0, votes * SharedDirection.VOTERS + SharedDirection.VOTERS - 1 - number, 0)
    surpassed = (close(own, own) & (order[:, None] > order[:, :, None])).any(-1)
    return _chosen(torch.where(surpassed, 0, order), own, least)

"""Planes of clouds with noise, each fitted to as much of a flat face as there is: Warp kernels.

The neighbours of a point tell its plane to some tenths of the noise. A face has hundreds of samples, which
tell it far better. So planes are spread: each is fitted anew to what its neighbours' planes were fitted to,
if they agree with it, again and again; and then to all samples of the cloud that are on it. Narrow faces tell
their direction badly, but it is often one that wide faces have.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.nn.visibility.constants import FacePlane
from pointproj.nn.visibility.directions import shared_directions
from pointproj.nn.visibility.face_kernels import (
    Fitted,
    Noisy,
    fit_kernel,
    spread_kernel,
    take_kernel,
    turn_kernel,
    whole_kernel,
)
from pointproj.ops.bridge.warp_op import warp_op


def spread_planes(
    points: Float[Tensor, "b n 3"],
    rows: Int[Tensor, "b n k"],
    normals: Float[Tensor, "b n 3"],
    noise: Float[Tensor, "b 1 1"],
    sensors: Float[Tensor, "b n 3"] | None = None,
) -> tuple[Float[Tensor, "b n 3"], Float[Tensor, "b n 3"]]:
    """Improve the planes of points of clouds with noise: normals of either sign, and ways onto the planes.

    1. Each plane is moved to where the squared distances of the neighbours on it are least.
    2. Each plane is fitted anew to all that its neighbours' planes were fitted to, as far as these agree with
       it in place and direction; again and again, so that what a sample tells spreads over its face, and not
       over edges or to the other side of a board.
    3. In the last rounds, each point takes the plane of the neighbour that has the most planes around it that
       agree with it, of those that pass the point within the noise. So what lies at an edge or on a narrow
       side gets the plane of a face.
    4. Of the directions that many planes of the cloud share, a point takes the one in which a plane passes
       most neighbours within the noise, if these are nearly as many as on its own plane. Steps 1 to 3 are
       repeated.
    5. Each plane is fitted to all samples whose own planes agree with it, if there are enough of them.

    ``rows`` are those of the nearest points, the point itself first. ``normals`` are those of first planes, 0
    for a point that has none. ``noise`` is the standard deviation of each cloud's; where it is 0, everything
    stays. ``sensors`` are unit vectors to those that saw the points, 0 where not known. The results have no
    gradients.
    """
    where = points.detach().float().contiguous()
    sensors = torch.zeros_like(where) if sensors is None else sensors
    inputs = (tensor.detach().float().contiguous() for tensor in (sensors, noise.flatten(), normals))
    normals, means = _spread(where, rows.contiguous(), *inputs)
    off = ((means - where) * normals).sum(-1, keepdim=True)
    farthest = FacePlane.FARTHEST * noise
    off = torch.maximum(torch.minimum(off, farthest), -farthest)
    return normals.to(points.dtype), (off * normals).to(points.dtype)


@warp_op(
    "pointproj::spread_planes",
    outputs=lambda points, **_: dict.fromkeys(("fitted", "means"), (points.shape, torch.float32)),
)
def _spread(
    launch,
    points: Tensor,
    rows: Tensor,
    sensors: Tensor,
    noise: Tensor,
    normals: Tensor,
    *,
    fitted: Tensor,
    means: Tensor,
) -> None:
    clouds = Noisy(points, rows, sensors, noise)
    shape = points.shape[:2]
    support = points.new_empty(shape)
    now = Fitted(fitted, means, points.new_empty(*shape, 2, 3))
    other = Fitted(*(torch.empty_like(tensor) for tensor in now))
    _spread_over_faces(launch, clouds, normals, now, other, support)
    votes = (support > FacePlane.VOTING) & (noise > 0)[:, None]
    voters = torch.where(votes[..., None], now.normals, 0.0)
    directions = shared_directions(
        voters, same=FacePlane.SAME_DIRECTION, rounds=FacePlane.MEANS, least=FacePlane.VOTES
    )
    turned = torch.empty_like(points)
    launch(turn_kernel, shape, clouds, now.normals, directions, turned, block_dim=64)
    _spread_over_faces(launch, clouds, turned, now, other, support)
    for _ in range(FacePlane.WHOLE):
        launch(whole_kernel, shape, clouds, now, other, block_dim=64)
        now, other = other, now
    # After an even number of these launches, the last planes are in the outputs.


def _spread_over_faces(
    launch, clouds: Noisy, normals: Tensor, now: Fitted, other: Fitted, support: Tensor
) -> None:
    """Fit planes with these normals to the neighbours, and spread them; the result is in ``now``."""
    shape = clouds.points.shape[:2]
    launch(fit_kernel, shape, clouds, normals, now, block_dim=64)
    for number in range(FacePlane.ROUNDS):
        launch(spread_kernel, shape, clouds, now, other, support, block_dim=64)
        now, other = other, now
        if number >= FacePlane.ROUNDS - FacePlane.LAST_ROUNDS:
            launch(take_kernel, shape, clouds, now, support, other, block_dim=64)
            now, other = other, now
    # Rounds and last rounds are together an even number of swaps.

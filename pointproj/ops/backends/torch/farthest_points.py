"""Farthest points by a loop that compares all points once for each that it chooses."""

import torch
from torch import Tensor

from pointproj.ops.bridge.torch_op import torch_op
from pointproj.ops.specification.pairs import cloud_numbers
from pointproj.ops.specification.reference import squared_lengths


def _compare_all(points: Tensor, offsets: Tensor | None, starts: Tensor, steps: int) -> tuple[Tensor]:
    clouds, numbers = len(starts), torch.arange(len(points), device=points.device)
    cloud = cloud_numbers(offsets, len(points), clouds, points.device)
    finite = points.isfinite().all(-1)
    nearest = torch.where(finite, torch.inf, -1.0).to(points.dtype)
    occupied = torch.zeros(clouds, dtype=torch.bool, device=points.device)
    occupied = occupied.scatter(0, cloud, torch.ones_like(finite))
    rows, chosen = starts, []
    for _ in range(steps):
        chosen.append(torch.where(occupied, rows, -1))
        squared = squared_lengths(points - points[rows][cloud])
        nearest = torch.where(squared < nearest, squared, nearest)
        most = nearest.new_full((clouds,), -torch.inf).scatter_reduce(0, cloud, nearest, "amax")
        candidates = torch.where(nearest == most[cloud], numbers, len(points))
        rows = numbers.new_full((clouds,), len(points)).scatter_reduce(0, cloud, candidates, "amin")
        rows = rows.clamp(max=len(points) - 1)  # of clouds without points
    return (torch.stack(chosen, dim=1),)


# The specification: every point (N, 3) is compared with each that was chosen in its cloud. ``starts`` are the
# first rows of the clouds; the result is packed rows (clouds, steps).
farthest_points = torch_op(
    "pointproj::farthest_points",
    _compare_all,
    lambda points, offsets, starts, steps: (((starts.shape[0], steps), torch.int64),),
)

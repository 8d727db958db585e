"""Farthest-point sampling: the next point is always the one farthest from all that were chosen before.

Eldar et al., The farthest point strategy for progressive image sampling, 1997. The result is exact: it does
not depend on the backend or the device.
"""

from collections.abc import Sequence
from numbers import Integral

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.bridge.torch_op import torch_op
from pointproj.ops.clouds import packed
from pointproj.ops.pairs import cloud_numbers
from pointproj.ops.reference import squared_lengths
from pointproj.ops.registry import choose, modules


def farthest_points(
    points: Float[Tensor, "*batch n 3"],
    count: int | Sequence[int],
    *,
    start: int | Int[Tensor, " clouds"] = 0,
    offsets: Int[Tensor, " clouds+1"] | None = None,
    backend: str = "auto",
) -> Int[Tensor, "*batch count"]:
    """Choose points that are spread evenly over a cloud.

    Parameters
    ----------
    points : (N, 3) or (B, N, 3) float tensor
        float32 or float64, also (..., 2), or more coordinates, for which ``torch`` compares all points.
        Those with a coordinate that is not finite are chosen last.
    count : int, or sequence of int
        Points of each cloud; of ragged clouds also one number for each.
    start : int, or (B,) integer tensor
        The first row of each cloud.
    offsets : (B + 1,) integer tensor, optional
        Where the clouds of packed points (sum N, 3) begin and end.
    backend : str
        As for :func:`pointproj.knn`. Backends without this operator take that of ``torch``, as ``"auto"``
        does where ``native`` is not built: a loop that compares all points once for each that it chooses.

    Returns
    -------
    (count,), (B, count) or (sum of counts,) int64 tensor
        Rows in the order in which they were chosen: of the own cloud in a dense batch, of the packed points
        in a ragged one. Of equally far points the lower row comes first. A ragged cloud with fewer points
        repeats some, one without points gives -1.

    Raises
    ------
    TypeError, ValueError
        For arguments of wrong type, shape, dtype or device, or more points than there are.
    BackendUnavailable
        If ``backend`` names one that cannot run here.
    """
    arguments.check_cloud("points", points, in_space=False)
    if offsets is not None:
        arguments.check_cloud_offsets("offsets", offsets, points)
    clouds = len(offsets) - 1 if offsets is not None else points.shape[0] if points.ndim == 3 else 1
    counts = _checked_counts(count, clouds, points, offsets)
    if isinstance(start, Integral) and offsets is None and not 0 <= start < max(1, points.shape[-2]):
        raise ValueError(f"start must be a row of {points.shape[-2]} points; got {start}")
    module = modules[choose(backend, points.device.type, "knn")]
    positions = packed(points.detach())
    size = len(positions)
    if offsets is None:
        first = torch.arange(clouds, device=points.device) * points.shape[-2]
    else:
        first = offsets[:-1].long()
        offsets = offsets.int().contiguous()
    steps = max(counts, default=0)
    if not size or not steps:
        rows = torch.full((clouds, steps), -1, device=points.device)
    else:
        starts = (first + start).clamp(0, size - 1)
        choose_rows = getattr(module, "farthest_points", plain_farthest_points)
        if positions.shape[1] > 3:
            choose_rows = plain_farthest_points
        rows = choose_rows(positions, offsets, starts, steps)
    if offsets is not None:
        return torch.cat([own[:own_count] for own, own_count in zip(rows, counts, strict=True)])
    return rows[0] if points.ndim == 2 else rows - first[:, None]


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
plain_farthest_points = torch_op(
    "pointproj::farthest_points",
    _compare_all,
    lambda points, offsets, starts, steps: (((starts.shape[0], steps), torch.int64),),
)


def _checked_counts(
    count: int | Sequence[int], clouds: int, points: Tensor, offsets: Tensor | None
) -> list[int]:
    """The count of each cloud."""
    if isinstance(count, Integral):
        counts = [int(count)] * clouds
    elif offsets is None or len(count) != clouds:
        expected = "an integer" if offsets is None else f"an integer or {clouds} of them, one for each cloud"
        raise ValueError(f"count must be {expected}; got {count!r}")
    else:
        counts = [int(c) for c in count]
    if min(counts, default=0) < 0:
        raise ValueError(f"count must not be negative; got {count}")
    if offsets is None and max(counts, default=0) > points.shape[-2]:
        raise ValueError(f"count must be at most the {points.shape[-2]} points of a cloud; got {count}")
    return counts

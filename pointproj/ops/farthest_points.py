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
from pointproj.ops.backends.torch.brute_force import check_backend
from pointproj.ops.registry import choose, modules
from pointproj.ops.specification.clouds import packed


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
        float32 or float64, also (..., 2), or more coordinates, which only ``torch`` takes.
        Those with a coordinate that is not finite are chosen last.
    count : int, or sequence of int
        Points of each cloud; of ragged clouds also one number for each.
    start : int, or (B,) integer tensor
        The first row of each cloud.
    offsets : (B + 1,) integer tensor, optional
        Where the clouds of packed points (sum N, 3) begin and end.
    backend : str
        As for :func:`pointproj.knn`, one of ``"native"`` and ``"torch"``. That of ``torch``, which ``"auto"``
        takes where ``native`` is not built, compares all points once for each that it chooses.

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
    if points.shape[-1] > 3:
        check_backend(backend)
        backend = "torch"
    module = modules[choose(backend, points.device.type, "farthest_points")]
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
        rows = module.farthest_points(positions, offsets, starts, steps)
    if offsets is not None:
        return torch.cat([own[:own_count] for own, own_count in zip(rows, counts, strict=True)])
    return rows[0] if points.ndim == 2 else rows - first[:, None]


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

"""Farthest-point sampling: the next point is always the one farthest from all that were chosen before.

Eldar et al., The farthest point strategy for progressive image sampling, 1997. The result is exact: it does
not depend on the backend or the device.
"""

from collections.abc import Sequence

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
        The first row of each cloud, counted within the cloud; any for a cloud without points. Of values on a
        GPU, which are not read, the nearest row is taken.
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
    clouds = offsets.shape[0] - 1 if offsets is not None else points.shape[0] if points.ndim == 3 else 1
    counts = _checked_counts(count, clouds, points, offsets)
    sizes = points.shape[-2] if offsets is None else offsets.diff()
    _check_start(start, sizes, clouds, points)
    if points.shape[-1] > 3:
        check_backend(backend)
        backend = "torch"
    module = modules[choose(backend, points.device.type, "farthest_points")]
    positions = packed(points.detach())
    size = positions.shape[0]
    if offsets is None:
        first = torch.arange(clouds, device=points.device) * points.shape[-2]
    else:
        first = offsets[:-1].long()
        offsets = offsets.int().contiguous()
    steps = max(0, *counts)
    if not size or not steps:
        rows = torch.full((clouds, steps), -1, device=points.device)
    else:
        last = first + (sizes - 1)  # before the first one if a cloud has no points
        starts = torch.minimum((first + start).maximum(first), last).clamp(0, size - 1)
        rows = module.farthest_points(positions, offsets, starts, steps)
    if offsets is not None:
        return torch.cat([own[:own_count] for own, own_count in zip(rows, counts, strict=True)])
    return rows[0] if points.ndim == 2 else rows - first[:, None]


def _check_start(start: int | Tensor, sizes: int | Tensor, clouds: int, points: Tensor) -> None:
    """A row of each cloud, of one size or of its own."""
    if isinstance(start, Tensor):
        if start.dtype not in arguments.INDICES:
            raise TypeError(f"start must be an int, or an int32 or int64 tensor; got {start.dtype}")
        if start.shape != (clouds,) or start.device != points.device:
            raise ValueError(
                f"start must be an int, or have shape {(clouds,)}, one row a cloud, on {points.device}; "
                f"got {tuple(start.shape)} on {start.device}"
            )
    else:
        arguments.check_size("start", start, least=0)
    if not all(arguments.is_readable(given) for given in (start, sizes) if isinstance(given, Tensor)):
        return
    each = (given.tolist() if isinstance(given, Tensor) else [given] * clouds for given in (start, sizes))
    for cloud, (row, size) in enumerate(zip(*each, strict=True)):
        if not 0 <= row < max(1, size):
            raise ValueError(f"start must be a row of {size} points; got {row} for cloud {cloud}")


def _checked_counts(
    count: int | Sequence[int], clouds: int, points: Tensor, offsets: Tensor | None
) -> list[int]:
    """The count of each cloud."""
    if not isinstance(count, int) and hasattr(count, "tolist"):  # an array, or a number of one
        count = count.tolist()
    counts = list(count) if isinstance(count, Sequence) else [count] * clouds
    if isinstance(count, Sequence) and (offsets is None or len(counts) != clouds):
        expected = "an integer" if offsets is None else f"an integer or {clouds} of them, one for each cloud"
        raise ValueError(f"count must be {expected}; got {count!r}")
    for each in counts:
        arguments.check_size("count", each, least=0)
    if offsets is None and max(0, *counts) > points.shape[-2]:
        raise ValueError(f"count must be at most the {points.shape[-2]} points of a cloud; got {count}")
    return counts

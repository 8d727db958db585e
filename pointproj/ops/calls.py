"""What one call of an operator works with: packed clouds, a box, the backend, the tables of the index."""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pointproj.ops import arguments
from pointproj.ops.index import Index
from pointproj.ops.registry import Backend, choose, modules
from pointproj.ops.specification.clouds import Clouds, pack
from pointproj.ops.specification.periodic import PeriodicBox
from pointproj.ops.specification.records import Tables
from pointproj.ops.torch_internals import filled, has_modes, raw_stream


def checked_clouds(
    query_points: Tensor,
    reference_points: Tensor,
    query_offsets: Tensor | None,
    reference_offsets: Tensor | None,
    in_space: bool = True,
) -> Clouds:
    """The packed points of a call, after its checks."""
    arguments.check_points(query_points, reference_points, in_space)
    if query_offsets is not None or reference_offsets is not None:
        arguments.check_offsets(query_offsets, reference_offsets, query_points, reference_points)
    queries, offsets, _ = pack(query_points, query_offsets)
    return Clouds(queries, offsets, *pack(reference_points, reference_offsets))


def periodic_box(
    box: Sequence[float] | None, radius: float | Tensor | None, points: Tensor, inside: bool
) -> PeriodicBox | None:
    """The box of a call, after its checks; in the plane, z is not periodic."""
    if box is None:
        return None
    arguments.check_box(box, radius, points, inside)
    return PeriodicBox((*(float(length) for length in box), math.inf)[:3])


def choose_backend(
    backend: str,
    radius: float | Tensor | None,
    index: Index | None,
    reference_points: Tensor,
    clouds: Clouds,
    operator: str | None = None,
) -> tuple[Backend, Tables | None]:
    """The backend of one call, and the tables of its index for this search, if it has them.

    An index must be of this backend, and for points like these; ``backend="auto"`` means the index's own.
    ``radius`` is that of the search, None for kNN. ``clouds`` are the packed points. ``operator`` is what the
    backend must have, if not the search.
    """
    if index is not None and not isinstance(index, Index):
        raise TypeError(f"index must come from pointproj.build_index; got {type(index).__name__}")
    name = index.backend if index is not None and backend == "auto" else backend
    search = "knn" if radius is None else "radius"
    name = choose(name, reference_points.device.type, operator or search)
    if index is None:
        return getattr(modules, name), None
    if index.backend != name:
        raise ValueError(f"the index was built by backend {index.backend!r}; this call runs {name!r}")
    if index.shape != tuple(reference_points.shape) or index.dtype != reference_points.dtype:
        raise ValueError(
            f"the index was built for points of shape {index.shape}, {index.dtype}; "
            f"got {tuple(reference_points.shape)}, {reference_points.dtype}: build one for these points"
        )
    if index.clouds != clouds.count:
        raise ValueError(
            f"the index was built for {index.clouds} cloud(s), these points hold {clouds.count}: "
            "give build_index the reference_offsets of the call"
        )
    if index.device != reference_points.device:
        raise ValueError(
            f"the index was built on {index.device}, the points are on {reference_points.device}: "
            "build one there"
        )
    return modules[name], index.tables.get(search)


def scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a 0-dim tensor, which must not be written to.

    The tensor is filled on the device, because a copy from the host would wait for the device. To make one
    takes as long as many other steps of a call, so tensors are cached, on a GPU for each stream: work on one
    stream is in order. While a CUDA graph is captured none is taken from the cache, since the graph outlives
    it.
    """
    # A mode may return a tensor of another class.
    if torch.compiler.is_dynamo_compiling() or has_modes() or torch.is_inference_mode_enabled():
        return filled((), value, dtype, device)
    if device.type != "cuda":
        return _cached_scalar(value, dtype, device, 0)
    if torch.cuda.is_current_stream_capturing():
        return filled((), value, dtype, device)
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cached_scalar(value, dtype, index, raw_stream(index))


@functools.lru_cache(maxsize=256)
def _cached_scalar(value: float, dtype: torch.dtype, device: int | torch.device, stream: int) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)

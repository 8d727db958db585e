"""Numbers as tensors on a device."""

import functools

import torch
from torch import Tensor

from pointproj.ops.bridge.torch_internals import has_modes, raw_stream


def scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor (), not to be written to.

    It is filled on the device, since a copy from the host would wait for it. On a GPU that is one launch in
    every call, so there numbers are kept, for the stream that they were filled on: on it, they are there. A
    CUDA graph fills its own, as it needs them for as long as it lives.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or not _may_keep():
        return torch.full((), value, dtype=dtype, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    return _kept(value, dtype, index, raw_stream(index))


@functools.lru_cache(maxsize=256)
def _kept(value: float, dtype: torch.dtype, index: int, stream: int) -> Tensor:
    return torch.full((), value, dtype=dtype, device=index)


def _may_keep() -> bool:
    """Whether what is made now is an ordinary tensor, with a value already."""
    if has_modes() or torch.is_inference_mode_enabled():
        return False
    return not torch.cuda.is_current_stream_capturing()

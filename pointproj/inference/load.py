"""Load the exported package beside this file; it needs only torch.

    from load import load
    package = load("projector.package.pt2")
    values = package(query_points, reference_points)

Compiled code reads memory as it was laid out for the example that it was compiled with, and checks nothing.
:func:`load` returns a function that does.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, that the compiler takes for granted


def load(path: str | Path) -> Callable[..., Tensor]:
    """Load a package as a function of its named inputs, in their order, each (n, 3) float32.

    They may be views of any memory layout. The result (Q, 1) float32 has no gradient. On a GPU all tensors
    are on the device that was current when the package was loaded. The function raises TypeError or
    ValueError for inputs of another number, dtype, device or size.
    """
    package = torch._inductor.aoti_load_package(str(path))
    metadata = package.get_metadata()
    names, fewest = metadata["inputs"].split(), int(metadata["fewest_points"])
    device = torch.device(metadata["AOTI_DEVICE_KEY"])
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())

    def run(*inputs: Tensor) -> Tensor:
        if len(inputs) != len(names):
            raise TypeError(f"expected {len(names)} tensors, {', '.join(names)}; got {len(inputs)}")
        for name, points in zip(names, inputs, strict=True):
            _check(name, points, device)
        queries, cloud = len(inputs[0]), len(inputs[1])
        if queries < 2:
            raise ValueError(f"{names[0]} must be at least 2 points; got {queries}: repeat one")
        if cloud < fewest:
            raise ValueError(f"{names[1]} must be at least {fewest} points; got {cloud}")
        for name, points in zip(names[2:], inputs[2:], strict=True):
            if len(points) != cloud:
                raise ValueError(f"{name} must have a row for each of {cloud} points; got {len(points)}")
        with torch.no_grad():
            return package(*(_plain(points) for points in inputs))

    return run


def _check(name: str, points: Tensor, device: torch.device) -> None:
    if not isinstance(points, Tensor) or points.dtype != torch.float32:
        got = points.dtype if isinstance(points, Tensor) else type(points).__name__
        raise TypeError(f"{name} must be a torch.float32 tensor; got {got}: call .float() on it")
    if points.device != device:
        raise ValueError(
            f"{name} must be on {device}; got {points.device}: move it, or export for that device"
        )
    if points.ndim != 2 or points.shape[1] != 3:
        raise ValueError(f"{name} must have shape (n, 3), one cloud; got {tuple(points.shape)}")


def _plain(points: Tensor) -> Tensor:
    """The numbers in memory as compiled code reads them."""
    plain = points.resolve_neg().contiguous()
    return plain.clone() if plain.data_ptr() % ALIGNMENT else plain

"""Handing fresh torch tensors that require grad to a Warp kernel: the default conversion and the bridge.

``wp.from_torch`` gives such a tensor a gradient, which costs memory, a pass over it and a wait for the
device, at every call. :mod:`pointproj.ops.bridge.warp_op` converts without.
"""

from collections.abc import Callable

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.bridge.warp_op import warp_op

FACTOR = 2.0


@wp.kernel
def saxpy(
    x: wp.array(dtype=wp.float32), y: wp.array(dtype=wp.float32), a: float, z: wp.array(dtype=wp.float32)
):
    i = wp.tid()
    z[i] = a * x[i] + y[i]


@warp_op("pointproj_benchmark::saxpy", outputs=lambda x, y, a: {"z": (x.shape, x.dtype)})
def bridged_saxpy(launch, x: Tensor, y: Tensor, a: float, z: Tensor) -> None:
    launch(saxpy, x.shape[0], x, y, a, z)


def by_default_conversion(x: Tensor, y: Tensor) -> Tensor:
    """``wp.from_torch`` as it comes."""
    z = torch.empty_like(x)
    arrays = [wp.from_torch(x), wp.from_torch(y), FACTOR, wp.from_torch(z)]
    stream = {"stream": wp.stream_from_torch(torch.cuda.current_stream())} if x.is_cuda else {"device": "cpu"}
    wp.launch(saxpy, x.shape[0], inputs=arrays, **stream)
    return z


def by_bridge(x: Tensor, y: Tensor) -> Tensor:
    """The operator made by :func:`pointproj.ops.bridge.warp_op.warp_op`."""
    return bridged_saxpy(x, y, FACTOR)


def by_torch(x: Tensor, y: Tensor) -> Tensor:
    """No Warp at all."""
    return torch.add(y.detach(), x.detach(), alpha=FACTOR)


WAYS: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "warp_op": ("backend", by_bridge),
    "wp.from_torch": ("peer", by_default_conversion),
    "torch.add": ("peer", by_torch),
}


class FreshTensors:
    """Two vectors, handed out as new tensors that require grad and have none yet."""

    def __init__(self, elements: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.x, self.y = (torch.rand(elements, generator=generator, device=device) for _ in range(2))

    def call(self, way: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
        """The call to time."""
        return lambda: way(self.x.detach().requires_grad_(), self.y.detach().requires_grad_())

    def error(self, z: Tensor) -> float:
        """Largest error of a result; inf where it is not a number."""
        worst = (z.detach() - (FACTOR * self.x + self.y)).abs().max().item()
        return worst if worst == worst else float("inf")

"""The workload ``interop``: a Warp kernel called on new torch tensors that require a gradient.

``wp.from_torch`` allocates and clears a gradient for such a tensor and waits for the device, at every call.
:mod:`pointproj.ops.bridge.warp_op` converts without.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import warp as wp
from torch import Tensor

from pointproj.benchmark.config import BenchConfig
from pointproj.benchmark.peers import OURS
from pointproj.benchmark.recorder import Part, Recorder, one_row
from pointproj.benchmark.results import Row
from pointproj.ops.bridge.warp_op import warp_op

FACTOR = 2.0
ELEMENTS = {"cuda": 3 * 10**8, "cpu": 10**7}


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


# name -> kind, package, call
CALLS: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Tensor]]] = {
    "warp_op": ("backend", "warp-lang", lambda x, y: bridged_saxpy(x, y, FACTOR)),
    "wp.from_torch": ("peer", "warp-lang", by_default_conversion),
    "torch.add": ("peer", "torch", lambda x, y: torch.add(y.detach(), x.detach(), alpha=FACTOR)),
}


def parts(config: BenchConfig, device_type: str) -> Iterator[Part]:
    """One for each call."""
    elements = config.elements or ELEMENTS[device_type]
    of_all = {"workload": "interop", "operator": "saxpy", "mode": "launch"}
    of_all |= {"queries": elements, "references": elements}
    for name, (kind, package, function) in CALLS.items():
        of = {"contender": name, "kind": kind, "package": package}
        yield from one_row(config, partial(_measured, function), **of_all, **of)


def _measured(function: Callable[[Tensor, Tensor], Tensor], recorder: Recorder, blank: Row) -> Row:
    generator = torch.Generator(recorder.device).manual_seed(0)
    x, y = (torch.rand(blank.queries, generator=generator, device=recorder.device) for _ in range(2))

    def call() -> Tensor:  # of new tensors, which have no gradient yet
        return function(x.detach().requires_grad_(), y.detach().requires_grad_())

    def error_of(z: Tensor) -> float:
        return (z.detach() - (FACTOR * x + y)).abs().max().nan_to_num(nan=torch.inf).item()

    return recorder.timed(blank, lambda: call, error_of, OURS)

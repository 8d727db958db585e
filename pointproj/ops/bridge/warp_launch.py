"""Launches of Warp kernels with torch tensors as arguments, fast enough to call operators eagerly.

``wp.launch`` spends most of its time on arguments: an object for each array, one for each struct, and checks
of both. Here Warp records the launch of a kernel once, with parameters that stand in a block of memory; from
then on all arguments are packed into it at once. Such a launch is taken off a list while it is used: other
threads, and signal handlers that call the operator which they interrupt, find or record another one.
"""

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.bridge.torch_internals import raw_stream
from pointproj.ops.bridge.warp_layout import layout_of

building = threading.RLock()  # while Warp makes, compiles or loads code, which one thread may do at a time


class Launch:
    """Launches kernels on torch's current stream, with torch tensors as arguments.

    A tensor becomes the array that the kernel's annotation asks for, without a copy: ``(N, 3)`` for an
    array of ``vec3``, None for an array that is absent. For a ``wp.struct`` any object serves that has its
    fields as attributes, such as a named tuple; it is converted once, however many launches share it.
    """

    def __init__(self, device: torch.device):
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.launched: list[tuple] = []  # what ``reverse`` needs of each
        self._stream = current_stream(device) if device.type == "cuda" else None
        self._converted: dict[int, tuple] = {}

    def __call__(self, kernel: wp.Kernel, dim: int | Sequence[int], *args: Any, block_dim: int = 256) -> None:
        """Launch ``kernel`` over ``dim`` threads."""
        self.launched.append((kernel, dim, args, block_dim))
        self._launch(kernel, dim, block_dim, args)

    def reverse(self, gradients: Any) -> None:
        """Run the adjoint of everything launched so far, last first, adding to ``gradients.of(tensor)``."""
        for kernel, dim, args, block_dim in reversed(self.launched):
            grads = [gradients.of(a) if has_gradient(a) else None for a in args]
            self._launch(kernel, dim, block_dim, args, grads)

    def _launch(self, kernel: wp.Kernel, dim: Any, block_dim: int, *blocks: Sequence[Any]) -> None:
        """``blocks`` are the kernel's arguments, and for the adjoint the gradients of each."""
        if dim == 0 or (type(dim) is not int and 0 in dim):
            return
        unused = _recorded[kernel, block_dim, self.device, len(blocks)]
        try:
            recorded = unused.pop()
        except IndexError:
            recorded = _Recorded(kernel, block_dim, self._stream, len(blocks))
        recorded.launch(dim, blocks, self._converted, self._stream)
        unused.append(recorded)


def record_struct(record: type, kind_of: Callable[[Any], Any] = lambda kind: kind) -> Any:
    """A named tuple inside kernels: a ``wp.struct`` of its fields.

    Tensors are ``Annotated[Tensor, kind, dimensions of the array]``; ``kind_of`` gives the dtype of a kind.
    """
    fields = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        kind, ndim = getattr(hint, "__metadata__", (hint, 0))
        fields[name] = wp.array(dtype=kind_of(kind), ndim=ndim) if ndim else kind_of(kind)
    made = type(f"{record.__name__}Struct", (), {"__annotations__": fields, "__module__": record.__module__})
    return wp.struct(made)


class _Recorded:
    """The launch of a kernel on a device, and the memory that its parameters stand in."""

    def __init__(self, kernel: wp.Kernel, block_dim: int, stream: wp.Stream | None, blocks: int):
        self.layout = layout_of(kernel)
        kinds, adjoint = [a.type for a in kernel.adj.args], blocks > 1
        blank = [None if wp.types.is_array(kind) else kind() for kind in kinds]
        where = {"device": "cpu", "block_dim": 1}
        if stream is not None:
            where = {"stream": stream, "block_dim": block_dim}
        given = {"adj_inputs": blank if adjoint else [], "adjoint": adjoint, "record_cmd": True}
        with building:
            self.command = wp.launch(kernel, 1, blank, **given, **where)
        self.dim: Any = 1
        self.memory = [ctypes.create_string_buffer(self.layout.packed.size) for _ in range(blocks)]
        for i, memory in enumerate(self.memory):
            for place, parameter in enumerate(self.layout.views(memory)):
                self.command.set_param_at_index_from_ctype(place, parameter, adjoint=i > 0)

    def launch(self, dim: Any, blocks: Sequence[Sequence], converted: dict, stream: wp.Stream | None) -> None:
        if dim != self.dim:
            self.command.set_dim(dim)
            self.dim = dim
        for memory, values in zip(self.memory, blocks, strict=True):
            self.layout.packed.pack_into(memory, 0, *self.layout.flat(values, converted))
        self.command.launch(stream)


_recorded: defaultdict[tuple, list[_Recorded]] = defaultdict(list)  # launches that are not in use


def has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


_streams: dict[tuple[int, int], wp.Stream] = {}


def current_stream(device: torch.device) -> wp.Stream:
    """torch's current stream on a GPU, as Warp takes it."""
    key = device.index, raw_stream(device.index)
    if key not in _streams:
        with building:
            wp.init()  # before the first launch nothing has
            _streams.setdefault(key, wp.stream_from_torch(torch.cuda.current_stream(device)))
    return _streams[key]

"""Launches of Warp kernels with torch tensors as arguments, fast enough to call operators eagerly.

``wp.launch`` spends most of its time on arguments: an object for each array, one for each struct, and checks
of both. Here Warp records the launch of a kernel once; from then on the arguments are written straight into
the memory that the kernel takes its parameters from. A test holds that memory to what Warp itself writes.
"""

import ctypes
import functools
import math
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import warp as wp
from torch import Tensor
from warp._src import context
from warp._src.codegen import Struct

from pointproj.ops.bridge.parameters import Parameters
from pointproj.ops.bridge.replay import Run, Source, recording
from pointproj.ops.bridge.scratch import Part

MOST_SIZES = 64  # that a recorded launch remembers
WORD = struct.Struct("q")  # an address


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
        self._recorded = _of_thread.recorded[device]
        self._structs: dict[int, tuple] = {}
        self._recording = recording()

    def __call__(self, kernel: wp.Kernel, dim: int | Sequence[int], *args: Any, block_dim: int = 256) -> None:
        """Launch ``kernel`` over ``dim`` threads."""
        self.launched.append((kernel, dim, args, block_dim))
        recorded = self._recorded.get((kernel, block_dim))
        if recorded is None:
            if _is_empty(dim):
                return
            recorded = self._recorded[kernel, block_dim] = Recorded(kernel, block_dim, self._stream)
        recorded.launch(dim, (args,), self._structs, self._stream)
        if self._recording is not None and not _is_empty(dim):
            self._recording.report(Made(recorded))

    def reverse(self, gradients: Any) -> None:
        """Run the adjoint of everything launched so far, last first, adding to ``gradients.of(tensor)``."""
        for kernel, dim, args, block_dim in reversed(self.launched):
            grads = [gradients.of(a) if has_gradient(a) else None for a in args]
            key = kernel, block_dim, "adjoint"
            recorded = self._recorded.get(key)
            if recorded is None and not _is_empty(dim):
                recorded = self._recorded[key] = Recorded(kernel, block_dim, self._stream, adjoint=True)
            if recorded is not None:
                recorded.launch(dim, (args, grads), self._structs, self._stream)


class Recorded:
    """The launch of one kernel on one device, with memory for its parameters; for one thread alone."""

    def __init__(self, kernel: wp.Kernel, block_dim: int, stream: wp.Stream | None, *, adjoint: bool = False):
        self.layout = layout_of(kernel)
        on_gpu = {"stream": stream, "block_dim": block_dim}
        self.command = wp.launch(
            kernel,
            1,
            inputs=[_blank(a.type) for a in kernel.adj.args],
            adj_inputs=[None] * len(kernel.adj.args) if adjoint else [],
            adjoint=adjoint,
            record_cmd=True,
            **({"device": "cpu", "block_dim": 1} if stream is None else on_gpu),
        )
        self.memory = [ctypes.create_string_buffer(self.layout.size) for _ in range(1 + adjoint)]
        self.function = self.command.hooks.backward if adjoint else self.command.hooks.forward
        self.dim: Any = None
        self.bounds: dict[Any, Any] = {}
        if stream is not None:
            starts = [ctypes.addressof(m) + offset for m in self.memory for offset in self.layout.offsets]
            self.command.params_addr[1:] = starts

    def launch(
        self, dim: int | Sequence[int], blocks: Sequence[Sequence], structs: dict, stream: wp.Stream | None
    ) -> None:
        """``blocks`` are the kernel's arguments, and for the adjoint the gradients of each."""
        if dim != self.dim and not self.resize(dim):
            return
        for memory, values in zip(self.memory, blocks, strict=True):
            self.layout.format.pack_into(memory, 0, *self.layout.flat(values, structs))
        if stream is None:
            self.function(ctypes.byref(self.command.bounds), *self.memory)
        else:
            self.command.launch(stream)

    def resize(self, dim: int | Sequence[int]) -> bool:
        """Whether there is anything to launch."""
        if _is_empty(dim):
            return False
        key = (dim,) if isinstance(dim, int) else tuple(dim)
        if key not in self.bounds:
            if len(self.bounds) >= MOST_SIZES:
                self.bounds.clear()
            self.command.set_dim(key)
            self.bounds[key] = self.command.bounds
        self.command.bounds = self.bounds[key]
        if self.command.params_addr is not None:
            self.command.params_addr[0] = ctypes.addressof(self.command.bounds)
        self.dim = dim
        return True


class Made:
    """A launch as it was just made, to be made again."""

    def __init__(self, recorded: Recorded) -> None:
        self.command, self.layout = recorded.command, recorded.layout
        self.bounds, self.function = self.command.bounds, recorded.function
        self.block = bytes(recorded.memory[0])
        self.pointers = [WORD.unpack_from(self.block, offset)[0] for offset in self.layout.pointers]

    @staticmethod
    def again(launches: Sequence["Made"], sources: Sequence[Sequence[Source]]) -> Run:
        """See :class:`pointproj.ops.bridge.replay.Launch`."""
        pointers = [m.layout.pointers for m in launches]
        parameters = Parameters([m.block for m in launches], pointers, sources)
        kind = _again_on_cpu if launches[0].command.device.is_cpu else _again_on_gpu
        launch = kind(launches, parameters.addresses)

        def run(_: Any, addresses: list[int], stream: int) -> None:
            parameters.point_into(addresses)
            launch(stream)

        return run


def _again_on_cpu(launches: Sequence[Made], addresses: Sequence[int]) -> Callable[[int], None]:
    calls = [
        (m.function, ctypes.byref(m.bounds), ctypes.c_void_p(address))
        for m, address in zip(launches, addresses, strict=True)
    ]

    def launch(_: int) -> None:
        for function, bounds, block in calls:
            function(bounds, block)

    return launch


def _again_on_gpu(launches: Sequence[Made], addresses: Sequence[int]) -> Callable[[int], None]:
    calls = []
    for made, address in zip(launches, addresses, strict=True):
        command, hooks = made.command, made.command.hooks
        parameters = (ctypes.c_void_p * (1 + len(made.layout.offsets)))(
            ctypes.addressof(made.bounds), *(address + offset for offset in made.layout.offsets)
        )
        settings = command.max_blocks, command.block_dim, int(command.grid_stride), command.cluster_dim
        fixed = command.device.context, made.function, made.bounds.size, *settings, hooks.forward_smem_bytes
        calls.append((made, (*fixed, parameters)))
    launch_kernel = context.runtime.core.wp_cuda_launch_kernel

    def launch(stream: int) -> None:
        for made, fixed in calls:
            if launch_kernel(*fixed, stream, None):
                command = made.command
                context._raise_cuda_launch_error(command.kernel, command.device, command.hooks, False)

    return launch


class _OfThread(threading.local):
    """What must not be shared: while a kernel is launched on a CPU, other threads run."""

    def __init__(self) -> None:
        self.recorded: defaultdict[torch.device, dict] = defaultdict(dict)


_of_thread = _OfThread()


class Layout:
    """How values become a kernel's parameters, or the fields of a struct: as a C compiler lays them out."""

    def __init__(self, kinds: Sequence[Any]):
        fields = [_field(kind) for kind in kinds]
        self.flatten = [field.flat for field in fields]
        named = [(f"_{i}", field.ctype) for i, field in enumerate(fields)]
        block = type("Block", (ctypes.Structure,), {"_fields_": named})
        self.size = ctypes.sizeof(block)
        self.offsets = [getattr(block, name).offset for name, _ in named]
        self.format = struct.Struct(_padded(self.offsets, [f.format for f in fields], self.size))
        places = zip(self.offsets, fields, strict=True)
        self.pointers = [offset + pointer for offset, field in places for pointer in field.pointers]

    def flat(self, values: Sequence[Any], structs: dict) -> list:
        """The values as ``format`` packs them; ``structs`` holds those packed before."""
        flat = []
        for flatten, value in zip(self.flatten, values, strict=True):
            flat += flatten(value, structs)
        return flat


@functools.cache
def layout_of(kernel: wp.Kernel) -> Layout:
    return Layout([a.type for a in kernel.adj.args])


class _ArrayField:
    def __init__(self, kind: wp.array):
        self.kind, self.ndim = kind, kind.ndim
        self.inner = tuple(getattr(kind.dtype, "_shape_", ()))
        self.inner_strides = tuple(math.prod(self.inner[axis + 1 :]) for axis in range(len(self.inner)))
        scalar = getattr(kind.dtype, "_wp_scalar_type_", kind.dtype)
        self.dtype, self.itemsize = wp.dtype_to_torch(scalar), ctypes.sizeof(scalar._type_)
        self.dims = self.ndim + len(self.inner)
        self.ctype = type(kind.__ctype__())
        offsets = [getattr(self.ctype, name).offset for name in ("data", "shape", "strides", "ndim")]
        formats = ["Q", f"{self.ndim}i", f"{self.ndim}i", "H"]
        self.format = _padded(offsets, formats, ctypes.sizeof(self.ctype))
        self.absent = (0,) * (1 + 2 * self.ndim) + (self.ndim,)
        self.pointers = offsets[:1]  # where an address stands

    def flat(self, value: Tensor | Part | None, _: dict) -> tuple:
        if value is None:
            return self.absent
        if type(value) is Part:
            if value.dtype == self.dtype and len(value.shape) == self.ndim and not self.inner:
                return value.pointer, *value.described
            value = value.tensor()
        shape, strides, ndim, size = value.shape, value.stride(), self.ndim, self.itemsize
        fits = value.dtype == self.dtype and len(shape) == self.dims
        if not fits or (self.inner and (shape[ndim:], strides[ndim:]) != (self.inner, self.inner_strides)):
            shape, strides = self.unusual(value)
        if ndim == 1:
            return value.data_ptr(), shape[0], strides[0] * size, 1
        if ndim == 2:
            return value.data_ptr(), shape[0], shape[1], strides[0] * size, strides[1] * size, 2
        return value.data_ptr(), *shape[:ndim], *[s * size for s in strides[:ndim]], ndim

    def unusual(self, value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of a number as an array, or of an empty tensor, whose strides may be anything."""
        shape = value.shape or (1,)
        if value.dtype != self.dtype or len(shape) != self.dims or shape[self.ndim :] != self.inner:
            raise TypeError(f"{self.kind} cannot be a {value.dtype} tensor of shape {tuple(value.shape)}")
        if value.numel() > 1 and self.inner:
            raise TypeError(f"{self.kind} needs tensors that are dense along their last dimensions")
        return shape, (1,) * len(shape)


class _StructField:
    def __init__(self, kind: Struct):
        self.ctype, self.kind = kind.ctype, kind
        self.layout = Layout([variable.type for variable in kind.vars.values()])
        self.format, self.pointers = f"{self.layout.size}s", self.layout.pointers
        names = list(kind.vars)
        self.values = attrgetter(*names) if len(names) > 1 else lambda value: (getattr(value, names[0]),)

    def flat(self, value: Any, structs: dict) -> tuple[bytes]:
        """``value`` packed, from the last time where it is the same object."""
        known = structs.get(id(value))
        if known is None or known[0] is not self:
            packed = self.layout.format.pack(*self.layout.flat(self.values(value), structs))
            known = structs[id(value)] = self, (packed,), value  # kept, so that no other object gets its id
        return known[1]


class _ScalarField:
    pointers = ()

    def __init__(self, kind: Any):
        self.ctype = kind._type_
        self.format = self.ctype._type_

    def flat(self, value: Any, _: dict) -> tuple:
        return (self.ctype(value or 0).value,)  # None: the gradient of a number


class _VectorField:
    pointers = ()

    def __init__(self, kind: Any):
        self.ctype = kind
        self.format = f"{ctypes.sizeof(kind)}s"

    def flat(self, value: Any, _: dict) -> tuple[bytes]:
        return (bytes(value if isinstance(value, self.ctype) else self.ctype(*value)),)


@functools.cache
def _field(kind: Any) -> Any:
    """How the values of a kernel's argument, or of a struct's variable, are packed."""
    if isinstance(kind, wp.array):
        return _ArrayField(kind)
    if isinstance(kind, Struct):
        return _StructField(kind)
    if issubclass(kind, ctypes.Array):
        return _VectorField(kind)
    return _ScalarField(kind)


def _padded(offsets: Sequence[int], formats: Sequence[str], size: int) -> str:
    """A format of the module ``struct`` that has each part where it should be."""
    made, at = "@", 0
    for offset, part in zip(offsets, formats, strict=True):
        made += f"{offset - at}x{part.removeprefix('@')}"
        at = struct.calcsize(made)
    return f"{made}{size - at}x"


def _is_empty(dim: int | Sequence[int]) -> bool:
    return dim == 0 if isinstance(dim, int) else 0 in dim


def _blank(kind: Any) -> Any:
    """Any value that Warp takes for an argument when it records a launch."""
    if isinstance(kind, wp.array):
        return None
    return kind() if isinstance(kind, Struct) or issubclass(kind, ctypes.Array) else 0


def has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


_streams: dict[tuple[int, int], wp.Stream] = {}


def current_stream(device: torch.device) -> wp.Stream:
    """torch's current stream on a GPU, as Warp takes it."""
    # What torch's own generated code calls: torch.cuda.current_stream makes an object each time.
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _streams:
        wp.init()  # before the first launch nothing has
        _streams[key] = wp.stream_from_torch(torch.cuda.current_stream(device))
    return _streams[key]

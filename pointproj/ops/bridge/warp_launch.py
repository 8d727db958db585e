"""Launches of Warp kernels with torch tensors as arguments, fast enough to call operators eagerly.

``wp.launch`` spends most of its time on arguments: an object for each array, one for each struct, and checks
of both. Here Warp records the launch of a kernel once; from then on arguments are written into the parameters
that it has recorded. Such a launch is taken off a list while it is used: other threads, and signal handlers
that call the operator which they interrupt, find or record another one.
"""

import ctypes
import functools
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
import warp as wp
from torch import Tensor

from pointproj.ops.torch_internals import raw_stream

building = threading.RLock()  # while Warp makes, compiles or loads code, which one thread may do at a time

# Writes a value into memory from an offset on; the dict holds what this launcher has converted before.
Writer = Callable[[Any, int, Any, dict[int, tuple]], None]


class Launch:
    """Launches kernels on torch's current stream, with torch tensors as arguments.

    A tensor becomes the array that the kernel's annotation asks for, without a copy: ``(N, 3)`` for an
    array of ``vec3``, None for an array that is absent. For a ``wp.struct`` any object serves that has its
    fields as attributes, such as a named tuple; it is converted once, however many launches share it. For
    ``wp.uint64`` an object serves that has an ``id``, such as ``wp.HashGrid``: it lives as long as this.
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
        self._launch(kernel, dim, block_dim, False, args)

    def reverse(self, gradients: Any) -> None:
        """Run the adjoint of everything launched so far, last first, adding to ``gradients.of(tensor)``."""
        for kernel, dim, args, block_dim in reversed(self.launched):
            grads = [gradients.of(a) if has_gradient(a) else None for a in args]
            self._launch(kernel, dim, block_dim, True, (*args, *grads))

    def _launch(self, kernel: wp.Kernel, dim: Any, block_dim: int, adjoint: bool, values: Sequence) -> None:
        if dim == 0 or (type(dim) is not int and 0 in dim):
            return
        if kernel.is_generic:
            kernel = _for_types_of(kernel, values)
        unused = _recorded[kernel, block_dim, self.device, adjoint]
        try:
            recorded = unused.pop()
        except IndexError:
            recorded = _Recorded(kernel, block_dim, self._stream, adjoint)
        recorded.launch(dim, values, self._converted, self._stream)
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
    """The launch of a kernel on a device, with the memory that its parameters stand in."""

    def __init__(self, kernel: wp.Kernel, block_dim: int, stream: wp.Stream | None, adjoint: bool):
        forward, gradients = ([_blank(a.type) for a in kernel.adj.args] for _ in range(2))
        where = {"device": "cpu", "block_dim": 1}
        if stream is not None:
            where = {"stream": stream, "block_dim": block_dim}
        given = {"adj_inputs": gradients if adjoint else [], "adjoint": adjoint, "record_cmd": True}
        with building:
            self.command = wp.launch(kernel, 1, forward, **given, **where)
        self.dim: Any = 1
        self.parameters = self.command.params[1:]  # behind the dimensions
        self.writers = _writers(kernel) * (1 + adjoint)

    def launch(
        self, dim: Any, values: Sequence, converted: dict[int, tuple], stream: wp.Stream | None
    ) -> None:
        for write, memory, value in zip(self.writers, self.parameters, values, strict=True):
            write(memory, 0, value, converted)
        if dim != self.dim:
            self.command.set_dim(dim)
            self.dim = dim
        self.command.launch(stream)


_recorded: defaultdict[tuple, list[_Recorded]] = defaultdict(list)  # launches that are not in use


def _for_types_of(kernel: wp.Kernel, values: Sequence) -> wp.Kernel:
    """A generic kernel for the types of these values."""
    found = [_type_of(kernel, a, value) for a, value in zip(kernel.adj.args, values, strict=False)]
    key = kernel, *map(wp.types.type_repr, found)
    if key not in _overloads:
        with building:
            _overloads[key] = wp.overload(kernel, found)
    return _overloads[key]


def _type_of(kernel: wp.Kernel, argument: Any, value: Any) -> Any:
    """The type that a value gives to an argument of a generic kernel."""
    kind = argument.type
    of_array = wp.types.is_array(kind)
    dtype = kind.dtype if of_array else kind
    known = getattr(dtype, "_wp_scalar_type_", dtype)
    is_known = wp.types.type_is_struct(dtype) or known is wp.bool or wp.types.type_is_scalar(known)
    if is_known and 0 not in getattr(dtype, "_shape_", ()):
        return kind
    if not of_array:
        return {bool: wp.bool, int: wp.int32, float: wp.float32}.get(type(value), type(value))
    if not isinstance(value, Tensor):
        raise TypeError(f"{kernel.key}: {argument.label} is of any dtype: give a tensor, not {value}")
    number, shape = wp.dtype_from_torch(value.dtype), tuple(value.shape[kind.ndim :])
    if hasattr(dtype, "_shape_"):
        vector = len(dtype._shape_) == 1
        number = wp.types.vector(shape[0], number) if vector else wp.types.matrix(shape, number)
    return wp.array(dtype=number, ndim=kind.ndim)


_overloads: dict[tuple, wp.Kernel] = {}


def _blank(kind: Any) -> Any:
    """A parameter of its own, which Warp takes as it is."""
    return type(kind.__ctype__())() if wp.types.is_array(kind) else kind()


@functools.cache
def _writers(kernel: wp.Kernel) -> list[Writer]:
    return [_writer(a.type) for a in kernel.adj.args]


def _writer(kind: Any) -> Writer:
    """Of a kernel's argument, or a field of a struct; None is no array, or the gradient of what has none."""
    if wp.types.is_array(kind):
        return _array_writer(kind)
    if wp.types.type_is_struct(kind):
        return _struct_writer(kind)
    if wp.types.type_is_composite(kind):
        pack = struct.Struct(f"{ctypes.sizeof(kind)}s").pack_into
        as_bytes = lambda value: bytes(value if isinstance(value, kind) else kind(*(value or ())))  # noqa: E731
        return lambda memory, at, value, _: pack(memory, at, as_bytes(value))
    pack = struct.Struct(wp.types.type_ctype(kind)._type_).pack_into
    if kind is wp.uint64:
        return lambda memory, at, value, _: pack(memory, at, getattr(value, "id", value) or 0)
    return lambda memory, at, value, _: pack(memory, at, value or 0)


def _array_writer(kind: Any) -> Writer:
    """Address, shape, strides in bytes, dimensions."""
    ndim, ctype, layout = kind.ndim, type(kind.__ctype__()), "="
    numbers = f"{ndim}i"
    parts = (ctype.data, "Q"), (ctype.shape, numbers), (ctype.strides, numbers), (ctype.ndim, "H")
    for part, form in parts:
        layout += f"{part.offset - struct.calcsize(layout)}x{form}"
    pack, absent = struct.Struct(layout).pack_into, (0,) * (1 + 2 * ndim)
    size = wp.types.type_size_in_bytes(kind.dtype) // wp.types.type_size(kind.dtype)  # of a number
    inner = wp.types.type_is_composite(kind.dtype) + wp.types.type_is_matrix(kind.dtype)  # dimensions
    checked: set[tuple] = set()  # dtypes, and shapes and strides of inner dimensions

    def write(memory: Any, at: int, value: Tensor | None, converted: dict[int, tuple]) -> None:
        if value is None:
            pack(memory, at, *absent, ndim)
            return
        if value.is_neg():  # the memory of such a view holds other numbers
            value = value.resolve_neg()
            converted[id(value)] = (value,)  # as long as it is read
        shape, strides = value.shape or (1,), value.stride() or (1,)  # a number is an array of one
        is_of = (value.dtype, shape[ndim:], strides[ndim:]) if inner else (value.dtype, len(shape))
        if is_of not in checked:
            _check(kind, value.view(shape), ndim + inner)
            if value.numel():  # the strides of empty tensors may be any
                checked.add(is_of)
        if ndim == 1:  # almost all are of one or two, and this takes half as long
            pack(memory, at, value.data_ptr(), shape[0], strides[0] * size, 1)
        elif ndim == 2:
            pack(memory, at, value.data_ptr(), *shape[:2], strides[0] * size, strides[1] * size, 2)
        else:
            pack(memory, at, value.data_ptr(), *shape[:ndim], *[s * size for s in strides[:ndim]], ndim)

    return write


def _check(kind: Any, value: Tensor, dims: int) -> None:
    """Let Warp raise what it has against a tensor as an array."""
    value = value if value.numel() else value.new_empty(value.shape)
    try:
        wp.from_torch(value, kind.dtype, requires_grad=False, return_ctype=True)
        error = None if value.ndim == dims else f"it needs {dims} dimensions"
    except RuntimeError as reason:
        error = reason
    if error:
        got = f"a {value.dtype} tensor of shape {tuple(value.shape)}"
        raise TypeError(f"{kind} cannot be {got}: {error}")


def _struct_writer(kind: Any) -> Writer:
    size = ctypes.sizeof(kind.ctype)
    fields = [(n, getattr(kind.ctype, n).offset, _writer(v.type)) for n, v in kind.vars.items()]
    pack = struct.Struct(f"{size}s").pack_into

    def write(memory: Any, at: int, value: Any, converted: dict[int, tuple]) -> None:
        known = converted.get(id(value))
        if known is None or known[1] is not kind:
            made = bytearray(size)
            for name, offset, write_field in fields:
                write_field(made, offset, None if value is None else getattr(value, name), converted)
            known = converted[id(value)] = value, kind, made  # kept, so that no other object gets its id
        pack(memory, at, known[2])

    return write


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

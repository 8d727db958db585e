"""How tensors, numbers and structs become the parameters of a Warp kernel: as a C compiler lays them out.

A test holds what is packed here to what Warp itself makes of the same values.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import warp as wp
from torch import Tensor


class _Field(NamedTuple):
    """How values become a kernel's argument, or a field of a struct."""

    ctype: Any
    format: str  # of the module ``struct``
    flat: Callable[[Any, dict[int, tuple]], Sequence]  # what is packed; the dict: what was converted before
    absent: Sequence  # what is packed for None: no array, or the gradient of what has none


def _format(places: Iterable[tuple[int, str]], size: int) -> str:
    """That of parts at these offsets, in a block of this size."""
    made = "@"
    for offset, part in places:
        made += f"{offset - struct.calcsize(made)}x{part}"
    return f"{made}{size - struct.calcsize(made)}x"


class Layout:
    """A kernel's parameters, or the fields of a struct, as a C compiler lays them out."""

    def __init__(self, kinds: Sequence[Any]):
        fields = [_field(kind) for kind in kinds]
        self._flats = [(field.flat, field.absent) for field in fields]
        # Each is wrapped in a struct: Warp takes no other parameters by their addresses.
        self._views = [type("View", (ctypes.Structure,), {"_fields_": [("value", f.ctype)]}) for f in fields]
        named = [(f"_{i}", field.ctype) for i, field in enumerate(fields)]
        block = type("Block", (ctypes.Structure,), {"_fields_": named})
        self.offsets = [getattr(block, name).offset for name, _ in named]
        places = zip(self.offsets, (field.format for field in fields), strict=True)
        self.packed = struct.Struct(_format(places, ctypes.sizeof(block)))

    def views(self, memory: ctypes.Array) -> list[ctypes.Structure]:
        return [v.from_buffer(memory, offset) for v, offset in zip(self._views, self.offsets, strict=True)]

    def flat(self, values: Sequence[Any], converted: dict[int, tuple]) -> list:
        """The values as they are packed."""
        flat: list[Any] = []
        for (of_value, absent), value in zip(self._flats, values, strict=True):
            flat += absent if value is None else of_value(value, converted)
        return flat


@functools.cache
def layout_of(kernel: wp.Kernel) -> Layout:
    return Layout([a.type for a in kernel.adj.args])


def _field(kind: Any) -> _Field:
    if wp.types.is_array(kind):
        return _array_field(kind)
    if wp.types.type_is_struct(kind):
        return _struct_field(kind)
    if wp.types.type_is_composite(kind):
        as_bytes = lambda value, _: (bytes(value if isinstance(value, kind) else kind(*value)),)  # noqa: E731
        return _Field(kind, f"{ctypes.sizeof(kind)}s", as_bytes, (bytes(kind()),))
    ctype = wp.types.type_ctype(kind)
    return _Field(ctype, ctype._type_, lambda value, _: (value,), (0,))


def _array_field(kind: Any) -> _Field:
    """Address, shape, strides in bytes, dimensions."""
    ndim, ctype = kind.ndim, type(kind.__ctype__())
    parts = (ctype.data, "Q"), (ctype.shape, f"{ndim}i"), (ctype.strides, f"{ndim}i"), (ctype.ndim, "H")
    layout = _format([(part.offset, form) for part, form in parts], ctypes.sizeof(ctype))
    size = wp.types.type_size_in_bytes(kind.dtype) // wp.types.type_size(kind.dtype)  # of a number
    inner = wp.types.type_is_composite(kind.dtype) + wp.types.type_is_matrix(kind.dtype)  # dimensions
    checked: set[tuple] = set()  # dtypes, and shapes and strides of inner dimensions

    def flat(value: Tensor, converted: dict[int, tuple]) -> tuple:
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
            return value.data_ptr(), shape[0], strides[0] * size, 1
        if ndim == 2:
            return value.data_ptr(), shape[0], shape[1], strides[0] * size, strides[1] * size, 2
        return value.data_ptr(), *shape[:ndim], *[s * size for s in strides[:ndim]], ndim

    return _Field(ctype, layout[1:], flat, (0,) * (1 + 2 * ndim) + (ndim,))


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


def _struct_field(kind: Any) -> _Field:
    layout = Layout([variable.type for variable in kind.vars.values()])
    fields = attrgetter(*kind.vars, "__class__")  # one more, so that it makes a tuple of a single one too

    def flat(value: Any, converted: dict[int, tuple]) -> tuple[bytes]:
        known = converted.get(id(value))
        if known is None or known[1] is not kind:
            packed = (layout.packed.pack(*layout.flat(fields(value)[:-1], converted)),)
            known = converted[id(value)] = value, kind, packed  # kept, so that no other object gets its id
        return known[2]

    absent = (layout.packed.pack(*layout.flat([None] * len(kind.vars), {})),)
    return _Field(kind.ctype, f"{layout.packed.size}s", flat, absent)

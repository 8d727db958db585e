"""Memory that an operator needs only while it runs: many arrays, one allocation, and no tensor for each."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Spec = tuple[Sequence[int], torch.dtype]  # shape and dtype

ALIGNMENT = 128  # bytes that a GPU fetches at a time


class Part:
    """A dense array in a piece of memory, which it keeps alive; a launch takes it like a tensor."""

    __slots__ = ("described", "dtype", "memory", "offset", "pointer", "shape")

    def __init__(self, memory: Tensor, start: int, place: "Place"):
        self.memory = memory
        self.offset, self.shape, self.dtype, self.described = place
        self.pointer = start + self.offset

    def tensor(self) -> Tensor:
        """The same as a tensor."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return self.memory[self.offset : self.offset + size].view(self.dtype).view(self.shape)


Place = tuple[int, tuple[int, ...], torch.dtype, tuple[int, ...]]  # the last as Warp describes an array


def _place(offset: int, shape: Sequence[int], dtype: torch.dtype) -> Place:
    shape = tuple(shape)
    strides = (math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape)))
    return offset, shape, dtype, (*shape, *strides, len(shape))


class Scratch:
    """Arrays of known sizes, one after the other, allocated together as often as they are needed.

    Parameters
    ----------
    cleared : sequence of (shape, dtype)
        The first arrays, which one launch can set to 0 as a whole.
    others : sequence of (shape, dtype)
        What follows them.
    """

    def __init__(self, cleared: Sequence[Spec], others: Sequence[Spec]):
        self.places, end = [], 0
        for i, (shape, dtype) in enumerate((*cleared, *others)):
            self.places.append(_place(end, shape, dtype))
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            if i + 1 == len(cleared):
                self.places.insert(0, _place(0, (end // 4,), torch.int32))
        self.size = end

    def allocate(self, device: torch.device) -> list[Part]:
        """The arrays, uninitialised; those to clear together come before them, as one array of int32."""
        memory = torch.empty(self.size, dtype=torch.uint8, device=device)
        start = memory.data_ptr()
        return [Part(memory, start, place) for place in self.places]

"""Memory that kernels take their parameters from; replayed launches write nothing but addresses there."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import numpy

from pointproj.ops.bridge.replay import Source

WORD = 8  # bytes of an address
ALIGNMENT = 16  # of a kernel's parameters


class Parameters:
    """Those of several launches, side by side, so that all addresses are written at once.

    Parameters
    ----------
    blocks : sequence of bytes
        The parameters of each launch as it was made.
    pointers : sequence of sequence of int
        Where addresses stand in each block, in bytes.
    sources : sequence of sequence of Source
        What each address comes from.

    Attributes
    ----------
    addresses : list of int
        Where each block begins.
    """

    def __init__(
        self,
        blocks: Sequence[bytes],
        pointers: Sequence[Sequence[int]],
        sources: Sequence[Sequence[Source]],
    ) -> None:
        starts = list(accumulate((-(-len(b) // ALIGNMENT) * ALIGNMENT for b in blocks), initial=0))
        self._memory = memory = ctypes.create_string_buffer(starts[-1] + ALIGNMENT)
        begin = -ctypes.addressof(memory) % ALIGNMENT
        places, froms, offsets = [], [], []
        for block, start, stand, come in zip(blocks, starts[:-1], pointers, sources, strict=True):
            memory[begin + start : begin + start + len(block)] = block
            for pointer, source in zip(stand, come, strict=True):
                if source is not None:
                    places.append((start + pointer) // WORD)
                    froms.append(source[0])
                    offsets.append(source[1])
        self._words = numpy.frombuffer(memory, numpy.int64, starts[-1] // WORD, begin)
        self._places, self._froms, self._offsets = (
            numpy.array(x, numpy.int64) for x in (places, froms, offsets)
        )
        self.addresses = [ctypes.addressof(memory) + begin + start for start in starts[:-1]]

    def point_into(self, addresses: Sequence[int]) -> None:
        """Write the addresses of this call's tensors."""
        self._words[self._places] = numpy.array(addresses, numpy.int64)[self._froms] + self._offsets

"""Shapes to sample, and sets of them that are read from the cache when needed, in bounded memory."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.data.cache import Cache
from pointproj.data.errors import DataError
from pointproj.data.preparation import pool_seed
from pointproj.geometry.sampling import PointSource, SurfaceSampler, pool_points

KEPT_BYTES = 2**28  # of shapes that a process keeps in memory, those sampled last
READ_TOGETHER = 64  # shapes, by :meth:`StoredShapes.read`


@dataclass(frozen=True)
class Shape:
    """A source of reference points, the target on the query grid, and at random points of the cube.

    Its identity follows from its content, so that equal shapes are sampled equally wherever their files lie.
    """

    name: str
    class_name: str
    identity: int
    source: PointSource
    target: Float[Tensor, " Q"]
    pool_points: Float[Tensor, "P 3"] | None = None
    pool_values: Float[Tensor, " P"] | None = None


class Entry(NamedTuple):
    """What is known of a shape before it is loaded."""

    name: str
    class_name: str
    identity: int  # a mesh that is there several times has one for each
    key: str  # in the cache


class StoredShapes(Sequence[Shape]):
    """Shapes of a cache, each loaded when it is asked for.

    Every process, those that sample ahead included, keeps up to :data:`KEPT_BYTES` of them in memory; files
    that are read again come from the system's own file cache.
    """

    def __init__(self, entries: Sequence[Entry], cache: Cache) -> None:
        self.entries = entries
        self.cache = cache
        self._kept: OrderedDict[str, tuple[Shape, int]] = OrderedDict()  # with its size in bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Shape:
        """Return a shape; a DataError says that its entry is no longer in the cache, or damaged."""
        entry = self.entries[index]
        if entry.key in self._kept:
            self._kept.move_to_end(entry.key)
            return replace(self._kept[entry.key][0], identity=entry.identity)
        shape, size = self._load(entry)
        self._kept[entry.key] = shape, size
        self._bytes += size
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            _, (_, size) = self._kept.popitem(last=False)
            self._bytes -= size
        return shape

    def read(self, entries: Iterable[Entry]) -> Iterator[Shape]:
        """Read shapes once, in threads, in the order of the entries; none stays in memory here."""
        entries = iter(entries)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            while some := [*islice(entries, READ_TOGETHER)]:
                yield from (shape for shape, _ in threads.map(self._load, some))

    def _load(self, entry: Entry) -> tuple[Shape, int]:
        arrays = self.cache.load(entry.key)
        if arrays is None:
            raise DataError(
                f"{self.cache.path(entry.key)}, the prepared {entry.name}, was there when the run began and "
                "is gone or damaged now: leave data.cache alone while a run reads it. Started again, the run "
                "prepares it anew; resume=auto continues"
            )
        vertices, faces, count = arrays["vertices"], arrays["faces"], len(arrays["pool"])
        sampler = SurfaceSampler(vertices, faces)
        target, values = (torch.from_numpy(arrays[name]).float() for name in ("target", "pool"))
        size = sum(array.nbytes for array in (vertices, faces, sampler.summed_areas))
        size += 4 * (len(target) + 4 * count)
        pool = None, None
        if count:  # the points follow from the mesh, so the cache need not hold them
            pool = torch.from_numpy(pool_points(sampler, count, pool_seed(entry.key))), values
        return Shape(entry.name, entry.class_name, entry.identity, sampler, target, *pool), size

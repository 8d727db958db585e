"""Shapes to sample, and sequences of shapes that are loaded from the cache when needed, in bounded memory."""

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
from pointproj.geometry.sampling import PointSource, SurfaceSampler, pool_points

KEPT_BYTES = 2**28  # of the last sampled shapes, which a process keeps in memory
READ_TOGETHER = 64  # shapes, by :meth:`StoredShapes.read`


@dataclass(frozen=True)
class Shape:
    """A source of reference points, with the target on the query grid and at random points of the cube.

    The identity follows from the content of the file. So equal shapes get equal samples, wherever their files
    are.
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
    identity: int  # each repeat of a mesh has another
    key: str  # in the cache


class StoredShapes(Sequence[Shape]):
    """Shapes of a cache; each is loaded when it is indexed.

    Every process, also one that samples ahead, keeps up to :data:`KEPT_BYTES` of shapes in memory. Other
    shapes are read again, mostly from the operating system's file cache.
    """

    def __init__(self, entries: Sequence[Entry], cache: Cache) -> None:
        self.entries = entries
        self.cache = cache
        self._kept: OrderedDict[str, tuple[Shape, int]] = OrderedDict()  # with its size in bytes
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Shape:
        """Return a shape; raise DataError if its cache entry was removed or damaged during the run."""
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
        """Yield shapes in the order of the entries, loaded by threads; none is kept in memory here."""
        entries = iter(entries)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            while some := [*islice(entries, READ_TOGETHER)]:
                yield from (shape for shape, _ in threads.map(self._load, some))

    def _load(self, entry: Entry) -> tuple[Shape, int]:
        arrays = self.cache.load(entry.key)
        if arrays is None:
            raise DataError(
                f"{self.cache.path(entry.key)}, the prepared {entry.name}, was removed or damaged after the "
                "run began: do not change data.cache during a run. Start the run again, which prepares the "
                "mesh again; resume=auto continues from the last checkpoint"
            )
        vertices, faces, count = arrays["vertices"], arrays["faces"], len(arrays["pool"])
        sampler = SurfaceSampler(vertices, faces)
        target, values = (torch.from_numpy(arrays[name]).float() for name in ("target", "pool"))
        size = sum(array.nbytes for array in (vertices, faces, sampler.summed_areas))
        size += 4 * (len(target) + 4 * count)
        pool = None, None
        if count:  # the points are made again from mesh and seed; the cache has only their values
            pool = torch.from_numpy(pool_points(sampler, count, int(arrays["pool_seed"]))), values
        return Shape(entry.name, entry.class_name, entry.identity, sampler, target, *pool), size

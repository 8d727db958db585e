"""Batches made on the device: shapes are copied to the device once, and every batch is drawn there.

So the host reads, samples and copies nothing while a network trains, and no processes sample ahead. The host
launches a few kernels for each batch and waits for none of them, while the device runs the previous step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import torch
import warp as wp
from torch import Tensor

from pointproj.data.batches import collate
from pointproj.data.dataset import Draw, ShapeDataset
from pointproj.data.shapes import Entry, Shape, StoredShapes
from pointproj.data.surface_draws import Surfaces, draw_from_pools, draw_on_surfaces
from pointproj.geometry.meshes import Mesh
from pointproj.geometry.warp_meshes import on_device, search_mesh
from pointproj.runtime.devices import to_device

DrawBatch = Callable[[Sequence[Draw]], dict[str, Any]]

COPIED_TOGETHER = 64  # shapes
MOST_ENTRIES = 2**31  # of a table: Warp's indices are int32


class SamplerUnavailable(RuntimeError):  # noqa: N818 - says what happened
    """Batches cannot be drawn on the device; the message says why."""


def device_sampler(dataset: ShapeDataset, device: torch.device, most_bytes: int) -> DrawBatch:
    """Copy the shapes of ``dataset`` to the device, and return a function that draws batches there.

    The function takes a list of :class:`~pointproj.data.dataset.Draw`. It returns a batch on the device, as
    :func:`pointproj.data.batches.collate` does, with ``query_points``. Its points of meshes differ from those
    that ``dataset`` draws, but they have the same distribution, and are also fixed by (seed, epoch, shape).
    With ``resample=False`` its points are those of ``dataset``.

    Raises
    ------
    SamplerUnavailable
        If the shapes take more than ``most_bytes``, or are not meshes of the cache.
    """
    if not dataset.resample:
        return _kept_samples(dataset, device, most_bytes)
    if not isinstance(dataset.shapes, StoredShapes):
        raise SamplerUnavailable("its shapes are not meshes from the cache")
    return _surface_batches(dataset, device, most_bytes)


def _kept_samples(dataset: ShapeDataset, device: torch.device, most_bytes: int) -> DrawBatch:
    """Return batches of samples that stay the same; each is copied to the device when it is first needed."""
    queries = 4 * dataset.queries if dataset.queries else len(dataset.query_points)
    most_points = max(sampling.points for sampling in dataset.samplings)
    require_memory(4 * len(dataset) * (6 * most_points + queries), most_bytes)
    grid = {"query_points": dataset.query_points.to(device)}
    sample = cache(lambda index: to_device(dataset[index], device))
    return lambda chunk: {**grid, **collate([sample(each.index) for each in chunk])}


def _surface_batches(dataset: ShapeDataset, device: torch.device, most_bytes: int) -> DrawBatch:
    """Return batches drawn from meshes that are on the device, with their targets and pools.

    A mesh that occurs several times is copied once.
    """
    entries: list[Entry] = dataset.shapes.entries
    first = {entry.key: entry for entry in reversed(entries)}
    rows = {key: row for row, key in enumerate(first)}
    shapes = dataset.shapes.read(first.values())
    scanned: list[wp.Mesh] = []

    def searchable(shape: Shape) -> Shape:
        with on_device(str(device)):
            scanned.append(search_mesh(Mesh(shape.source.vertices, shape.source.faces, shape.name)))
        return shape

    if any(sampling.is_scan for sampling in dataset.samplings):
        shapes = map(searchable, shapes)
    tables = _tables(shapes, bool(dataset.queries), device, most_bytes)
    surfaces = Surfaces(*(tables[name] for name in Surfaces._fields))
    query_points = dataset.query_points.to(device)
    if scanned:
        wp.synchronize_device(str(device))  # Warp built them on a stream of its own
    ids = torch.tensor([mesh.id for mesh in scanned], dtype=torch.int64, device=device)

    def queries(drawn: Tensor) -> tuple[Tensor, Tensor]:
        if not dataset.queries:
            return query_points, tables["target"].index_select(0, drawn[:, 0])
        pool = tables["pool_points"], tables["pool_values"]
        return draw_from_pools(*pool, drawn, dataset.seed, dataset.queries)

    def draw(chunk: Sequence[Draw]) -> dict[str, Any]:
        some = [entries[each.index] for each in chunk]
        numbers = [
            (rows[entry.key], entry.identity % 2**64, each.epoch)
            for entry, each in zip(some, chunk, strict=True)
        ]
        drawn = torch.from_numpy(np.array(numbers, dtype=np.uint64).view(np.int64))
        drawn = to_device({"drawn": drawn}, device)["drawn"]
        sampling = chunk[0].sampling
        searched = ids if scanned and sampling.is_scan else None  # ``scanned`` keeps the meshes alive
        cloud = draw_on_surfaces(*surfaces, searched, drawn, dataset.seed, sampling.drawn)
        places, target = queries(drawn)
        return {
            **sampling.known(*cloud),
            "query_points": places,
            "target": target,
            "name": [entry.name for entry in some],
            "class_name": [entry.class_name for entry in some],
            "identity": [entry.identity for entry in some],
        }

    return draw


def _tables(
    shapes: Iterable[Shape], random_queries: bool, device: torch.device, most_bytes: int
) -> dict[str, Tensor]:
    """Return the tables of :class:`Surfaces` and of the targets, each with all shapes in order."""
    rows, parts = _rows(shapes, random_queries, most_bytes), []
    while group := [*islice(rows, COPIED_TOGETHER)]:
        parts.append(to_device(_joined(group), device))
    tables = _joined(parts)
    if max(table.numel() for table in tables.values()) >= MOST_ENTRIES:
        raise SamplerUnavailable(f"a table of all shapes would have more than {MOST_ENTRIES:,} entries")
    return tables


def _rows(shapes: Iterable[Shape], random_queries: bool, most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield each shape's rows of the tables; raise SamplerUnavailable if all exceed ``most_bytes``."""
    taken = vertices = faces = 0
    for shape in shapes:
        surface = shape.source
        first_and_last = {"first_face": faces, "last_face": faces + surface.last_face}
        rows = {
            "vertices": torch.from_numpy(surface.vertices),
            "faces": torch.from_numpy(surface.faces).int() + vertices,
            "summed_areas": torch.from_numpy(surface.summed_areas),
            **{
                name: torch.tensor([face], dtype=torch.int32, device="cpu")
                for name, face in first_and_last.items()
            },
        }
        if random_queries:
            rows |= {"pool_points": shape.pool_points[None], "pool_values": shape.pool_values[None]}
        else:
            rows["target"] = shape.target[None]
        taken += sum(each.nbytes for each in rows.values())
        require_memory(taken, most_bytes)
        yield rows
        vertices, faces = vertices + len(surface.vertices), faces + len(surface.faces)


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def require_memory(needed: int, most_bytes: int) -> None:
    """Raise SamplerUnavailable if shapes that take ``needed`` bytes exceed ``most_bytes``."""
    if needed > most_bytes:
        raise SamplerUnavailable(
            f"the shapes take more than {most_bytes / 2**30:.3g} GiB of memory, a quarter of the free memory"
        )

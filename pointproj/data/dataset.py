"""Shapes to train on: found, prepared once, and sampled again in every epoch."""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from pointproj.config import Config
from pointproj.data.cache import Cache
from pointproj.data.clouds import Sampling, finished_cloud
from pointproj.data.errors import DataError
from pointproj.data.fields.statistics import FieldStatistics
from pointproj.data.layout import SPLITS, MeshFile
from pointproj.data.preparation import PreparedMesh, Recipe, build_kernels, prepare_meshes, target_device
from pointproj.data.shapes import Entry, Shape, StoredShapes
from pointproj.data.sources import mesh_files
from pointproj.geometry.meshes import MeshError, query_grid
from pointproj.geometry.sampling import FixedCloud
from pointproj.runtime.distributed import SINGLE_PROCESS, Processes
from pointproj.runtime.helpers import HelperProcesses

log = logging.getLogger(__name__)

TEST_SEED = 0  # not the run's seed: all runs are tested on the same samples


class Draw(NamedTuple):
    """Which shape to sample for a batch, and how."""

    epoch: int
    index: int
    sampling: Sampling


@dataclass(eq=False)
class ShapeDataset(Dataset[dict[str, Any]]):
    """Shapes with sampled reference points, which are fixed by (seed, epoch, shape).

    Attributes
    ----------
    shapes : sequence of Shape
        Shapes to sample; the sequence may load a shape when it is indexed.
    query_points : float32 tensor, shape (Q, 3)
        The query grid, at which each shape has its target.
    samplings : sequence of Sampling
        How points are drawn; batches cycle through these.
    seed : int
        Seed of the points.
    resample : bool
        Whether each epoch has other points; if not, all have those of epoch 0. Points that change are
        returned as drawn, and finished on the device after augmentation
        (:meth:`pointproj.data.clouds.Sampling.finish`). Points that stay are finished here.
    queries : int
        Number of query points drawn at random from each shape's pool; 0 takes the grid instead.
    """

    shapes: Sequence[Shape]
    query_points: Float[Tensor, "Q 3"]
    _: KW_ONLY
    samplings: Sequence[Sampling]
    seed: int
    resample: bool
    queries: int = 0

    one_at_a_time = False  # whether batches hold one shape

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int | Draw) -> dict[str, Any]:
        """Sample one shape. A plain index means epoch 0 and the first sampling.

        Returns
        -------
        dict
            ``reference_points`` (N, 3), ``normals`` (N, 3) and, for some samplings, ``sensors`` (N, 3), all
            float32: see :meth:`pointproj.data.clouds.Sampling.finish`. ``target`` (Q,) float32; ``name``,
            ``class_name``, ``identity``. With random queries also ``query_points`` (Q, 3) float32, the points
            of ``target``.
        """
        epoch, index, sampling = index if isinstance(index, tuple) else Draw(0, index, self.samplings[0])
        shape = self.shapes[index]
        generator = np.random.default_rng([self.seed, epoch if self.resample else 0, shape.identity])
        drawn = sampling.draw(shape.source, generator)
        queries = {"target": shape.target}
        if self.queries:
            chosen = generator.integers(len(shape.pool_points), size=self.queries)
            queries = {"query_points": shape.pool_points[chosen], "target": shape.pool_values[chosen]}
        cloud = {name: torch.from_numpy(values) for name, values in drawn.items()}
        return {
            **(cloud if self.resample else finished_cloud(cloud, sampling, generator)),
            **queries,
            "name": shape.name,
            "class_name": shape.class_name,
            "identity": shape.identity,
        }


@dataclass(frozen=True)
class PreparedData:
    """The data of a run.

    ``validation`` has the held-out training meshes, sampled like the test meshes; None if none are held out.
    ``left_out`` lists (file, reason) of each mesh that could not be used. For ``target=field`` the datasets
    are :class:`pointproj.data.fields.dataset.FieldDataset`, and there are ``statistics``.
    """

    train: ShapeDataset
    test: ShapeDataset
    left_out: list[tuple[str, str]]
    validation: ShapeDataset | None = None
    statistics: FieldStatistics | None = None  # of fields


def prepare(
    config: Config,
    processes: Processes = SINGLE_PROCESS,
    device: str = "cpu",
    meanwhile: Callable[[], None] | None = None,
) -> PreparedData:
    """Find and prepare the data of a run; it stays on disk until it is sampled.

    ``processes`` share the work; all must see the same folders. Targets are evaluated on ``device``; all
    devices give the same targets. ``data=gaussian`` has one cloud for training, validation and tests, since
    random values at unseen points cannot be predicted. If helper processes prepare meshes, ``meanwhile`` is
    called once in this process after they were started.

    Raises
    ------
    DataError
        If there is no data, or no usable mesh for training or for tests.
    MeshError
        With ``data.strict=true``, at the first unusable mesh.
    """
    if config.data.has_fields:
        from pointproj.data.fields.dataset import prepare_fields

        return prepare_fields(config, processes)
    if config.data.name == "gaussian":
        return _gaussian(config)
    started = time.monotonic()
    cores = max(1, len(os.sched_getaffinity(0)) // processes.on_this_machine)
    with HelperProcesses(cores) as helpers:
        helpers.meanwhile = partial(build_kernels, config.target.name, target_device(device, helpers))
        with processes.first_process_first():
            files = mesh_files(config.data, helpers)
        helpers.meanwhile = meanwhile
        repeats = Counter(files)
        prepared_meshes = _prepared_meshes(config, list(repeats), processes, helpers, device)
    entries, left_out = _entries(repeats, prepared_meshes)
    for split in SPLITS:
        if not entries[split]:
            first = f", such as {left_out[0][0]}: {left_out[0][1]}" if left_out else ""
            raise DataError(
                f"expected at least one usable mesh in split {split}, got none; {len(left_out)} were left "
                f"out{first}. Check data.root, data.classes and target={config.target.name}"
            )
    counts = [len(entries[split]) for split in ("train", "validation", "test")]
    ready = "%d training, %d validation and %d test meshes ready after %.1f s, %d left out"
    log.info(ready, *counts, time.monotonic() - started, len(left_out))
    grid = torch.from_numpy(query_grid(config.data.grid))
    data = config.data
    of_tests, *mixture = map(Sampling.of, data.clouds)
    of_training = {"seed": config.seed, "resample": data.resample, "queries": data.queries}
    shapes = {split: StoredShapes(some, Cache(Path(data.cache))) for split, some in entries.items()}
    train = shapes.pop("train")
    unseen = {
        split: ShapeDataset(some, grid, samplings=[of_tests], seed=TEST_SEED, resample=False)
        for split, some in shapes.items()
        if some
    }
    training = ShapeDataset(train, grid, samplings=mixture or [of_tests], **of_training)
    return PreparedData(training, unseen["test"], left_out, unseen.get("validation"))


def _entries(
    repeats: Mapping[MeshFile, int], prepared_meshes: Mapping[MeshFile, PreparedMesh]
) -> tuple[dict[str, list[Entry]], list[tuple[str, str]]]:
    """Return the entries of each split and the meshes left out, both in the order of the files."""
    entries: dict[str, list[Entry]] = {split: [] for split in (*SPLITS, "validation")}
    left_out = []
    for file in repeats:
        prepared = prepared_meshes[file]
        if prepared.reason is None:
            identity = int(prepared.digest[:16], 16)
            entries[file.split].extend(  # each repeat has an identity of its own, so it gets other samples
                Entry(file.name, file.class_name, identity + copy, prepared.key)
                for copy in range(repeats[file])
            )
        else:
            left_out.append((str(file.path), prepared.reason))
    warn_of_left_out(left_out)
    return entries, left_out


def warn_of_left_out(left_out: Sequence[tuple[str, str]]) -> None:
    """Say once for each reason which file was left out, and how many others."""
    for reason, count in Counter(reason for _, reason in left_out).items():
        first = next(path for path, own in left_out if own == reason)
        log.warning("left out %s%s: %s", first, f" and {count - 1} others" if count > 1 else "", reason)


def _prepared_meshes(
    config: Config, files: Sequence[MeshFile], processes: Processes, helpers: HelperProcesses, device: str
) -> dict[MeshFile, PreparedMesh]:
    """Prepare each file in one of the processes; return the results of all."""
    recipe = Recipe(config.data.grid, config.target.name, config.data.pool if config.data.queries else 0)
    own, cache = files[processes.rank :: processes.count], Path(config.data.cache)
    ready: dict[MeshFile, PreparedMesh] = {}
    # Closed at once if an error ends this, so that the progress bar ends before the error is printed.
    with closing(prepare_meshes(own, recipe, cache, helpers=helpers, device=device)) as prepared_meshes:
        for file, prepared in prepared_meshes:
            if prepared.reason is not None and config.data.strict:
                hint = "data.strict=true stops here, false leaves it out"
                raise MeshError(file.path, f"{prepared.reason} ({hint})")
            ready[file] = prepared
    for others in processes.gather(ready):
        ready |= others
    return ready


def _gaussian(config: Config) -> PreparedData:
    """Return the tutorial's data: one cloud ~ N(0, 1)^3, with values ~ N(0, 1) to fit on the query grid."""
    generator = np.random.default_rng(config.seed)
    cloud = FixedCloud(generator.standard_normal((config.data.points, 3), dtype=np.float32))
    target = torch.from_numpy(generator.standard_normal(config.data.grid**3, dtype=np.float32))
    shape = Shape("gaussian", "gaussian", config.seed, cloud, target)
    grid = torch.from_numpy(query_grid(config.data.grid))
    samplings = [Sampling("area", config.data.points)]
    dataset = ShapeDataset([shape], grid, samplings=samplings, seed=config.seed, resample=False)
    return PreparedData(dataset, dataset, [], dataset)

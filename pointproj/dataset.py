"""Shapes to train on: where they come from, how they are sampled, and how they become batches."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pointproj.config import Config, DataConfig
from pointproj.layout import EXPECTED_LAYOUT, SPLITS, DataError, MeshFile, find_meshes, layout_root
from pointproj.meshes import MeshError, query_grid
from pointproj.preparation import PreparedMesh, Recipe, prepare_meshes
from pointproj.sampling import FixedCloud, PointSource, SurfaceSampler

log = logging.getLogger(__name__)

TEST_SEED = 0  # samples of test shapes do not depend on the run's seed, so that runs can be compared


@dataclass(frozen=True)
class Shape:
    """One shape: a source of reference points and the target on the query grid.

    Attributes
    ----------
    name, class_name : str
    identity : int
        Known by content, so that equal shapes are sampled equally wherever their files lie.
    source : PointSource
    target : float32 tensor, shape (Q,)
    """

    name: str
    class_name: str
    identity: int
    source: PointSource
    target: Float[Tensor, " Q"]


class ShapeDataset(Dataset[dict[str, Any]]):
    """Shapes with freshly sampled reference points, fixed by (seed, epoch, shape).

    Parameters
    ----------
    shapes
        What to sample.
    query_points : float32 tensor, shape (Q, 3)
        The grid that all targets belong to.
    points
        Reference points a shape.
    seed
        Another seed draws other points.
    resample
        Draw other points in every epoch; otherwise always those of epoch 0.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        query_points: Float[Tensor, "Q 3"],
        *,
        points: int,
        seed: int,
        resample: bool,
    ) -> None:
        self.shapes = list(shapes)
        self.query_points = query_points
        self.points = points
        self.seed = seed
        self.resample = resample
        self._epoch = 0

    def __len__(self) -> int:
        return len(self.shapes)

    def set_epoch(self, epoch: int) -> None:
        """Choose whose points :meth:`__getitem__` draws; without effect unless ``resample``."""
        self._epoch = epoch if self.resample else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Sample one shape.

        Returns
        -------
        dict
            ``reference_points`` (N, 3) and ``normals`` (N, 3) float32, ``target`` (Q,) float32,
            ``name``, ``class_name``.
        """
        shape = self.shapes[index]
        generator = np.random.default_rng([self.seed, self._epoch, shape.identity])
        points, normals = shape.source.draw(self.points, generator)
        return {
            "reference_points": torch.from_numpy(points),
            "normals": torch.from_numpy(normals),
            "target": shape.target,
            "name": shape.name,
            "class_name": shape.class_name,
        }


@dataclass(frozen=True)
class PreparedData:
    """All that a run needs of its data.

    Attributes
    ----------
    train, test : ShapeDataset
    left_out : list of (file, reason)
        Meshes that could not be used.
    """

    train: ShapeDataset
    test: ShapeDataset
    left_out: list[tuple[str, str]]


def prepare(config: Config) -> PreparedData:
    """Find, prepare and load the data of a run.

    Parameters
    ----------
    config
        Sections ``data`` and ``target``, and ``seed``.

    Returns
    -------
    PreparedData
        ``data=gaussian`` has one cloud, and the test shapes are that same cloud: nothing unseen can be
        predicted about random values.

    Raises
    ------
    DataError
        If there is no data, or no usable mesh for training or for testing; says both ways forward.
    MeshError
        With ``data.strict=true``, at the first unusable mesh.
    """
    if config.data.name == "gaussian":
        return _gaussian(config)
    started = time.monotonic()
    shapes, left_out = _prepared_shapes(config, _mesh_files(config.data))
    for split in SPLITS:
        if not shapes[split]:
            first = f", such as {left_out[0][0]}: {left_out[0][1]}" if left_out else ""
            raise DataError(
                f"expected at least one usable mesh in split {split}, got none; {len(left_out)} were left "
                f"out{first}. Check data.root, data.classes and target={config.target.name}"
            )
    log.info(
        "%d training and %d test meshes ready after %.1f s, %d left out",
        len(shapes["train"]),
        len(shapes["test"]),
        time.monotonic() - started,
        len(left_out),
    )
    grid = torch.from_numpy(query_grid(config.data.grid))
    points = config.data.points
    return PreparedData(
        ShapeDataset(shapes["train"], grid, points=points, seed=config.seed, resample=config.data.resample),
        ShapeDataset(shapes["test"], grid, points=points, seed=TEST_SEED, resample=False),
        left_out,
    )


def batches(
    dataset: ShapeDataset,
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    start: int = 0,
    workers: int = 0,
) -> Iterator[dict[str, Any]]:
    """Batches of one epoch, the same for the same arguments, whatever ran before and however many workers.

    Parameters
    ----------
    dataset
        Set to ``epoch`` by this call.
    batch_size
        Shapes a batch; the last batch may hold fewer.
    shuffle
        Another order in every epoch, fixed by ``seed``.
    seed, epoch
        What the order depends on.
    start
        Batches to pass over: an epoch resumed at step ``start`` yields what it would have yielded.
    workers
        Processes that sample ahead; 0 samples in this one.

    Yields
    ------
    dict
        ``reference_points`` (B, N, 3), ``normals`` (B, N, 3), ``target`` (B, Q) and the shared
        ``query_points`` (Q, 3), float32; ``name`` and ``class_name``, lists of B.
    """
    dataset.set_epoch(epoch)
    order = np.arange(len(dataset))
    if shuffle:
        order = np.random.default_rng([seed, epoch]).permutation(len(dataset))
    chunks = [order[low : low + batch_size].tolist() for low in range(0, len(order), batch_size)][start:]
    if workers == 0:
        stacked = (collate([dataset[index] for index in chunk]) for chunk in chunks)
    else:
        stacked = DataLoader(
            dataset,
            batch_sampler=chunks,
            num_workers=min(workers, max(len(chunks), 1)),
            collate_fn=collate,
            generator=torch.Generator(),  # else starting workers would advance torch's global random state
        )
    for batch in stacked:
        yield {**batch, "query_points": dataset.query_points}


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Stack the tensors of samples along a new first axis and list their names."""
    return {
        key: torch.stack([sample[key] for sample in samples])
        if isinstance(samples[0][key], Tensor)
        else [sample[key] for sample in samples]
        for key in samples[0]
    }


def _mesh_files(data: DataConfig) -> list[MeshFile]:
    if data.name == "furniture":
        return _furniture_files(data)
    root = Path(data.root or f"data/{data.name}")
    if data.download:
        from pointproj.download import download_modelnet10

        root = download_modelnet10(root)
    if layout_root(root) is None:
        raise DataError(
            f"no meshes in {root}. Two ways forward: write data.download=true to fetch ModelNet10 into it "
            f"(473 MB), or data.root=FOLDER to read what you have, laid out as {EXPECTED_LAYOUT}. "
            "data=furniture needs neither."
        )
    return find_meshes(root, data.classes, data.limit)


def _furniture_files(data: DataConfig) -> list[MeshFile]:
    from pointproj.furniture import CLASSES, write_furniture

    family = {"varied": data.varied, "defects": data.defects}
    folder = "-".join(["furniture", *(name for name, chosen in family.items() if chosen)])
    root = Path(data.root or f"data/{folder}")
    train, test = (min(count, data.limit or count) for count in (data.train_meshes, data.test_meshes))
    files = write_furniture(root, data.classes or CLASSES, train, test, **family)
    return [MeshFile(path, path.parents[1].name, path.parent.name) for path in files]


def _prepared_shapes(
    config: Config, files: Sequence[MeshFile]
) -> tuple[dict[str, list[Shape]], list[tuple[str, str]]]:
    """Shapes by split and what was left out, both in the order of the files."""
    recipe = Recipe(config.data.grid, config.target.name)
    ready: dict[MeshFile, PreparedMesh] = {}
    # Closed at once if this stops at a mesh, so that helper processes and bar end before the error shows.
    with closing(prepare_meshes(files, recipe, Path(config.data.cache))) as prepared_meshes:
        for file, prepared in prepared_meshes:
            if prepared.reason is not None and config.data.strict:
                hint = "data.strict=true stops here, false leaves it out"
                raise MeshError(file.path, f"{prepared.reason} ({hint})")
            ready[file] = prepared
    shapes: dict[str, list[Shape]] = {split: [] for split in SPLITS}
    left_out = []
    for file in files:
        prepared = ready[file]
        if prepared.reason is None:
            shapes[file.split].append(_shape(file, prepared))
        else:
            log.warning("left out %s: %s", file.path, prepared.reason)
            left_out.append((str(file.path), prepared.reason))
    return shapes, left_out


def _shape(file: MeshFile, prepared: PreparedMesh) -> Shape:
    sampler = SurfaceSampler(prepared.vertices, prepared.faces)
    target = torch.from_numpy(prepared.target)
    return Shape(file.name, file.class_name, int(prepared.digest[:16], 16), sampler, target)


def _gaussian(config: Config) -> PreparedData:
    """The tutorial's workload: one cloud ~ N(0, 1)^3, and values ~ N(0, 1) to fit on the query grid."""
    generator = np.random.default_rng(config.seed)
    cloud = FixedCloud(generator.standard_normal((config.data.points, 3), dtype=np.float32))
    target = torch.from_numpy(generator.standard_normal(config.data.grid**3, dtype=np.float32))
    shape = Shape("gaussian", "gaussian", config.seed, cloud, target)
    grid = torch.from_numpy(query_grid(config.data.grid))
    dataset = ShapeDataset([shape], grid, points=config.data.points, seed=config.seed, resample=False)
    return PreparedData(dataset, dataset, [])

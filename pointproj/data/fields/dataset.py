"""Samples with fields to train on: a cloud of each geometry, and values at points drawn in every epoch."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import Dataset

from pointproj.config import Config
from pointproj.data.clouds import Sampling
from pointproj.data.dataset import TEST_SEED, Draw, PreparedData, warn_of_left_out
from pointproj.data.errors import DataError
from pointproj.data.fields.flow import FIELD
from pointproj.data.fields.preparation import PreparedSample, odd_units, prepare_samples
from pointproj.data.fields.samples import SPLITS, read_parameters, sample_files
from pointproj.data.fields.statistics import FieldStatistics
from pointproj.data.layout import MeshFile
from pointproj.geometry.meshes import MeshError
from pointproj.runtime.distributed import SINGLE_PROCESS, Processes

MOST_EVALUATED = 2**16
"""Random points of a validation or test sample at which errors are measured."""


@dataclass(eq=False)
class FieldDataset(Dataset[dict[str, Any]]):
    """Prepared samples; points and cloud of each are fixed by (seed, epoch, sample).

    Attributes
    ----------
    samples : sequence of PreparedSample
        Stays on disk; a draw reads the rows that it needs.
    statistics : FieldStatistics
        Scales of the training samples.
    points : int
        Reference points of each sample.
    queries : int
        Points of the field; 0 takes all, up to :data:`MOST_EVALUATED`.
    seed, resample, samplings, query_points
        As in :class:`pointproj.data.dataset.ShapeDataset`; each sample has its own query points.
    """

    samples: Sequence[PreparedSample]
    statistics: FieldStatistics
    _: KW_ONLY
    points: int
    queries: int
    seed: int
    resample: bool

    def __post_init__(self) -> None:
        self.samplings = [Sampling("area", self.points)]
        self.query_points: Float[Tensor, "0 3"] = torch.empty(0, 3)

    @property
    def one_at_a_time(self) -> bool:
        """Whether batches hold one sample, since samples differ in their number of points."""
        return not self.queries

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | Draw) -> dict[str, Any]:
        """Draw from one sample. A plain index means epoch 0.

        Returns
        -------
        dict
            ``reference_points`` and ``normals`` (N, 3), ``query_points`` (Q, 3), ``target`` (Q,) or (Q, C)
            with mean 0 and standard deviation 1, ``parameters`` (P,), and on surfaces ``query_normals``
            (Q, 3) and ``areas`` (Q,), all float32; ``name``, ``class_name``, ``identity``.
        """
        epoch, index = index[:2] if isinstance(index, tuple) else (0, index)
        sample = self.samples[index]
        whole = sample.cloud, sample.field
        counts = self.points, min(self.queries or MOST_EVALUATED, len(sample.field))
        drawn = map(_drawn, whole, counts, self.firsts(epoch, sample.identity, [*map(len, whole)]))
        return {**self.scaled(sample, *drawn), **facts_of(sample)}

    def firsts(self, epoch: int, identity: int, lengths: Sequence[int]) -> list[int]:
        """Return the first row that an epoch draws of each of a sample's arrays."""
        generator = np.random.default_rng([self.seed, epoch if self.resample else 0, identity])
        return [int(generator.integers(length)) for length in lengths]

    def scaled(
        self, sample: PreparedSample, cloud: Float[np.ndarray, "n 6"], field: Float[np.ndarray, "q c"]
    ) -> dict[str, Tensor]:
        """Return rows of a sample's cloud and field as :meth:`__getitem__` does."""
        statistics = self.statistics
        place = partial(statistics.placed, origin=sample.facts["origin"])
        values = torch.from_numpy(field[:, -sum(statistics.channels) :])
        scaled = {
            "reference_points": torch.from_numpy(place(cloud[:, :3])),
            "normals": torch.from_numpy(cloud[:, 3:]),
            "query_points": torch.from_numpy(place(field[:, :3])),
            "target": statistics.normalized(values).squeeze(-1),
            "parameters": statistics.parameter_row(sample.facts["parameters"]),
        }
        if statistics.on_surface:
            scaled["query_normals"] = torch.from_numpy(field[:, 3:6])
            scaled["areas"] = torch.from_numpy(field[:, 6])
        return scaled

    def whole(self, index: int, points: int | None = None, queries: int = 0) -> dict[str, Any]:
        """Return a sample as :meth:`__getitem__` does for tests, with all its points, the same each time."""
        same = {"queries": queries, "seed": TEST_SEED, "resample": False}
        return replace(self, points=points or self.points, **same)[index]


def facts_of(sample: PreparedSample) -> dict[str, Any]:
    """Return what a batch lists of a sample beside tensors."""
    return {"name": sample.name, "class_name": "all", "identity": sample.identity}


def _drawn(rows: np.ndarray, wanted: int, first: int) -> np.ndarray:
    """Return neighbouring rows, which are in random order, from ``first`` on; the end meets the start."""
    return np.concatenate([rows[first : first + wanted], rows[: max(0, first + wanted - len(rows))]])


def prepare_fields(config: Config, processes: Processes = SINGLE_PROCESS) -> PreparedData:
    """Find, read and check all samples of a run before it trains.

    Raises
    ------
    DataError
        If no sample of a split can be used, a sample has fewer points than ``data.points``, or parameters
        are incomplete.
    MeshError
        With ``data.strict=true``, at the first sample that cannot be used.
    """
    data = config.data
    fields = [FIELD] if data.name == "flow" and data.fields is None else data.fields
    with processes.first_process_first():
        files = sample_files(data)
        root = Path(data.root or "data/flow")
        table = read_parameters(root, files)
        ready: list[tuple[MeshFile, PreparedSample]] = []
        reasons: dict[MeshFile, str] = {}
        for file, prepared in prepare_samples(files, fields, root, table, Path(data.cache)):
            if isinstance(prepared, str):
                reasons[file] = prepared
            else:
                ready.append((file, prepared))
    if ready:
        odd = odd_units([sample for _, sample in ready], fields)
        reasons |= {ready[place][0]: reason for place, reason in odd.items()}
    for file, reason in reasons.items():
        if data.strict:
            hint = "data.strict=true stops here, false leaves it out"
            raise MeshError(file.path, f"{reason} ({hint})")
    left_out = [(str(file.path), reason) for file, reason in reasons.items()]
    warn_of_left_out(left_out)
    usable = [(file, sample) for file, sample in ready if file not in reasons]
    split = {name: [sample for file, sample in usable if file.split == name] for name in SPLITS}
    _require_usable(split, left_out)
    samples = [sample for _, sample in usable]
    _require_alike(samples, data.points)
    on_surface = all(sample.facts["on_surface"] for sample in samples)
    statistics = FieldStatistics.of([sample.facts for sample in split["train"]], fields, on_surface)
    shared = {"statistics": statistics, "points": data.points}
    unseen = {
        name: FieldDataset(split[name], **shared, queries=0, seed=TEST_SEED, resample=False)
        for name in ("validation", "test")
        if split[name]
    }
    drawn = {"queries": data.queries, "seed": config.seed, "resample": data.resample}
    train = FieldDataset(split["train"], **shared, **drawn)
    return PreparedData(train, unseen["test"], left_out, unseen.get("validation"), statistics)


def _require_usable(split: dict[str, list[PreparedSample]], left_out: Sequence[tuple[str, str]]) -> None:
    for name in ("train", "test"):
        if not split[name]:
            first = f", such as {left_out[0][0]}: {left_out[0][1]}" if left_out else ""
            raise DataError(
                f"expected at least one usable sample in split {name}, got none; {len(left_out)} were left "
                f"out{first}. Check data.root and data.fields"
            )


def _require_alike(samples: Sequence[PreparedSample], points: int) -> None:
    """Raise DataError unless all samples have enough points, and the same channels and parameters."""
    fewest = min(samples, key=lambda sample: len(sample.cloud))
    count = len(fewest.cloud)
    if count < points:
        raise DataError(
            f"{fewest.name} has {count} points, and data.points={points} are wanted of each sample: write "
            f"data.points={count}"
        )
    first = samples[0]
    for sample in samples:
        for what in ("channels", "place"):
            if sample.facts[what] != first.facts[what]:
                raise DataError(
                    f"{sample.name} has {what} {sample.facts[what]} of its fields, and {first.name} "
                    f"{first.facts[what]}: expected the same in all samples"
                )
        missing = first.facts["parameters"].keys() ^ sample.facts["parameters"].keys()
        if missing:
            raise DataError(
                f"{sample.name} and {first.name} differ in their parameters: {', '.join(sorted(missing))}; "
                "write parameters.csv with all numbers of each sample"
            )

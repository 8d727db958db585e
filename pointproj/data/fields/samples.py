"""Which files of a folder are samples, which split each belongs to, and the parameters of each."""

import csv
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pointproj.config import DataConfig
from pointproj.data.errors import DataError
from pointproj.data.fields.flow import BODIES, write_flow
from pointproj.data.layout import MeshFile
from pointproj.data.sources import held_out
from pointproj.geometry.files.measured import SUFFIXES, missing_package

log = logging.getLogger(__name__)

TABLE = "parameters.csv"
SPLITS = tuple(BODIES)  # folders with these names, directly in the root, are the splits

Parameters = Mapping[str, Mapping[str, float]]  # of each sample: its stem, or its path without suffix


def sample_files(data: DataConfig) -> list[MeshFile]:
    """List the samples of all splits; those of ``data=flow`` are made first.

    Raises DataError if there are no samples, too few for the splits, or a package is missing that reads them.
    """
    if data.name == "flow":
        root = write_flow(data.root or "data/flow", data.limit)
    elif data.root is None:
        raise DataError("data=fields reads any folder of samples: write data.root=FOLDER")
    else:
        root = Path(data.root)
    paths = [
        path
        for path in sorted(root.rglob("*"))
        if path.suffix.lower() in SUFFIXES and path.is_file() and path.name != TABLE
        if not any(part.startswith((".", "__")) for part in path.relative_to(root).parts)
    ]
    stems = Counter(path.with_suffix("") for path in paths)  # a PLY file beside another is its geometry
    paths = [path for path in paths if path.suffix.lower() != ".ply" or stems[path.with_suffix("")] == 1]
    first = {path.with_suffix(""): path for path in reversed(paths)}
    if twice := next((path for path in paths if first[path.with_suffix("")] != path), None):
        one = first[twice.with_suffix("")]
        raise DataError(f"{one} and {twice.name} are one sample: keep one of them, or rename it")
    if not paths:
        raise DataError(f"no samples in {root}: write data.root=FOLDER, a folder of {', '.join(SUFFIXES)}")
    if reason := missing_package(paths):
        raise DataError(reason)
    files = _split(paths, root, data)
    counts = Counter(file.split for file in files)
    if not counts["train"] or not counts["test"]:
        raise DataError(
            f"{root} has {len(files)} samples, {counts['train']} to train and {counts['test']} to test: "
            "expected at least one of each; write data.test=0.1, or make the folders train and test"
        )
    shares = ", ".join(f"{counts[split]} {split}" for split in SPLITS)
    log.info("%s: %d samples (%s)", root, len(files), shares)
    return files


def _split(paths: Sequence[Path], root: Path, data: DataConfig) -> list[MeshFile]:
    """Return the samples with their splits: those of the folders, otherwise shares by ``data.split_seed``."""
    first = [path.relative_to(root).parts[0] for path in paths]
    if {"train", "test"} <= {*first}:
        files = [
            MeshFile(path, root.resolve().name, split)
            for path, split in zip(paths, first, strict=True)
            if split in SPLITS
        ]
        taken: Counter[str] = Counter()
        kept = []
        for file in files:
            taken[file.split] += 1
            if taken[file.split] <= (data.limit or len(files)):
                kept.append(file)
        has_validation = any(file.split == "validation" for file in kept)
        return kept if has_validation else held_out(kept, data.validation, data.split_seed)
    files = [MeshFile(path, root.resolve().name, "train") for path in paths[: data.limit]]
    files = held_out(files, data.test, data.split_seed, "test")
    return held_out(files, data.validation, data.split_seed)


def read_parameters(root: Path, files: Sequence[MeshFile] = ()) -> Parameters:
    """Read ``parameters.csv``: its first column names the samples, the others are numbers.

    Returns an empty mapping if there is no such file. Raises DataError for a value that is no finite number,
    for a column or sample that stands twice, and for a stem that several of the files have.
    """
    path = root / TABLE
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8-sig") as file:
        names, *rows = [[word.strip() for word in row] for row in csv.reader(file) if row] or [[]]
    table: dict[str, dict[str, float]] = {}
    for number, row in enumerate(rows, 2):
        try:
            values = {name: float(text) for name, text in zip(names[1:], row[1:], strict=True)}
        except ValueError as error:
            raise DataError(
                f"{path}, row {number}: expected a sample and {len(names) - 1} numbers; got {row} ({error})"
            ) from error
        if row[0] in table or len(values) < len(names) - 1 or not np.isfinite([*values.values()]).all():
            raise DataError(
                f"{path}, row {number}: expected samples and columns once each, and finite numbers; got {row}"
            )
        table[row[0]] = values
    stems = Counter(file.name for file in files)
    if shared := next((name for name in table if stems[name] > 1), None):
        raise DataError(
            f"{path} has a row {shared}, and {stems[shared]} samples have that name: write FOLDER/{shared}"
        )
    return table


def parameters_of(
    path: Path, root: Path, table: Parameters, held: Mapping[str, float]
) -> dict[str, float] | None:
    """Return the parameters of a sample: its row of the table, otherwise those that its file holds.

    Returns None if there is a table without a row for the sample.
    """
    if not table:
        return dict(held)
    keys = path.relative_to(root).with_suffix("").as_posix(), path.stem, path.name
    return next((dict(table[key]) for key in keys if key in table), None)

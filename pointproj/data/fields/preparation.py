"""From files to samples that can be drawn from: read once, check, and store as arrays on disk.

A sample's arrays are float32, in an order that is random once and for all. So any slice of them is a random
subset, and a batch reads a few pages of a file of any size. One sample at a time is in memory.
"""

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from pointproj import geometry
from pointproj.data.cache import entry_key
from pointproj.data.fields.samples import Parameters, parameters_of
from pointproj.data.layout import MeshFile
from pointproj.geometry.files.measured import FieldSample, geometry_beside, read_sample
from pointproj.geometry.meshes import MeshError
from pointproj.geometry.sampling import SurfaceSampler
from pointproj.runtime.progress_bar import progress
from pointproj.runtime.run_folder import require_writable, writing

log = logging.getLogger(__name__)

MOST_CLOUD = 2**18
"""Points of a geometry that are stored; clouds are drawn from these."""

KEPT_BYTES = 2**19
"""Arrays up to this size are kept in memory, 512 of them at most."""

ODD_UNIT = 500.0
"""A sample whose size or field differs by this factor from the others has another unit."""


@dataclass(frozen=True)
class PreparedSample:
    """The cache entry of a sample: a folder with two float32 arrays, and facts about them.

    Columns of ``field`` (P, 3 + C or 7 + C) are points less ``origin``, on surfaces also normals and area,
    and values. Those of ``cloud`` (M, 6) are points less ``origin``, and normals. The identity is a number
    that follows from the content of the sample's files and the names of its fields.
    """

    name: str
    identity: int
    folder: Path
    facts: Mapping[str, Any]

    @property
    def field(self) -> np.ndarray:
        """The rows of the field, in random order; large ones are mapped into memory."""
        return _opened(self.folder / "field.npy")

    @property
    def cloud(self) -> np.ndarray:
        """The rows of the geometry, in random order; large ones are mapped into memory."""
        return _opened(self.folder / "cloud.npy")


def prepare_samples(
    files: Sequence[MeshFile], fields: Sequence[str], root: Path, table: Parameters, cache_folder: Path
) -> Iterator[tuple[MeshFile, PreparedSample | str]]:
    """Prepare each sample; yield it, or the reason why it cannot be used.

    Samples in the cache are not read again. Raises RunError if the cache cannot be written to.
    """
    require_writable(cache_folder)
    began, taken = time.monotonic(), 0
    names = Counter(file.name for file in files)
    with progress("preparing samples", len(files), unit="samples") as advance:
        for file in files:
            try:
                sample = _prepared(file, fields, root, table, cache_folder)
                folders = file.path.relative_to(root).with_suffix("").parts
                yield file, replace(sample, name="_".join(folders) if names[file.name] > 1 else file.name)
            except MeshError as error:
                yield file, error.reason
            taken += file.path.stat().st_size
            advance(1)
    seconds = time.monotonic() - began
    log.info("%d samples, %.3g MB, took %.1f s", len(files), taken / 1e6, seconds)


def _prepared(
    file: MeshFile, fields: Sequence[str], root: Path, table: Parameters, cache_folder: Path
) -> PreparedSample:
    beside = geometry_beside(file.path)
    content = " ".join(_digest(path) for path in (file.path, beside) if path is not None)
    settings = {"fields": ",".join(fields), "suffix": file.path.suffix.lower()}
    # Not of the code: what is drawn from a sample stays when a docstring changes.
    identity = int(entry_key(content, settings)[:16], 16)
    key = entry_key(content, {**settings, "code": _code_digest()})
    folder = cache_folder / key[:2] / key
    if not (folder / "facts.json").exists():
        _store(folder, *_arrays(read_sample(file.path, fields), identity))
    facts = json.loads((folder / "facts.json").read_text())
    parameters = parameters_of(file.path, root, table, facts["parameters"])
    if parameters is None:
        raise MeshError(
            file.path, f"has no row in {root / 'parameters.csv'}, whose first column names samples"
        )
    return PreparedSample(file.name, identity, folder, {**facts, "parameters": parameters})


def _arrays(sample: FieldSample, seed: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays of an entry, and the facts about them.

    Beside the sample and the result, only rows of one column are in memory: a sample may have millions.
    """
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(sample.points))
    origin = sample.points.mean(0)
    values = np.concatenate([*sample.values.values()], axis=1)
    weights = np.ones(len(values)) if sample.areas is None else sample.areas
    on_surface = sample.normals is not None
    columns = [*sample.points.T, *values.T]
    if on_surface:
        columns[3:3] = [*sample.normals.T, weights]
    field = np.empty((len(order), len(columns)), dtype=np.float32)
    for number, column in enumerate(columns):
        field[:, number] = column[order] - (origin[number] if number < 3 else 0)
    cloud = cloud_of(sample, origin, MOST_CLOUD, generator)
    weights = weights / weights.sum()
    extent = cloud[:, :3] + origin
    facts = {
        "origin": origin.tolist(),
        "channels": [each.shape[1] for each in sample.values.values()],
        "mean": (weights @ values).tolist(),
        "mean_square": [float(np.einsum("n,n,n", weights, column, column)) for column in values.T],
        "low": extent.min(0).tolist(),
        "high": extent.max(0).tolist(),
        "place": sample.place,
        "points": len(values),
        "on_surface": on_surface,
        "parameters": dict(sample.parameters),
    }
    arrays = {"field": field, "cloud": cloud}
    return {name: array.astype(np.float32, order="C", copy=False) for name, array in arrays.items()}, facts


def cloud_of(
    sample: FieldSample, origin: np.ndarray, most: int, generator: np.random.Generator
) -> Float[np.ndarray, "m 6"]:
    """Draw points of a sample's geometry, less ``origin``, with their normals (0 if there are none)."""
    if sample.geometry is not None:
        sampler = SurfaceSampler(sample.geometry.vertices - origin, sample.geometry.faces)
        return np.concatenate(sampler.draw(most, generator), axis=1)
    rows = generator.permutation(len(sample.points))[:most]
    normals = np.zeros_like(sample.points) if sample.normals is None else sample.normals
    return np.concatenate([sample.points[rows] - origin, normals[rows]], axis=1)


@lru_cache(maxsize=512)
def _opened(path: Path) -> np.ndarray:
    """Return an array of the cache, read if it is small. Few enough are open for the limit on open files."""
    return np.load(path, mmap_mode="r" if path.stat().st_size > KEPT_BYTES else None)


def _store(folder: Path, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    """Write an entry; it appears whole or not at all. An entry that another run wrote meanwhile stays."""
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    with writing(folder, "data.cache=FOLDER"):
        temporary.mkdir(parents=True)
        try:
            for name, array in arrays.items():
                np.save(temporary / f"{name}.npy", array)
            (temporary / "facts.json").write_text(json.dumps(facts))
            try:
                os.replace(temporary, folder)
            except OSError:
                if not (folder / "facts.json").exists():
                    raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def odd_units(samples: Sequence[PreparedSample], fields: Sequence[str]) -> dict[int, str]:
    """Return a reason for each sample whose size or field is not in the unit of the others, by its place."""
    sizes = {"its size": [max(np.subtract(s.facts["high"], s.facts["low"])) for s in samples]}
    first = 0
    for name, count in zip(fields, samples[0].facts["channels"], strict=True):
        columns = slice(first, first + count)
        sizes[name] = [np.sqrt(np.sum(s.facts["mean_square"][columns])) for s in samples]
        first += count
    reasons = {}
    for name, column in sizes.items():
        usual = float(np.median([size for size in column if size > 0] or [1.0]))
        for place, size in enumerate(column):
            factor = size / usual
            if size > 0 and not 1 / ODD_UNIT < factor < ODD_UNIT:
                reasons[place] = (
                    f"{name} is {factor:.3g} times that of the other samples (median): is its unit another?"
                )
    return reasons


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MeshError(path, f"cannot be read ({error.strerror or error})") from error


@cache
def _code_digest() -> str:
    """Return the SHA-256 of this module and all readers: their code decides what an entry holds."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(Path(geometry.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()

"""From mesh files to shapes that can be sampled: read, normalise, evaluate the target, keep the result.

All processor cores take part, or the GPU where there are few; what the cache holds is not made again. A
sample is the same whichever device it was evaluated on.
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from pointproj.config import TARGETS
from pointproj.data.cache import Cache, entry_key
from pointproj.data.modelnet import MeshFile
from pointproj.geometry import (
    distances,
    fields,
    interior,
    meshes,
    sampling,
    visibility,
    visibility_cells,
    warp_meshes,
)
from pointproj.geometry import files as formats
from pointproj.geometry.fields import target_field
from pointproj.geometry.files import checks, library, off, parse_mesh, ply, read_content, text
from pointproj.geometry.meshes import MeshError, normalize
from pointproj.geometry.sampling import SurfaceSampler, pool_points
from pointproj.geometry.warp_meshes import usable_device
from pointproj.runtime.helpers import HelperProcesses
from pointproj.runtime.run_folder import require_writable

log = logging.getLogger(__name__)

# With this one, the modules that decide what a prepared mesh holds: other code makes another entry.
_MAKERS = (
    checks,
    distances,
    fields,
    formats,
    interior,
    library,
    meshes,
    off,
    ply,
    sampling,
    text,
    visibility,
    visibility_cells,
    warp_meshes,
)


@dataclass(frozen=True)
class Recipe:
    """What is made from a mesh file.

    Attributes
    ----------
    grid : int
        Query points a side.
    target : str
        A key of :data:`pointproj.config.TARGETS`.
    pool : int
        Random points with values, beside the grid.
    """

    grid: int
    target: str
    pool: int = 0


@dataclass(frozen=True)
class PreparedMesh:
    """Where a mesh in the query cube and its target field are kept, or the reason why there is none.

    Attributes
    ----------
    digest : str
        SHA-256 of the file, hexadecimal: what the mesh is known by, wherever it lies.
    key : str
        Of the entry in the cache: ``vertices`` (V, 3) float64, ``faces`` (F, 3) int32, ``target`` (grid**3,)
        and ``pool`` (pool,), the target at the points of :func:`pointproj.geometry.sampling.pool_points` with
        :func:`pool_seed`. Both are float32, or bool where the target holds labels. Empty arrays where there
        is a reason.
    reason : str or None
        Why the mesh cannot be used.
    """

    digest: str
    key: str
    reason: str | None = None


@dataclass(frozen=True)
class Source:
    """A mesh file, read once: its content, and the key of the entry that is made from it."""

    path: Path
    content: bytes
    digest: str
    key: str

    @classmethod
    def read(cls, path: Path, recipe: Recipe) -> "Source":
        """Read a file.

        Raises
        ------
        MeshError
            If it cannot be read.
        """
        content = read_content(path)
        digest = hashlib.sha256(content).hexdigest()
        # The suffix says how the content is read.
        settings = {**asdict(recipe), "suffix": path.suffix.lower(), "code": _code_digest()}
        return cls(path, content, digest, entry_key(digest, settings))


ENOUGH_PROCESSES = 8
"""As many helper processes or more take less time alone than sharing a GPU."""

Job = Callable[[], PreparedMesh]


def prepare_meshes(
    files: Sequence[MeshFile],
    recipe: Recipe,
    cache_folder: Path,
    *,
    helpers: HelperProcesses,
    device: str = "cpu",
) -> Iterator[tuple[MeshFile, PreparedMesh]]:
    """Prepare meshes, from the cache where it has them.

    Parameters
    ----------
    files : sequence of MeshFile
        What to prepare; each once.
    recipe : Recipe
        What to make of each.
    cache_folder : Path
        Where prepared meshes are kept.
    helpers : HelperProcesses
        Work side by side.
    device : str
        Where targets are evaluated if Warp runs there and there are few helpers; otherwise on the CPU.

    Yields
    ------
    MeshFile, PreparedMesh
        In the order in which they get ready. Nothing of a mesh stays in memory.

    Raises
    ------
    RunError
        If the cache folder cannot be written to.
    """
    cache = Cache(cache_folder)
    device = device if helpers.count < ENOUGH_PROCESSES else "cpu"
    fewest = helpers.fewest_jobs
    jobs: dict[MeshFile, Job] = {}
    remaining = iter(files)
    for file in remaining:  # until enough are missing from the cache that helper processes pay off
        try:
            source = Source.read(file.path, recipe)
            prepared = _load(source, cache)
        except MeshError as error:
            prepared = _unreadable(error)
        if prepared is not None:
            yield file, prepared
            continue
        jobs[file] = partial(_make, source, recipe, cache, device)
        if len(jobs) == fewest:
            break
    if not jobs:
        return
    jobs |= {file: partial(_prepare, file.path, recipe, cache, device) for file in remaining}
    require_writable(cache_folder)
    log.info("preparing meshes: up to %d of %d are not yet in %s", len(jobs), len(files), cache_folder)
    yield from helpers.run("preparing meshes", jobs, "meshes")


def pool_seed(key: str) -> int:
    """Seed of the random points whose values an entry holds."""
    return int(key[:16], 16)


def _prepare(path: Path, recipe: Recipe, cache: Cache, device: str) -> PreparedMesh:
    """Load the entry of a file, or make it."""
    try:
        source = Source.read(path, recipe)
    except MeshError as error:
        return _unreadable(error)
    return _load(source, cache) or _make(source, recipe, cache, device)


def _unreadable(error: MeshError) -> PreparedMesh:
    """Without an entry: a file may be readable the next time, whatever it holds."""
    return PreparedMesh("", "", error.reason)


def _load(source: Source, cache: Cache) -> PreparedMesh | None:
    arrays = cache.load(source.key)  # whole, so that a damaged entry is made again now
    return None if arrays is None else PreparedMesh(source.digest, source.key, str(arrays["reason"]) or None)


def _make(source: Source, recipe: Recipe, cache: Cache, device: str) -> PreparedMesh:
    """Make the entry of a file; it holds the reason if the mesh cannot be used."""
    reason = None
    try:
        arrays = _arrays(source, recipe, device)
    except MeshError as error:
        reason, empty, none = error.reason, np.empty((0, 3)), np.empty(0, np.float32)
        arrays = {"vertices": empty, "faces": empty.astype(np.int32), "target": none, "pool": none}
    cache.store(source.key, {**arrays, "reason": np.array(reason or "")})
    return PreparedMesh(source.digest, source.key, reason)


def _arrays(source: Source, recipe: Recipe, device: str) -> dict[str, np.ndarray]:
    """Return the arrays of an entry, see :class:`PreparedMesh`."""
    mesh = normalize(parse_mesh(source.content, source.path))
    points = np.empty((0, 3), np.float32)
    if recipe.pool:
        sampler = SurfaceSampler(mesh.vertices, mesh.faces)
        points = pool_points(sampler, recipe.pool, pool_seed(source.key))
    if TARGETS[recipe.target].of_mesh:
        device = usable_device(device)
        values = target_field(mesh, recipe.grid, recipe.target, beside=points, device=device)
    else:
        generator = np.random.default_rng(int(source.digest, 16))
        values = generator.standard_normal(recipe.grid**3, dtype=np.float32)
    if TARGETS[recipe.target].output == "logit":
        values = values > 0.5
    target, pool = np.split(values, [recipe.grid**3])
    faces = mesh.faces.astype(np.int32)
    return {"vertices": mesh.vertices, "faces": faces, "target": target, "pool": pool}


@functools.cache
def _code_digest() -> str:
    """SHA-256 over the source of the modules that make an entry, normalisation constants included."""
    digest = hashlib.sha256()
    for path in (*(module.__file__ for module in _MAKERS), __file__):
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()

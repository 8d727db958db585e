"""From mesh files to shapes that can be sampled: read, normalise, evaluate the target, keep the result.

All processor cores take part; what the cache holds is not made again. Targets are evaluated on the CPU,
so that a cached sample is the same whatever device trains on it.
"""

import hashlib
import importlib.util
import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from pointproj.data.cache import Cache, entry_key
from pointproj.data.modelnet import MeshFile
from pointproj.geometry.sampling import SurfaceSampler, pool_points
from pointproj.runtime.progress_bar import progress

log = logging.getLogger(__name__)

# Modules whose code decides what a prepared mesh holds: an entry made by other code is another entry.
_MAKERS = (
    "pointproj.geometry.meshes",
    *(f"pointproj.geometry.files{part}" for part in ("", ".text", ".off", ".obj", ".ply", ".stl")),
    "pointproj.geometry.fields",
    "pointproj.geometry.interior",
    "pointproj.geometry.distances",
    "pointproj.geometry.sampling",
    "pointproj.data.preparation",
)

# Starting processes, each with its imports, costs more than preparing fewer meshes than this.
FEWEST_FOR_PROCESSES = 12


@dataclass(frozen=True)
class Recipe:
    """What is made from a mesh file."""

    grid: int  # query points a side
    target: str  # udf | sdf | occupancy | random
    pool: int = 0  # random points with values, beside the grid


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
        :func:`pool_seed`. Both are float32, or bool for occupancy. Empty arrays where there is a reason.
    reason : str or None
        Why the mesh cannot be used.
    """

    digest: str
    key: str
    reason: str | None = None


def prepare_meshes(
    files: Sequence[MeshFile], recipe: Recipe, cache_folder: Path, *, processes: int | None = None
) -> Iterator[tuple[MeshFile, PreparedMesh]]:
    """Prepare meshes, from the cache where it has them.

    Parameters
    ----------
    files
        What to prepare.
    recipe
        What to make of each.
    cache_folder
        Where prepared meshes are kept.
    processes
        How many work side by side; None for one a processor core.

    Yields
    ------
    MeshFile, PreparedMesh
        In the order in which they get ready. Nothing of a mesh stays in memory.

    Raises
    ------
    OSError
        If the cache folder cannot be written to.
    """
    cached = Cache(cache_folder)
    missing = []
    for file in files:
        prepared = _look_up(file.path, recipe, cached)
        if prepared is None:
            missing.append(file)
        else:
            yield file, prepared
    if not missing:
        return
    processes = min(processes or len(os.sched_getaffinity(0)), len(missing))
    log.info("preparing %d meshes (%d more are in %s)", len(missing), len(files) - len(missing), cache_folder)
    with progress("preparing meshes", len(missing), unit="meshes") as advance:
        parallel = processes > 1 and len(missing) >= FEWEST_FOR_PROCESSES
        prepare_all = _in_processes if parallel else _one_by_one
        for file, prepared in prepare_all(missing, recipe, cached, processes):
            advance(1)
            yield file, prepared


def prepare_mesh(path: Path, recipe: Recipe, cached: Cache) -> PreparedMesh:
    """Prepare one mesh and keep it; see :func:`prepare_meshes`."""
    from pointproj.geometry.files import read_content
    from pointproj.geometry.meshes import MeshError

    try:
        content = read_content(path)
    except MeshError as error:  # of the moment, not of the content: nothing to keep
        return PreparedMesh("", "", error.reason)
    digest = hashlib.sha256(content).hexdigest()
    key, reason = _key(digest, path, recipe), None
    try:
        arrays = _make(path, content, digest, recipe)
    except MeshError as error:
        reason, empty, none = error.reason, np.empty((0, 3)), np.empty(0, np.float32)
        arrays = {"vertices": empty, "faces": empty.astype(np.int32), "target": none, "pool": none}
    cached.store(key, {**arrays, "reason": np.array(reason or "")})
    return PreparedMesh(digest, key, reason)


def pool_seed(key: str) -> int:
    """Seed of the random points whose values an entry holds."""
    return int(key[:16], 16)


def _make(path: Path, content: bytes, digest: str, recipe: Recipe) -> dict[str, np.ndarray]:
    from pointproj.geometry.fields import field_at, target_field
    from pointproj.geometry.files import parse_mesh
    from pointproj.geometry.meshes import normalize

    mesh = normalize(parse_mesh(content, path))
    pool = np.empty(0, np.float32)
    if recipe.target == "random":
        generator = np.random.default_rng(int(digest, 16))
        target = generator.standard_normal(recipe.grid**3, dtype=np.float32)
    else:
        target = target_field(mesh, recipe.grid, recipe.target)
    if recipe.pool:
        sampler = SurfaceSampler(mesh.vertices, mesh.faces)
        points = pool_points(sampler, recipe.pool, pool_seed(_key(digest, path, recipe)))
        pool = field_at(mesh, points, recipe.target)
    if recipe.target == "occupancy":
        target, pool = target > 0.5, pool > 0.5
    faces = mesh.faces.astype(np.int32)
    return {"vertices": mesh.vertices, "faces": faces, "target": target, "pool": pool}


def _look_up(path: Path, recipe: Recipe, cached: Cache) -> PreparedMesh | None:
    from pointproj.geometry.files import read_content
    from pointproj.geometry.meshes import MeshError

    try:
        digest = hashlib.sha256(read_content(path)).hexdigest()
    except MeshError:
        return None
    key = _key(digest, path, recipe)
    arrays = cached.load(key)  # whole, so that a damaged entry is made again now
    return None if arrays is None else PreparedMesh(digest, key, str(arrays["reason"]) or None)


def _key(digest: str, path: Path, recipe: Recipe) -> str:
    # The suffix says how the content is read.
    return entry_key(digest, {**asdict(recipe), "suffix": path.suffix.lower(), "code": _code_digest()})


@cache
def _code_digest() -> str:
    """SHA-256 over the source of the modules that make an entry, normalisation constants included."""
    digest = hashlib.sha256()
    for module in _MAKERS:
        spec = importlib.util.find_spec(module)  # finds the source without importing Warp
        digest.update(Path(spec.origin).read_bytes())
    return digest.hexdigest()


def _one_by_one(
    files: Sequence[MeshFile], recipe: Recipe, cached: Cache, processes: int
) -> Iterator[tuple[MeshFile, PreparedMesh]]:
    for file in files:
        yield file, prepare_mesh(file.path, recipe, cached)


def _in_processes(
    files: Sequence[MeshFile], recipe: Recipe, cached: Cache, processes: int
) -> Iterator[tuple[MeshFile, PreparedMesh]]:
    """Prepare side by side; if the processes die, one by one what they left."""
    left = dict.fromkeys(files)
    # A forked copy of a process that runs Warp, CUDA or threads can hang: start fresh ones.
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(prepare_mesh, file.path, recipe, cached): file for file in files}
        for future in as_completed(futures):
            prepared = future.result()
            file = futures[future]
            del left[file]
            yield file, prepared
    except BrokenProcessPool:
        log.warning("the helper processes ended early; preparing the other %d meshes in this one", len(left))
        yield from _one_by_one(list(left), recipe, cached, 1)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)

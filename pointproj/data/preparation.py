"""From mesh files to shapes that can be sampled: read, normalise, evaluate the target, store the result.

All processor cores take part; with few cores, the GPU does. Shapes that are in the cache are not made again.
All devices give the same results.
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pointproj import geometry
from pointproj.config import TARGETS
from pointproj.data.cache import Cache, entry_key
from pointproj.data.layout import MeshFile
from pointproj.geometry.fields import field_at, target_field
from pointproj.geometry.files import parse_mesh, read_content
from pointproj.geometry.meshes import Mesh, MeshError, normalize
from pointproj.geometry.sampling import SurfaceSampler, pool_points
from pointproj.geometry.warp_meshes import usable_device
from pointproj.runtime.helpers import HelperProcesses
from pointproj.runtime.run_folder import require_writable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """What to make from a mesh file."""

    grid: int  # query points a side
    target: str  # a key of TARGETS
    pool: int = 0  # random points with values, in addition to the grid


@dataclass(frozen=True)
class PreparedMesh:
    """The cache entry of a mesh in the query cube with its target field, or the reason why there is none.

    ``digest`` is the SHA-256 of the mesh's file. ``key`` is the name of the cache entry. The entry has
    ``vertices`` (V, 3) float64, ``faces`` (F, 3) int32, ``target`` (grid**3,) and ``pool`` (pool,), which is
    the target at the points of :func:`pointproj.geometry.sampling.pool_points` with ``pool_seed`` () uint64.
    ``target`` and ``pool`` are float32, or bool if the target holds labels. If there is a ``reason``, the
    entry has that alone.
    """

    digest: str
    key: str
    reason: str | None = None


class Source(NamedTuple):
    """A mesh file that was read, and the key of its cache entry."""

    path: Path
    content: bytes
    digest: str
    key: str


ENOUGH_PROCESSES = 8
"""So many helper processes, or more, are faster on the CPU than sharing a GPU."""


def prepare_meshes(
    files: Sequence[MeshFile],
    recipe: Recipe,
    cache_folder: Path,
    *,
    helpers: HelperProcesses,
    device: str = "cpu",
) -> Iterator[tuple[MeshFile, PreparedMesh]]:
    """Prepare meshes; those in the cache are not made again.

    Targets are evaluated on ``device`` if Warp runs there and there are few helpers, otherwise on the CPU.
    Yields files in the order in which they are ready; no mesh stays in memory. Raises RunError if the cache
    folder cannot be written to.
    """
    cache = Cache(cache_folder)
    device = target_device(device, helpers)
    jobs: dict[MeshFile, Callable[[], PreparedMesh]] = {}
    for file in files:
        if len(jobs) >= helpers.fewest_jobs:  # enough are missing from the cache: helpers take the rest too
            jobs[file] = partial(_prepare, file.path, recipe, cache, device)
            continue
        found = _found(file.path, recipe, cache)
        if isinstance(found, PreparedMesh):
            yield file, found
        else:
            jobs[file] = partial(_make, found, recipe, cache, device)
    if not jobs:
        return
    require_writable(cache_folder)
    build_kernels(recipe.target, device)
    log.info("preparing meshes: up to %d of %d are not yet in %s", len(jobs), len(files), cache_folder)
    yield from helpers.results("preparing meshes", jobs, "meshes")


def target_device(device: str, helpers: HelperProcesses) -> str:
    """Return where helper processes evaluate targets: on ``device`` if they are few, else on the CPU."""
    return device if helpers.count < ENOUGH_PROCESSES else "cpu"


@functools.cache
def build_kernels(target: str, device: str) -> None:
    """Build the Warp kernels of a target, once: helper processes load them from Warp's cache on disk."""
    if TARGETS[target].of_mesh:
        face = Mesh(np.eye(3) / 2, np.arange(3).reshape(1, 3), "one face")
        field_at(face, np.zeros((1, 3), np.float32), target, device=usable_device(device))


def _prepare(path: Path, recipe: Recipe, cache: Cache, device: str) -> PreparedMesh:
    """Load the entry of a file, or make it."""
    found = _found(path, recipe, cache)
    return found if isinstance(found, PreparedMesh) else _make(found, recipe, cache, device)


def _found(path: Path, recipe: Recipe, cache: Cache) -> PreparedMesh | Source:
    """Read a file and look for its entry; return the file's content if there is no entry."""
    try:
        content = read_content(path)
    except MeshError as error:  # not cached: the file may be readable next time
        return PreparedMesh("", "", error.reason)
    digest = hashlib.sha256(content).hexdigest()
    # The suffix is part of the key, since it decides how the content is read.
    key = entry_key(digest, {**asdict(recipe), "suffix": path.suffix.lower(), "code": _code_digest()})
    arrays = cache.load(key)  # all of it, so that damage is found here and the entry is made again
    if arrays is None:
        return Source(path, content, digest, key)
    return PreparedMesh(digest, key, str(arrays["reason"]) or None)


def _make(source: Source, recipe: Recipe, cache: Cache, device: str) -> PreparedMesh:
    """Make the entry of a file; it holds the reason if the mesh cannot be used."""
    reason, arrays = None, {}
    try:
        arrays = _arrays(source, recipe, device)
    except MeshError as error:
        reason = error.reason
    cache.store(source.key, {**arrays, "reason": np.array(reason or "")})
    return PreparedMesh(source.digest, source.key, reason)


def _arrays(source: Source, recipe: Recipe, device: str) -> dict[str, np.ndarray]:
    """Return the arrays of an entry, see :class:`PreparedMesh`."""
    mesh = normalize(parse_mesh(source.content, source.path))
    # Of mesh and recipe alone, not of the code: a run's numbers stay when a docstring changes.
    seed = int(entry_key(source.digest, asdict(recipe))[:16], 16)
    points = np.empty((0, 3), np.float32)
    if recipe.pool:
        points = pool_points(SurfaceSampler(mesh.vertices, mesh.faces), recipe.pool, seed)
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
    arrays = {"vertices": mesh.vertices, "faces": faces, "target": target, "pool": pool}
    return {**arrays, "pool_seed": np.uint64(seed)}


@functools.cache
def _code_digest() -> str:
    """Return the SHA-256 of this module and all of geometry: their code decides what an entry holds."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(Path(geometry.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()

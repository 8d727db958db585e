"""Variants of meshes with parts of the surface removed, so that enclosed space may become outside.

A network that only sees closed solids learns to fill every shape that looks like one. But real files also
have open boxes, missing backs and loose sheets. Cutouts make many such cases from a few files, with exact
targets.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Bool
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pointproj.data.layout import MeshFile
from pointproj.geometry.files import read_mesh, write_mesh
from pointproj.geometry.meshes import Mesh, MeshError, face_areas
from pointproj.runtime.helpers import HelperProcesses

CUTOUTS = (1, 4)  # fewest and most cutouts of a variant
LEAST_LEFT = 0.4  # share of the area that must remain
FLAT = 1e-3  # largest distance of a flat piece's faces from its plane, as a share of the longest side


def with_cutouts(mesh: Mesh, rng: np.random.Generator) -> Mesh:
    """Remove surface in a few places: flat pieces, separate parts, or the faces within a ball.

    The remaining faces have at least 40% of the mesh's area. A cutout that would leave less is not made, so
    some variants have no cutout.
    """
    kept = np.ones(len(mesh.faces), dtype=bool)
    areas = face_areas(mesh)
    for _ in range(rng.integers(CUTOUTS[0], CUTOUTS[1] + 1)):
        chance = np.where(kept, areas, 0.0)
        start = rng.choice(len(areas), p=chance / chance.sum())
        removed = rng.choice([_flat_piece, _flat_piece, _part, _ball])(mesh, start, rng)
        if areas[kept & ~removed].sum() >= LEAST_LEFT * areas.sum():
            kept &= ~removed
    return Mesh(mesh.vertices, mesh.faces[kept], mesh.name)


def write_variants(
    files: Sequence[MeshFile], root: Path | str, count: int, helpers: HelperProcesses | None = None
) -> list[MeshFile]:
    """Write variants of mesh files with cutouts, as OFF files in the same layout; existing variants stay.

    Each file has ``count`` variants, ``<class>/<split>/<name>_<content>_<number>.off``. Equal content gives
    equal variants. Files that cannot be read have none. Helper processes make them side by side; without
    helpers, this process makes them.
    """
    variants, missing = {}, {}
    for file in files:
        try:
            digest = hashlib.sha256(file.path.read_bytes()).hexdigest()
        except OSError:
            continue  # the preparation of this file reports why it is left out
        folder = Path(root) / file.class_name / file.split
        paths = [folder / f"{file.name}_{digest[:8]}_{number}.off" for number in range(count)]
        variants[file] = [MeshFile(path, file.class_name, file.split) for path in paths]
        if not all(path.exists() for path in paths):
            missing[file] = partial(_write_variants, file.path, paths, digest)
    for file, readable in (helpers or HelperProcesses(1)).results("cutting variants", missing, "meshes"):
        if not readable:
            del variants[file]
    return [variant for written in variants.values() for variant in written]


def _write_variants(source: Path, paths: Sequence[Path], digest: str) -> bool:
    """Write the missing variants of a mesh; return whether the mesh can be read."""
    try:
        mesh = read_mesh(source)
    except MeshError:
        return False
    for number, path in enumerate(paths):
        if not path.exists():
            rng = np.random.default_rng([int(digest[:16], 16), number])
            write_mesh(with_cutouts(mesh, rng), path)
    return True


def _flat_piece(mesh: Mesh, start: int, rng: np.random.Generator) -> Bool[np.ndarray, " F"]:
    """All faces in the plane of one face: the lid of a box, copies and backs included."""
    corners = mesh.vertices[mesh.faces]
    a, b, c = corners[start]
    normal = np.cross(b - a, c - a)
    height = np.abs((corners - a) @ (normal / np.linalg.norm(normal)))
    return height.max(axis=1) <= FLAT * np.ptp(corners.reshape(-1, 3), axis=0).max()


def _part(mesh: Mesh, start: int, rng: np.random.Generator) -> Bool[np.ndarray, " F"]:
    """All faces connected to one face, by vertices at the same place."""
    _, place = np.unique(mesh.vertices + 0.0, axis=0, return_inverse=True)
    corners = place.reshape(-1)[mesh.faces]
    pairs = np.concatenate([corners[:, :2], corners[:, 1:]])
    links = coo_array((np.ones(len(pairs)), pairs.T), shape=(len(mesh.vertices),) * 2)
    _, part = connected_components(links, directed=False)
    return part[corners[:, 0]] == part[corners[start, 0]]


def _ball(mesh: Mesh, start: int, rng: np.random.Generator) -> Bool[np.ndarray, " F"]:
    """All faces whose centre lies near that of one face."""
    centres = mesh.vertices[mesh.faces].mean(axis=1)
    radius = rng.uniform(0.05, 0.3) * np.ptp(centres, axis=0).max()
    return np.linalg.norm(centres - centres[start], axis=1) <= radius

"""Defects like those of real files, added to a clean piece. The points inside of it stay the same.

A piece gets some of these: parts that overlap instead of being merged, walls inside the solid, faces listed
twice or flipped, edges split on one side only, cracks between faces, vertices that are not shared, faces
without area.
"""

import numpy as np
from jaxtyping import Float, Int
from manifold3d import Manifold
from numpy import ndarray

from pointproj.data.furniture.parts import Parts, Rng
from pointproj.data.furniture.solids import union

# As a share of the longest side. Two cracks side by side are twice as wide; geometry.interior closes both.
WIDEST_CRACK = 0.0015

Triangles = Float[ndarray, "f 3 3"]


def defective_surface(parts: list[Manifold], rng: Rng) -> tuple[Float[ndarray, "v 3"], Int[ndarray, "f 3"]]:
    """Return vertices and faces around the union of overlapping solids, as careless modelling makes them.

    The surface is not watertight, and its faces have no consistent orientation.
    """
    shells = [union(parts)] if rng.chance(0.25) else list(parts)
    if rng.chance(0.6):
        shells = [piece for shell in shells for piece in _walled(shell, rng)]
    copies = rng.uniform(0.0, 1.0) if rng.chance(0.7) else 0.0
    flips = rng.uniform(0.0, 0.5) if rng.chance(0.7) else 0.0
    triangles = np.concatenate([_listed(shell, copies, flips, rng) for shell in shells])
    if rng.chance(0.5):  # edges get a point that the face on their other side does not have
        share = rng.uniform(0.0, 0.2)
        split = rng.random(len(triangles)) < share
        a, b, c = np.moveaxis(triangles[split], 1, 0)
        at = a + rng.uniform(0.2, 0.8, (len(a), 1)) * (b - a)
        halves = [np.stack([a, at, c], axis=1), np.stack([at, b, c], axis=1)]
        triangles = np.concatenate([triangles[~split], *halves])
    if rng.chance(0.5):
        triangles = _cracked(triangles, rng.uniform(0.0, 0.3), rng)
    if rng.chance(0.5):  # faces of no area, along edges of others
        slivers = triangles[rng.integers(0, len(triangles), 1 + len(triangles) // 50)]
        slivers[:, 2] = slivers[:, 0] if rng.chance(0.5) else 0.5 * (slivers[:, 0] + slivers[:, 1])
        triangles = np.concatenate([triangles, slivers])
    triangles = triangles[rng.permutation(len(triangles))]
    vertices, faces = triangles.reshape(-1, 3), np.arange(3 * len(triangles))
    if rng.chance(0.6):
        vertices, faces = np.unique(vertices, axis=0, return_inverse=True)
    return vertices, faces.reshape(-1, 3).astype(np.int64)


def _walled(shell: Manifold, rng: Rng) -> Parts:
    """Split a solid by a plane: each half has a wall there, and the two walls coincide inside the solid."""
    if not rng.chance(0.3):
        return [shell]
    low, high = np.reshape(shell.bounding_box(), (2, 3))
    axis = rng.integers(3)
    offset = low[axis] + rng.uniform(0.1, 0.9) * (high - low)[axis]
    halves = shell.split_by_plane(list(np.eye(3)[axis]), offset)
    return [half for half in halves if not half.is_empty()]


def _listed(shell: Manifold, copies: float, flips: float, rng: Rng) -> Triangles:
    """Faces of a solid, some of them or all twice, some of them or all flipped."""
    mesh = shell.to_mesh()
    triangles = mesh.vert_properties[:, :3].astype(np.float64)[mesh.tri_verts]
    whole = rng.chance(0.5)
    again = rng.random(len(triangles)) < copies
    if whole:
        again[:] = rng.chance(copies)
    doubled = triangles[again][:, ::-1] if rng.chance(0.7) else triangles[again]
    flipped = rng.random(len(triangles)) < flips
    if whole:
        flipped[:] = rng.chance(flips)
    return np.concatenate([np.where(flipped[:, None, None], triangles[:, ::-1], triangles), doubled])


def _cracked(triangles: Triangles, share: float, rng: Rng) -> Triangles:
    """Shrink faces, so that a crack opens along each of their edges."""
    width = rng.uniform(0.0, WIDEST_CRACK) * np.ptp(triangles.reshape(-1, 3), axis=0).max()
    sides = np.linalg.norm(np.roll(triangles, -1, axis=1) - np.roll(triangles, -2, axis=1), axis=2)
    perimeter = np.maximum(sides.sum(axis=1), np.finfo(float).tiny)
    a, b, c = np.moveaxis(triangles, 1, 0)
    inradius = np.linalg.norm(np.cross(b - a, c - a), axis=1) / perimeter
    shrunk = (rng.random(len(triangles)) < share) & (inradius > 4 * width)
    incentre = (sides[..., None] * triangles).sum(axis=1) / perimeter[:, None]
    towards = (width / np.where(shrunk, inradius, 1.0))[:, None, None] * (incentre[:, None] - triangles)
    return np.where(shrunk[:, None, None], triangles + towards, triangles)

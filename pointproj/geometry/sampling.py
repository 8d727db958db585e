"""Points drawn from surfaces, and near them."""

from typing import Protocol

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.meshes import Mesh

MARGIN = 0.1
"""How far a pool's uniform points extend beyond a shape's bounding box, in units of the query cube."""

NEAR = (0.015, 0.06)
"""Standard deviations of the displacements of a pool's other points from the surface, in the same units."""


class PointSource(Protocol):
    """Something that reference points are drawn from."""

    def draw(
        self, count: int, generator: np.random.Generator
    ) -> tuple[Float[np.ndarray, "n 3"], Float[np.ndarray, "n 3"]]:
        """Draw ``count`` points and their unit normals; normals are 0 if the source has no surface.

        The same state of the generator gives the same points.
        """


class SurfaceSampler:
    """Draws points from a triangle mesh, uniformly by area; stores the cumulative areas between draws.

    Raises ValueError if no face has area.

    Attributes
    ----------
    summed_areas : float64 array, shape (F,)
        Cumulative area: for each face, the area of all faces up to it.
    last_face : int
        Index of the last face with area.
    """

    def __init__(self, vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"]) -> None:
        self.vertices = vertices
        self.faces = faces
        _, first, second = _corners(vertices, faces)
        areas = 0.5 * np.linalg.norm(np.cross(first, second), axis=1)
        self.summed_areas = np.cumsum(areas)
        if not areas.any():
            raise ValueError(f"expected a face with area; none of the {len(faces)} faces has one")
        self.last_face = int(np.flatnonzero(areas)[-1])

    def draw(
        self, count: int, generator: np.random.Generator
    ) -> tuple[Float[np.ndarray, "n 3"], Float[np.ndarray, "n 3"]]:
        """Draw points uniformly on the surface, float32.

        A face is chosen with probability proportional to its area, and a place on it by square-root
        barycentric coordinates (Osada et al., Shape distributions, 2002, section 4.2). Normals have the sign
        of the face's orientation, which is arbitrary in ModelNet files.
        """
        where, across, along = generator.random((3, count))
        chosen = np.searchsorted(self.summed_areas, where * self.summed_areas[-1], side="right")
        # Rounding can make the product equal to the total area, which gives a face after the last.
        chosen = np.minimum(chosen, self.last_face)
        origin, first, second = _corners(self.vertices, self.faces[chosen])
        across = np.sqrt(across)
        points = origin + (across * (1 - along))[:, None] * first + (across * along)[:, None] * second
        normals = np.cross(first, second)
        normals /= np.linalg.norm(normals, axis=1, keepdims=True)
        return points.astype(np.float32), normals.astype(np.float32)


class FixedCloud:
    """One float32 cloud without a surface: every draw returns its points, with normals of 0."""

    def __init__(self, points: Float[np.ndarray, "N 3"]) -> None:
        self.points = points

    def draw(
        self, count: int, generator: np.random.Generator
    ) -> tuple[Float[np.ndarray, "n 3"], Float[np.ndarray, "n 3"]]:
        """Return the first ``count`` points; the generator is not used."""
        return self.points[:count], np.zeros_like(self.points[:count])


def sample_surface(
    mesh: Mesh, count: int, generator: np.random.Generator
) -> tuple[Float[np.ndarray, "n 3"], Float[np.ndarray, "n 3"]]:
    """Draw points from a mesh once: see :meth:`SurfaceSampler.draw`.

    Raises
    ------
    ValueError
        If ``count`` is below 1, or no face has area.
    """
    if count < 1:
        raise ValueError(f"expected at least 1 point to sample, got {count}: raise data.points")
    return SurfaceSampler(mesh.vertices, mesh.faces).draw(count, generator)


def random_subset(
    points: Float[np.ndarray, "n 3"], count: int, generator: np.random.Generator
) -> Int[np.ndarray, " count"]:
    """Choose ``count`` points, each with the same probability; return their rows in ascending order."""
    return np.sort(generator.choice(len(points), count, replace=False))


def pool_points(sampler: SurfaceSampler, count: int, seed: int) -> Float[np.ndarray, "count 3"]:
    """Draw points to learn a field at: half near the surface, half uniform around the shape or in the cube.

    They lie within the query cube, in random order. Equal arguments give equal points, so a cache only needs
    the values at the points.
    """
    generator = np.random.default_rng(seed)
    low, high = sampler.vertices.min(axis=0) - MARGIN, sampler.vertices.max(axis=0) + MARGIN
    in_cube_count = count // 8
    in_cube = generator.uniform(-1, 1, (in_cube_count, 3))
    about_shape = generator.uniform(low, high, (count - count // 2 - in_cube_count, 3))
    on_surface, _ = sampler.draw(count // 2, generator)
    displacement = generator.choice(NEAR, (count // 2, 1)) * generator.standard_normal((count // 2, 3))
    points = np.clip(np.concatenate([in_cube, about_shape, on_surface + displacement]), -1, 1)
    return generator.permutation(points).astype(np.float32)


def _corners(
    vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"]
) -> tuple[Float[np.ndarray, "F 3"], Float[np.ndarray, "F 3"], Float[np.ndarray, "F 3"]]:
    """Return the first corner of each face, and the edges from it to the second and the third corner."""
    origin = vertices[faces[:, 0]]
    return origin, vertices[faces[:, 1]] - origin, vertices[faces[:, 2]] - origin

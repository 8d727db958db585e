"""Potential flow around an ellipsoid, in closed form: surface pressure, potential and velocity outside.

The body rests in a uniform stream, and its axes are those of the coordinates. Source: Lamb, Hydrodynamics,
6th ed., art. 114. The integrals are Carlson's R_D (DLMF 19.16.5).
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.spatial import ConvexHull
from scipy.special import elliprd

NEWTON_STEPS = 60  # far more than the confocal coordinate needs, which converges quadratically


class EllipsoidSurface(NamedTuple):
    """Points on an ellipsoid that integrate smooth functions over it almost exactly; all float64."""

    points: Float[np.ndarray, "p 3"]
    normals: Float[np.ndarray, "p 3"]  # unit vectors, outwards
    areas: Float[np.ndarray, " p"]  # sum to the area of the surface
    faces: Int[np.ndarray, "f 3"]  # triangles between the points, oriented outwards


def ellipsoid_surface(semi_axes: Float[np.ndarray, "3"], rings: int = 32) -> EllipsoidSurface:
    """Return ``2 rings**2`` points of an ellipsoid: Gauss-Legendre in height, equal steps around the axis."""
    sphere, solid_angles, faces = _sphere(rings)
    gradients = sphere / semi_axes
    stretch = np.linalg.norm(gradients, axis=1)
    areas = solid_angles * np.prod(semi_axes) * stretch
    return EllipsoidSurface(sphere * semi_axes, gradients / stretch[:, None], areas, faces)


@functools.cache
def _sphere(rings: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return points on the unit sphere, their solid angles, and triangles between them."""
    heights, weights = np.polynomial.legendre.leggauss(rings)
    angles = (np.arange(2 * rings) + 0.5) * np.pi / rings
    height, angle = (grid.ravel() for grid in np.meshgrid(heights, angles, indexing="ij"))
    radius = np.sqrt(1 - height**2)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle), height], axis=1)
    faces = ConvexHull(points).simplices.astype(np.int64)
    a, b, c = (points[corner] for corner in faces.T)
    inwards = (np.cross(b - a, c - a) * a).sum(1) < 0
    faces[inwards] = faces[inwards][:, [0, 2, 1]]
    return points, np.repeat(weights, len(angles)) * np.pi / rings, faces


def added_mass_factors(
    semi_axes: Float[np.ndarray, "3"], confocal: Float[np.ndarray, "..."] = 0.0
) -> Float[np.ndarray, "... 3"]:
    """Return Lamb's alpha_i at a confocal coordinate: abc times the integral of ds / ((a_i^2 + s) Delta(s)).

    At the surface (0) they sum to 2; for a sphere each is 2/3.
    """
    x, y, z = (axis**2 + np.asarray(confocal, dtype=np.float64) for axis in semi_axes)
    scale = 2 / 3 * np.prod(semi_axes)
    return scale * np.stack([elliprd(y, z, x), elliprd(z, x, y), elliprd(x, y, z)], axis=-1)


def surface_velocity(
    semi_axes: Float[np.ndarray, "3"], stream: Float[np.ndarray, "3"], normals: Float[np.ndarray, "p 3"]
) -> Float[np.ndarray, "p 3"]:
    """Return velocities on the surface: the tangential part of 2 / (2 - alpha_i) times the stream."""
    constant = 2 / (2 - added_mass_factors(semi_axes)) * stream
    return constant - (normals @ constant)[:, None] * normals


def pressure_coefficient(
    velocity: Float[np.ndarray, "p 3"], stream: Float[np.ndarray, "3"]
) -> Float[np.ndarray, " p"]:
    """Return Bernoulli's 1 - |velocity|^2 / |stream|^2."""
    return 1 - np.square(velocity).sum(1) / np.square(stream).sum()


def confocal_coordinate(
    semi_axes: Float[np.ndarray, "3"], points: Float[np.ndarray, "p 3"]
) -> Float[np.ndarray, " p"]:
    """Return the largest root of sum x_i^2 / (a_i^2 + root) = 1 for points outside; 0 on the surface."""
    squares, axes = np.square(points), np.square(semi_axes)
    root = np.maximum(squares.sum(1) - axes.max(), 0.0)  # at most the root, so that steps only increase it
    for _ in range(NEWTON_STEPS):
        ratios = squares / (axes + root[:, None])
        step = (ratios.sum(1) - 1) / (ratios / (axes + root[:, None])).sum(1)
        root = np.maximum(root + step, 0.0)
        if (np.abs(step) <= 1e-15 * (1 + root)).all():
            break
    return root


def potential(
    semi_axes: Float[np.ndarray, "3"], stream: Float[np.ndarray, "3"], points: Float[np.ndarray, "p 3"]
) -> Float[np.ndarray, " p"]:
    """Return the potential at points outside of the body; its gradient is :func:`velocity`."""
    factors = added_mass_factors(semi_axes, confocal_coordinate(semi_axes, points))
    return (points * stream * (1 + factors / (2 - added_mass_factors(semi_axes)))).sum(1)


def velocity(
    semi_axes: Float[np.ndarray, "3"], stream: Float[np.ndarray, "3"], points: Float[np.ndarray, "p 3"]
) -> Float[np.ndarray, "p 3"]:
    """Return the velocity at points outside of the body or on it."""
    root = confocal_coordinate(semi_axes, points)
    axes = np.square(semi_axes) + root[:, None]
    strength = stream / (2 - added_mass_factors(semi_axes))
    slope = -np.prod(semi_axes) / (axes * np.sqrt(axes.prod(1, keepdims=True)))  # of alpha_i
    gradient = 2 * points / axes / (np.square(points) / np.square(axes)).sum(1, keepdims=True)  # of the root
    uniform = stream + strength * added_mass_factors(semi_axes, root)
    return uniform + (strength * points * slope).sum(1, keepdims=True) * gradient

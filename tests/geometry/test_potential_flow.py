"""The closed form of the flow around an ellipsoid, against a sphere, d'Alembert, and its own derivatives."""

import numpy as np
import pytest

from pointproj.geometry.potential_flow import (
    added_mass_factors,
    confocal_coordinate,
    ellipsoid_surface,
    potential,
    pressure_coefficient,
    surface_velocity,
    velocity,
)

AXES = [np.array(axes) for axes in ([1.0, 1.0, 1.0], [0.3, 1.0, 0.55], [0.31, 0.3, 0.99])]
STREAM = np.array([0.48, -0.6, 0.64])


def test_sphere_has_nine_quarters_of_sine_squared():
    surface = ellipsoid_surface(np.full(3, 0.7))
    pressure = pressure_coefficient(surface_velocity(np.full(3, 0.7), STREAM, surface.normals), STREAM)
    sine_squared = 1 - (surface.normals @ STREAM) ** 2
    np.testing.assert_allclose(pressure, 1 - 9 / 4 * sine_squared, atol=1e-12)
    np.testing.assert_allclose(added_mass_factors(np.full(3, 0.7)), 2 / 3)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_surface_integrals(axes):
    surface = ellipsoid_surface(axes)
    volume = surface.areas @ (surface.points * surface.normals).sum(1) / 3
    assert volume == pytest.approx(4 / 3 * np.pi * axes.prod(), rel=1e-12)
    pressure = pressure_coefficient(surface_velocity(axes, STREAM, surface.normals), STREAM)
    force = (surface.areas * pressure) @ surface.normals  # d'Alembert: none
    np.testing.assert_allclose(force, 0, atol=1e-9 * surface.areas @ np.abs(pressure))
    assert added_mass_factors(axes).sum() == pytest.approx(2)
    a, b, c = (surface.points[corner] for corner in surface.faces.T)
    assert np.einsum("ij,ij->", np.cross(a, b), c) / 6 == pytest.approx(volume, rel=0.01)
    assert len(surface.faces) == 2 * len(surface.points) - 4  # closed


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_velocity_is_the_gradient_and_meets_the_surface(axes):
    surface, step = ellipsoid_surface(axes, 5), 1e-5
    np.testing.assert_allclose(
        velocity(axes, STREAM, surface.points), surface_velocity(axes, STREAM, surface.normals), atol=1e-9
    )
    points = np.random.default_rng(0).uniform(1.0, 2.0, (9, 3))
    ahead, behind = (
        np.stack([potential(axes, STREAM, points + sign * step * unit) for unit in np.eye(3)], axis=1)
        for sign in (1, -1)
    )
    np.testing.assert_allclose((ahead - behind) / (2 * step), velocity(axes, STREAM, points), atol=1e-8)
    root = confocal_coordinate(axes, 1e3 * points)
    np.testing.assert_allclose((np.square(1e3 * points) / (axes**2 + root[:, None])).sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(velocity(axes, STREAM, 1e3 * points), np.tile(STREAM, (9, 1)), atol=1e-8)

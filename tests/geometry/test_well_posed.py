"""Whether a label is well posed: solids agree with floods, a slit that a flood enters does not."""

import numpy as np
import pytest

from pointproj.geometry.interior import inside
from pointproj.geometry.meshes import Mesh, query_grid
from pointproj.geometry.well_posed import WELL_POSED, label_agreement, unflooded
from tests.geometry.test_interior import box

GRID = 13


def opened(slit):
    """A box whose lid is higher than its walls."""
    closed = box((0.8, 0.6, 0.7))
    top = (closed.vertices[closed.faces][..., 2] > 0).all(axis=1)
    corners = closed.vertices[closed.faces].copy()
    corners[top, :, 2] += slit
    return Mesh(corners.reshape(-1, 3), np.arange(3 * len(corners)).reshape(-1, 3), "opened")


def test_the_flood_of_a_solid_leaves_its_inside(device):
    half = np.array([0.61, 0.43, 0.52])
    solid = box(half)
    nodes = unflooded(solid, 31, device=device).reshape(-1)
    np.testing.assert_array_equal(nodes, (np.abs(query_grid(31)) < half).all(axis=1))
    flipped = Mesh(solid.vertices, np.concatenate([solid.faces[:, ::-1], solid.faces[:3]]), "copies")
    assert label_agreement(flipped, inside(flipped, GRID), device=device) == 1


@pytest.mark.parametrize(("slit", "is_well_posed"), [(0.004, True), (0.05, False)])
def test_a_slit_that_one_hardly_sees_through_but_a_flood_enters_is_not_well_posed(slit, is_well_posed):
    mesh = opened(slit)
    label = inside(mesh, GRID)
    assert label.any()
    assert (label_agreement(mesh, label) >= WELL_POSED) == is_well_posed

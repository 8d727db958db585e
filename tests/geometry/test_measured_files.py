"""Samples with fields, as each format holds them."""

import numpy as np
import pytest
import torch

from pointproj.geometry.files import write_mesh
from pointproj.geometry.files.measured import read_sample
from pointproj.geometry.meshes import Mesh, MeshError

pv = pytest.importorskip("pyvista")

L_SHAPE = np.array([[0, 0, 0], [2, 0, 0], [2, 1, 0], [1, 1, 0], [1, 2, 0], [0, 2, 0]], dtype=np.float64)
TETRAHEDRON = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], dtype=np.float64)
SIDES = np.array([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]])


def test_concave_polygon_at_its_cell_and_at_its_points(tmp_path):
    """Its centre is that of its area, whichever corner comes first."""
    for first in range(6):
        corners = np.roll(L_SHAPE, first, axis=0) + 1e6
        surface = pv.PolyData(corners, faces=[6, *range(6)])
        surface.cell_data["pressure"] = [7.5]
        surface.cell_data["shear"] = [[1.0, 2.0, 3.0]]
        surface.field_data["speed"] = [30.0]
        surface.save(tmp_path / "polygon.vtp")
        sample = read_sample(tmp_path / "polygon.vtp", ["pressure", "shear"])
        np.testing.assert_allclose(sample.points, [[1e6 + 5 / 6, 1e6 + 5 / 6, 1e6]], rtol=1e-14)
        np.testing.assert_allclose(sample.areas, [3.0])
        np.testing.assert_allclose(sample.normals, [[0, 0, 1]])
        assert sample.place == "cells"
        assert sample.parameters == {"speed": 30.0}
        assert sample.values["pressure"].tolist() == [[7.5]]
        assert sample.values["shear"].tolist() == [[1.0, 2.0, 3.0]]


def test_strips_and_points_without_area(tmp_path):
    points = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0], [9, 9, 9]], dtype=np.float64)
    surface = pv.PolyData(points, strips=[4, 0, 1, 2, 3])
    surface.point_data["pressure"] = np.arange(5.0)
    surface.save(tmp_path / "strip.vtp")
    sample = read_sample(tmp_path / "strip.vtp", ["pressure"])
    assert sample.rows.tolist() == [0, 1, 2, 3]  # the last belongs to no triangle
    np.testing.assert_allclose(sample.areas, [1 / 6, 1 / 3, 1 / 3, 1 / 6])
    assert sample.values["pressure"][:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("suffix", [".vtu", ".vtk"])
def test_volume_has_its_outer_surface_as_geometry(tmp_path, suffix):
    volume = pv.UnstructuredGrid([4, 0, 1, 2, 3], [pv.CellType.TETRA], TETRAHEDRON)
    volume.cell_data["pressure"] = [2.0]
    volume.save(tmp_path / f"volume{suffix}")
    sample = read_sample(tmp_path / f"volume{suffix}", ["pressure"])
    np.testing.assert_allclose(sample.points, [[0.25, 0.25, 0.25]])
    assert (sample.areas, sample.normals) == (None, None)
    assert len(sample.geometry.faces) == 4


def _save(path, arrays):
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)


@pytest.mark.parametrize("suffix", [".npz", ".pt"])
def test_arrays_at_points_and_at_faces(tmp_path, suffix):
    path = tmp_path / f"sample{suffix}"
    arrays = {"vertices": TETRAHEDRON, "faces": SIDES, "angle": np.array(5.0)}
    at_points = np.arange(4.0)
    _save(path, {**arrays, "pressure": at_points[:, None].repeat(3, 1)})
    sample = read_sample(path, ["pressure"])
    assert (sample.values["pressure"].shape, sample.parameters) == ((4, 3), {"angle": 5.0})
    np.testing.assert_allclose(sample.areas[0], 0.5)
    three = {"points": TETRAHEDRON[:3], "faces": SIDES[:1], "pressure": np.array([1.0])}
    _save(path, three)
    sample = read_sample(path, ["pressure"])
    np.testing.assert_allclose(sample.points, [[1 / 3, 1 / 3, 0]])
    np.testing.assert_allclose(sample.normals, [[0, 0, -1]])
    assert sample.place == "cells"


def test_csv_beside_stl(tmp_path):
    write_mesh(Mesh(TETRAHEDRON, SIDES, "body"), tmp_path / "body.stl")
    (tmp_path / "body.csv").write_text(
        '"Points:0","Points:1","Points:2","p","U:0","U:1","U:2"\n1,2,3,0.5,4,5,6\n1,2,4,1.5,7,8,9\n'
    )
    sample = read_sample(tmp_path / "body.csv", ["p", "U"])
    assert sample.points.tolist() == [[1, 2, 3], [1, 2, 4]]
    assert sample.values["U"].tolist() == [[4, 5, 6], [7, 8, 9]]
    assert len(sample.geometry.faces) == 4
    (tmp_path / "body.csv").write_text("p\n1\n2\n3\n4\n")  # one row a facet of the STL
    np.testing.assert_allclose(read_sample(tmp_path / "body.csv", ["p"]).areas.sum(), 1.5 + np.sqrt(3) / 2)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"pressure": np.array([0, np.nan, 1, 2])}, "NaN or infinity in pressure: 1 of 4 rows, first 1"),
        ({"temperature": np.zeros(4)}, "no field pressure: its points have temperature; its cells have none"),
        ({"pressure": np.array(["a"] * 4)}, "pressure as <U1"),
    ],
    ids=["nan", "missing", "text"],
)
def test_what_cannot_be_used_is_named(tmp_path, arrays, words):
    np.savez(tmp_path / "bad.npz", points=TETRAHEDRON, **arrays)
    with pytest.raises(MeshError, match=r"bad\.npz") as caught:
        read_sample(tmp_path / "bad.npz", ["pressure"])
    assert words in str(caught.value)


def test_a_surface_without_cells_is_named(tmp_path):
    pv.PolyData(TETRAHEDRON, verts=np.empty(0, int)).save(tmp_path / "empty.vtp")
    with pytest.raises(MeshError, match="no cells with area, only 4 points"):
        read_sample(tmp_path / "empty.vtp", [])

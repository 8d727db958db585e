"""Samples with fields, as each format holds them."""

import re

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
        '"Points:0","Points:1","Points:2","p","U:0","U:1","U:2"\n1,2,3,"0.5",4,5,6\n1,2,4,1.5,7,8,9\n'
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


STRIP = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0], [2, 0, 0], [2, 1, 0], [5, 5, 5]], float)
TWO = pv.ImageData(dimensions=(3, 2, 2))  # two cubes


def _marked(data, cells=None, points=None):
    data = data.copy()
    data.cell_data["p"], data.point_data["q"] = np.arange(data.n_cells), np.arange(data.n_points)
    for held, flags in ((data.cell_data, cells), (data.point_data, points)):
        if flags is not None:
            held["vtkGhostType"] = np.array(flags, np.uint8)
    return data


PARTS = {  # data, rows of its cells, rows of its points
    "copied.vtp": (
        _marked(pv.PolyData(STRIP[:6], faces=[4, 0, 1, 2, 3, 4, 1, 4, 5, 2]), [0, 1]),
        [0],
        [0, 1, 2, 3],
    ),
    "hidden.vtp": (
        _marked(pv.PolyData(STRIP[:6], faces=[4, 0, 1, 2, 3, 4, 1, 4, 5, 2]), [32, 0]),
        [1],
        [1, 2, 4, 5],
    ),
    "copied.vtu": (_marked(TWO.cast_to_unstructured_grid(), [0, 1]), [0], [0, 1, 3, 4, 6, 7, 9, 10]),
    "hidden.vtk": (_marked(TWO.cast_to_structured_grid(), [32, 0]), [1], [1, 2, 4, 5, 7, 8, 10, 11]),
    "hidden points.vtk": (_marked(TWO.cast_to_structured_grid(), None, [2] + 11 * [0]), [1], None),
    "vertices, lines, a face, a strip.vtp": (
        _marked(
            pv.PolyData(STRIP, verts=[1, 6], lines=[2, 0, 6], faces=[4, 0, 1, 2, 3], strips=[4, 1, 4, 2, 5])
        ),
        [2, 3],
        [*range(6)],
    ),
    "a triangle among others.vtu": (
        _marked(pv.UnstructuredGrid([3, 0, 1, 2, 1, 6, 2, 3, 6], [5, 1, 3], STRIP)),
        [0],
        [0, 1, 2],
    ),
    "a point without cells.vtu": (
        _marked(pv.UnstructuredGrid([4, 0, 1, 3, 6], [10], STRIP)),
        [0],
        [0, 1, 3, 6],
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_copies_and_hidden_cells_are_no_part(tmp_path, name):
    """Of a divided data set a file has cells of its neighbours too; VTK marks them, and hidden ones."""
    data, *expected = PARTS[name]
    data.save(tmp_path / name)
    for field, rows in zip("pq", expected, strict=True):
        if rows is not None:
            sample = read_sample(tmp_path / name, [field])
            assert sorted(sample.rows) == rows
            assert sample.values[field][:, 0].tolist() == sample.rows.tolist()


@pytest.mark.parametrize("suffix", [".vtp", ".vtu", ".vtk"])
@pytest.mark.parametrize("binary", [True, False])
def test_cut_files_are_refused(tmp_path, suffix, binary, capfd):
    """VTK fills what is missing with zeros, and says so nowhere or in many lines."""
    data = _marked(pv.Icosphere(nsub=2))
    data = data.cast_to_unstructured_grid() if suffix == ".vtu" else data
    data.save(tmp_path / f"whole{suffix}", binary=binary)
    content = (tmp_path / f"whole{suffix}").read_bytes()
    assert len(read_sample(tmp_path / f"whole{suffix}", ["q"]).points) == 162
    capfd.readouterr()
    for share in (0.6, 0.95):
        (tmp_path / f"cut{suffix}").write_bytes(content[: int(share * len(content))])
        with pytest.raises(MeshError, match=f"no complete {suffix[1:].upper()} file"):
            read_sample(tmp_path / f"cut{suffix}", ["q"])
    assert not "".join(capfd.readouterr())


@pytest.mark.parametrize("suffix", [".vtp", ".vtu"])
@pytest.mark.parametrize("place", ["PointData", "CellData"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("", ""), ""),
        ((r'<DataArray[^>]*Name="q".*?</DataArray>', ""), r"p Float64 1, q Float64 1; p Float64 1\)"),
        ((r'<DataArray[^>]*Name="[pq]".*</DataArray>', ""), r"q Float64 1; none\)"),
        (('Name="p"(.*)Name="q"', r'Name="q"\1Name="p"'), "; q Float64 1, p Float64 1"),
        (('"Float64" Name="q"', '"Float32" Name="q"'), "q Float64 1; p Float64 1, q Float32 1"),
    ],
    ids=["same", "one-lacks-q", "one-has-none", "other-order", "other-type"],
)
def test_pieces_have_the_same_arrays(tmp_path, suffix, place, change, words):
    """VTK takes arrays of the second piece by their places; of a missing one it makes up the values."""
    data = pv.PolyData(TETRAHEDRON, faces=[3, 0, 1, 2, 3, 0, 1, 3])
    for name, first in (("p", 0.0), ("q", 10.0)):
        data.point_data[name], data.cell_data[name] = first + np.arange(4), first + np.arange(2)
    data = data.cast_to_unstructured_grid() if suffix == ".vtu" else data
    data.save(path := tmp_path / f"pieces{suffix}", binary=False)
    piece = re.search("<Piece.*</Piece>", text := path.read_text(), re.DOTALL)[0]
    changed = re.sub(f"<{place}.*</{place}>", lambda m: re.sub(*change, m[0], flags=re.S), piece, flags=re.S)
    path.write_text(text.replace(piece, piece + changed))
    if words:
        with pytest.raises(MeshError, match=rf"pieces\{suffix}: has 2 pieces .* in {place} .*{words}"):
            read_sample(path, ["p"])
    else:
        assert read_sample(path, ["q"]).values["q"][:, 0].tolist() == [10.0, 11.0] * 2


def test_what_stands_beside_arrays(tmp_path):
    write_mesh(Mesh(TETRAHEDRON, SIDES, "body"), tmp_path / "body.v1.STL")
    np.savez(tmp_path / "body.v1.npz", points=TETRAHEDRON, p=np.arange(4.0))
    assert len(read_sample(tmp_path / "body.v1.npz", ["p"]).geometry.faces) == 4
    write_mesh(Mesh(TETRAHEDRON, SIDES, "body"), tmp_path / "body.v1.obj")
    with pytest.raises(MeshError, match=r"has body\.v1\.obj and body\.v1\.STL beside it"):
        read_sample(tmp_path / "body.v1.npz", ["p"])


def test_a_surface_without_cells_is_named(tmp_path):
    pv.PolyData(TETRAHEDRON, verts=np.empty(0, int)).save(tmp_path / "empty.vtp")
    with pytest.raises(MeshError, match="no cells with area, only 4 points"):
        read_sample(tmp_path / "empty.vtp", [])

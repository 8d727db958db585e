"""OFF files in and out, normalisation, surface samples, the query grid."""

import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import trimesh
from hypothesis import given, settings
from hypothesis import strategies as st

from pointproj.meshes import (
    LONGEST_SIDE,
    SMALLEST_AREA,
    Mesh,
    MeshError,
    face_areas,
    normalize,
    query_grid,
    read_mesh,
    sample_surface,
    write_off,
)

QUIRKS = Path(__file__).parents[2] / "shared" / "modelnet10" / "quirks"

VERTICES = "0 0 0\n4 0 0\n4 3 0\n0 3 0\n"
SQUARE = np.array([[0, 0, 0], [4, 0, 0], [4, 3, 0], [0, 3, 0]], dtype=float)
PLAIN = f"OFF\n4 2 0\n{VERTICES}3 0 1 2\n3 0 2 3\n"

READABLE = {
    "plain": PLAIN,
    "glued header": PLAIN.replace("OFF\n", "OFF"),
    "header and counts on one line": PLAIN.replace("OFF\n", "OFF "),
    "CRLF": PLAIN.replace("\n", "\r\n"),
    "old Mac line ends": PLAIN.replace("\n", "\r"),
    "stray end_header": PLAIN.replace("4 2 0\n", "4 2 0\nend_header\n"),
    "end_header before the counts": PLAIN.replace("OFF\n", "OFF\nend_header\n"),
    "comments and blank lines": PLAIN.replace("4 2 0\n", "# a chair\n\n4 2 0 # counts\n   \n"),
    "two counts": PLAIN.replace("4 2 0", "4 2"),
    "no final line end": PLAIN.rstrip("\n"),
    "byte-order mark": "\ufeff" + PLAIN,
    "vertex colours": "C" + PLAIN.replace("0 0 0\n4 0 0\n", "0 0 0 255 0 0 1\n4 0 0 255 0 0 1\n"),
    "face colours": PLAIN.replace("3 0 1 2\n", "3 0 1 2 0.5 0.5 0.5\n"),
    "lines after the faces": PLAIN + "2 0 1\n",
    "a quadrilateral": f"OFF\n4 1 0\n{VERTICES}4 0 1 2 3\n",
    "an edge among the faces": PLAIN.replace("4 2 0", "4 3 0").replace("3 0 1 2\n", "2 0 1\n3 0 1 2\n"),
}


@pytest.mark.parametrize("text", READABLE.values(), ids=READABLE.keys())
def test_quirks_read_as_the_plain_file(tmp_path, text):
    path = tmp_path / "chair_0001.off"
    path.write_bytes(text.encode())
    mesh = read_mesh(path)
    assert mesh.name == "chair_0001"
    assert mesh.vertices.dtype == np.float64
    assert mesh.faces.dtype == np.int64
    np.testing.assert_array_equal(mesh.vertices, SQUARE)
    np.testing.assert_array_equal(mesh.faces, [[0, 1, 2], [0, 2, 3]])


def test_polygons_of_several_sizes_become_fans(tmp_path):
    corners = [(np.cos(a), np.sin(a)) for a in np.arange(6) * np.pi / 3]
    lines = ["OFF", "6 3 0", *(f"{x} {y} 0" for x, y in corners), "6 0 1 2 3 4 5", "3 0 1 2", "4 2 3 4 5"]
    path = tmp_path / "fan.off"
    path.write_text("\n".join(lines))
    mesh = read_mesh(path)
    fan = [[0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5]]
    np.testing.assert_array_equal(mesh.faces, [*fan, [0, 1, 2], [2, 3, 4], [2, 4, 5]])
    assert face_areas(mesh)[:4].sum() == pytest.approx(1.5 * np.sqrt(3))


UNREADABLE = {
    "empty file": ("", "is empty"),
    "only comments": ("# OFF\n\n", "is empty"),
    "another format": ("ply\nformat ascii 1.0\n", "begin with OFF, got 'ply'"),
    "header alone": ("OFF\n", "vertex and face counts"),
    "binary": ("OFF BINARY\n\0\0\0\1", "vertex and face counts, got 'BINARY'"),
    "no counts": ("OFF\nchair\n", "got 'chair'"),
    "no faces": ("OFF\n3 0 0\n0 0 0\n1 0 0\n0 1 0\n", "declares 3 vertices and 0 faces"),
    "negative count": ("OFF\n-1 1 0\n0 0 0\n", "declares -1 vertices"),
    "cut short": (PLAIN.replace("3 0 2 3\n", ""), "4 vertices and 2 faces, but only 5 lines follow"),
    "counts beyond the file": (PLAIN.replace("4 2 0", f"{10**15} {10**15} 0"), "but only 6 lines follow"),
    "two coordinates": (PLAIN.replace("4 3 0\n", "4 3\n"), "vertex 2 must have 3 coordinates, got '4 3'"),
    "a word for a number": (PLAIN.replace("4 3 0\n", "4 three 0\n"), "is not a readable OFF file"),
    "a face cut short": (PLAIN.replace("3 0 2 3", "3 0 2"), "face 1 must list as many vertices"),
    "a huge polygon": (PLAIN.replace("3 0 2 3", f"{10**12} 0 2 3"), "face 1 must list as many vertices"),
    "a vertex that is not there": (PLAIN.replace("3 0 2 3", "3 0 2 4"), "is not a readable OFF file"),
    "a negative index": (PLAIN.replace("3 0 2 3", "3 0 2 -1"), "is not a readable OFF file"),
    "a NaN": (PLAIN.replace("4 3 0\n", "4 nan 0\n"), "is not finite: vertex 2"),
    "an overflow": (PLAIN.replace("4 3 0\n", "4 1e999 0\n"), "is not finite: vertex 2"),
    "only edges": (f"OFF\n4 2 0\n{VERTICES}2 0 1\n2 1 2\n", "no face with three vertices"),
    "all in one point": ("OFF\n3 1 0\n1 1 1\n1 1 1\n1 1 1\n3 0 1 2\n", "no extent"),
    "no area": ("OFF\n3 1 0\n0 0 0\n1 1 1\n0.1 0.1 0.1\n3 0 1 2\n", "no face with area among its 1 faces"),
}


@pytest.mark.parametrize(("text", "reason"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unusable_file_is_named_with_its_reason(tmp_path, text, reason):
    path = tmp_path / "broken.off"
    path.write_bytes(text.encode())
    with pytest.raises(MeshError) as caught:
        read_mesh(path)
    assert reason in caught.value.reason
    assert caught.value.source == str(path)
    assert str(caught.value) == f"{path}: {caught.value.reason}"


def test_what_is_no_file_is_a_mesh_error_too(tmp_path):
    for path in (tmp_path / "missing.off", tmp_path):
        with pytest.raises(MeshError, match="cannot be read"):
            read_mesh(path)


def test_error_survives_the_way_back_from_a_worker_process():
    error = pickle.loads(pickle.dumps(MeshError("a.off", "is empty")))
    assert (error.source, error.reason, str(error)) == ("a.off", "is empty", "a.off: is empty")


def test_mesh_checks_its_arrays():
    with pytest.raises(MeshError, match=r"hand-made: vertices must have shape \(n, 3\), got \(4, 2\)"):
        Mesh(np.zeros((4, 2)), np.zeros((1, 3)), "hand-made")
    with pytest.raises(MeshError, match="outside 0 to 3"):
        Mesh(SQUARE, [[0, 1, 4]], "hand-made")


WORDS = (
    "OFF",
    "COFF",
    "end_header",
    "#",
    "x",
    "nan",
    "inf",
    "٣",
    " ",
    "\n",
    "\r\n",
    "\x00",
    "\x0b",
    "\u2028",
)
NUMBERS = ("0", "1", "2", "3", "4", "-1", "0.5", "1e9", "1e308", "-1e308", "9" * 30, "9" * 5000)
OFF_WORDS = st.sampled_from(WORDS + NUMBERS)
OFF_LIKE = st.lists(OFF_WORDS, max_size=60).map(lambda words: ("OFF\n" + " ".join(words)).encode())
DAMAGED = st.tuples(st.integers(0, len(PLAIN)), st.integers(0, 8), st.binary(max_size=6)).map(
    lambda cut: PLAIN.encode()[: cut[0]] + cut[2] + PLAIN.encode()[cut[0] + cut[1] :]
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(content=st.one_of(st.binary(max_size=200), OFF_LIKE, DAMAGED))
def test_any_bytes_end_in_a_usable_mesh_or_a_mesh_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.off"
    path.write_bytes(content)
    try:
        mesh = read_mesh(path)
    except MeshError:
        return
    assert np.isfinite(mesh.vertices).all()
    assert 0 <= mesh.faces.min() <= mesh.faces.max() < len(mesh.vertices)
    inside_cube = normalize(mesh)
    assert np.abs(inside_cube.vertices[inside_cube.faces]).max() == pytest.approx(LONGEST_SIDE / 2)
    assert face_areas(inside_cube).max() > 0


def has_surface(mesh):
    try:
        return (face_areas(normalize(mesh)) > SMALLEST_AREA).any()
    except MeshError:
        return False


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    vertices=st.lists(
        st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 3), min_size=3, max_size=12
    ),
    data=st.data(),
)
def test_writing_then_reading_gives_the_same_bits(tmp_path_factory, vertices, data):
    index = st.integers(0, len(vertices) - 1)
    faces = data.draw(st.lists(st.tuples(index, index, index), min_size=1, max_size=8))
    path = tmp_path_factory.getbasetemp() / "round.off"
    written = Mesh(np.array(vertices), np.array(faces), "round")
    write_off(written, path)
    try:
        read = read_mesh(path)
    except MeshError:
        assert not has_surface(written)
        return
    np.testing.assert_array_equal(read.vertices, written.vertices)
    np.testing.assert_array_equal(read.faces, written.faces)


def test_declared_counts_reserve_no_memory(tmp_path):
    path = tmp_path / "liar.off"
    path.write_text(PLAIN.replace("4 2 0", "2000000000 2000000000 0"))
    tracemalloc.start()
    with pytest.raises(MeshError, match="only 6 lines follow"):
        read_mesh(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "made" / "table.off"
    write_off(Mesh(SQUARE, [[0, 1, 2]], "table"), path)
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_off(Mesh(2 * SQUARE, [[0, 1, 2]], "table"), path)
    assert [entry.name for entry in path.parent.iterdir()] == ["table.off"]
    assert path.read_bytes() == before


def test_normalize_centres_the_box_and_scales_its_longest_side():
    vertices = np.array([[10, 20, 30], [14, 20, 30], [14, 22, 30], [10, 22, 31]], dtype=float)
    mesh = normalize(Mesh(vertices, [[0, 1, 2], [0, 2, 3]], "box"))
    np.testing.assert_allclose(mesh.vertices.min(0), [-0.9, -0.45, -0.225], atol=1e-15)
    np.testing.assert_allclose(mesh.vertices.max(0), [0.9, 0.45, 0.225], atol=1e-15)


def test_normalize_ignores_vertices_that_no_face_uses():
    stray = np.vstack([SQUARE, [[1e6, 0, 0]]])
    mesh = normalize(Mesh(stray, [[0, 1, 2], [0, 2, 3]], "stray"))
    np.testing.assert_allclose(mesh.vertices[:4], (SQUARE - [2, 1.5, 0]) * 0.45, atol=1e-15)


def test_normalize_survives_the_ends_of_the_number_range():
    for scale in (1e-300, 1e307, 1.7e308):
        mesh = normalize(Mesh((SQUARE / 4 * 2 - 1) * scale, [[0, 1, 2], [0, 2, 3]], "extreme"))
        np.testing.assert_allclose(mesh.vertices, (SQUARE - [2, 1.5, 0]) * 0.45, rtol=1e-9, atol=1e-9)


def test_normalize_refuses_what_has_no_extent():
    with pytest.raises(MeshError, match="no faces"):
        normalize(Mesh(SQUARE, np.empty((0, 3)), "bare"))
    with pytest.raises(MeshError, match="no extent"):
        normalize(Mesh(SQUARE, [[1, 1, 1]], "dot"))


def test_samples_are_spread_by_area_and_carry_their_normals():
    box = trimesh.creation.box(extents=(1, 2, 4))
    mesh = Mesh(box.vertices, box.faces, "box")
    points, normals = sample_surface(mesh, 40_000, np.random.default_rng(3))
    assert points.dtype == normals.dtype == np.float32
    half = np.array([0.5, 1.0, 2.0])
    axis = np.abs(normals).argmax(axis=1)
    rows = np.arange(len(points))
    np.testing.assert_allclose(points[rows, axis], normals[rows, axis] * half[axis], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(normals, axis=1), 1, atol=1e-6)
    share = np.bincount(axis, minlength=3) / len(points)
    np.testing.assert_allclose(share, np.array([8, 4, 2]) / 14, atol=0.01)
    np.testing.assert_allclose(points.mean(axis=0), 0, atol=0.03)
    # variance of z: uniform on the sides (4 ** 2 / 12), at +-2 on the two ends
    assert points[:, 2].var() == pytest.approx(12 / 14 * 16 / 12 + 2 / 14 * 4, rel=0.02)


def test_samples_follow_from_the_generator_alone():
    mesh = Mesh(SQUARE, [[0, 1, 2], [0, 2, 3]], "square")
    first, _ = sample_surface(mesh, 50, np.random.default_rng(7))
    again, _ = sample_surface(mesh, 50, np.random.default_rng(7))
    generator = np.random.default_rng(7)
    sample_surface(mesh, 50, generator)
    later, _ = sample_surface(mesh, 50, generator)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, later)


def test_degenerate_faces_are_never_sampled():
    faces = [[0, 0, 0], [0, 1, 1], [0, 1, 2], [3, 3, 2]]
    points, normals = sample_surface(Mesh(SQUARE, faces, "mixed"), 500, np.random.default_rng(0))
    assert (points[:, 1] <= points[:, 0] * 0.75 + 1e-6).all()
    np.testing.assert_array_equal(normals, np.tile([0, 0, 1], (500, 1)))


def test_sampling_needs_a_count():
    with pytest.raises(ValueError, match=r"at least 1 point to sample, got 0: raise data\.points"):
        sample_surface(Mesh(SQUARE, [[0, 1, 2]], "square"), 0, np.random.default_rng(0))


def test_query_grid_runs_z_fastest():
    grid = query_grid(3)
    assert grid.dtype == np.float32
    np.testing.assert_array_equal(grid[:4], [[-1, -1, -1], [-1, -1, 0], [-1, -1, 1], [-1, 0, -1]])
    np.testing.assert_array_equal(grid.reshape(3, 3, 3, 3)[2, 0, 1], [1, -1, 0])
    with pytest.raises(ValueError, match=r"at least 2 points a side, got 1: raise data\.grid"):
        query_grid(1)


REAL_QUIRKS = {
    "glued_header_ModelNet40_bathtub_0001": (3514, 3546),
    "glued_header_ModelNet40_bathtub_0002": (700, 664),
    "crlf_bed_0001": (2095, 1807),
    "stray_end_header_bathtub_0107": (1568, 1820),
}


@pytest.mark.skipif(not QUIRKS.is_dir(), reason="the sample of real ModelNet files is not here")
@pytest.mark.parametrize(("name", "counts"), REAL_QUIRKS.items(), ids=REAL_QUIRKS.keys())
def test_odd_real_files_are_read_whole(name, counts):
    mesh = read_mesh(QUIRKS / f"{name}.off")
    assert (len(mesh.vertices), len(mesh.faces)) == counts
    assert (face_areas(mesh) > 0).any()

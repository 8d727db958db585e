"""Mesh files: what is understood in OFF, what is refused and why, and files written whole or not at all."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointproj.geometry import files
from pointproj.geometry.files import read_mesh, write_mesh
from pointproj.geometry.meshes import LONGEST_SIDE, SMALLEST_AREA, Mesh, MeshError, face_areas, normalize

QUIRKS = Path(__file__).parents[3] / "shared" / "modelnet10" / "quirks"

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
    "texture coordinates": "ST" + PLAIN.replace("4 0 0\n", "4 0 0 0.5 0.5\n"),
    "a fourth coordinate of 1": f"4OFF\n4 2 0\n{VERTICES}3 0 1 2\n3 0 2 3\n".replace(" 0\n", " 0 1\n"),
    "odd comments": PLAIN.replace("OFF\n", "OFF # a\x0cb\u2028c\n"),
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
    assert (mesh.name, mesh.vertices.dtype, mesh.faces.dtype) == ("chair_0001", np.float64, np.int64)
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
    "homogeneous": ("4" + PLAIN.replace("4 3 0\n", "4 3 0 2\n"), "vertices of four coordinates (4OFF)"),
    "dimensions": ("n" + PLAIN.replace("4 2 0", "3\n4 2 0"), "vertices of any dimension (nOFF)"),
    "binary": ("OFF BINARY\n\0\0\0\1", "has binary numbers (OFF BINARY)"),
    "no counts": ("OFF\nchair\n", "got 'chair'"),
    "no faces": ("OFF\n3 0 0\n0 0 0\n1 0 0\n0 1 0\n", "declares 3 vertices and 0 faces"),
    "negative count": ("OFF\n-1 1 0\n0 0 0\n", "declares -1 vertices"),
    "cut short": (PLAIN.replace("3 0 2 3\n", ""), "4 vertices and 2 faces, but only 5 lines follow"),
    "counts beyond the file": (PLAIN.replace("4 2 0", f"{10**15} {10**15} 0"), "but only 6 lines follow"),
    "two coordinates": (PLAIN.replace("4 3 0\n", "4 3\n"), "vertex 2 must have 3 coordinates, got '4 3'"),
    "a word for a number": (
        PLAIN.replace("4 3 0\n", "4 three 0\n"),
        "vertex 2 must have 3 coordinates, got '4 three 0'",
    ),
    "a face cut short": (PLAIN.replace("3 0 2 3", "3 0 2"), "face 1 must list as many vertices"),
    "a huge polygon": (PLAIN.replace("3 0 2 3", f"{10**12} 0 2 3"), "face 1 must list as many vertices"),
    "a vertex that is not there": (PLAIN.replace("3 0 2 3", "3 0 2 4"), "names a vertex outside 0 to 3"),
    "a negative index": (PLAIN.replace("3 0 2 3", "3 0 2 -1"), "names a vertex outside 0 to 3"),
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
    assert (caught.value.source, str(caught.value)) == (str(path), f"{path}: {caught.value.reason}")


def test_reading_off_files_imports_no_mesh_library(tmp_path):
    (tmp_path / "plain.off").write_text(PLAIN)
    code = (
        "import sys; from pointproj import knn; from pointproj.geometry.files import read_mesh\n"
        f"read_mesh({str(tmp_path / 'plain.off')!r}); print('trimesh' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_a_large_file_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST_FILE_BYTES", len(PLAIN) - 1)
    (tmp_path / "large.off").write_text(PLAIN)
    with pytest.raises(MeshError, match=rf"expected at most {len(PLAIN) - 1} bytes, got {len(PLAIN)}"):
        read_mesh(tmp_path / "large.off")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.off")
    with pytest.raises(MeshError, match="expected a file"):
        read_mesh(tmp_path / "pipe.off")


def test_what_is_no_file_is_a_mesh_error_too(tmp_path):
    for path in (tmp_path / "missing.off", tmp_path):
        with pytest.raises(MeshError, match="cannot be read"):
            read_mesh(path)


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
    write_mesh(written, path)
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
    write_mesh(Mesh(SQUARE, [[0, 1, 2]], "table"), path)
    before = path.read_bytes()

    def full_disk(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_mesh(Mesh(2 * SQUARE, [[0, 1, 2]], "table"), path)
    assert [entry.name for entry in path.parent.iterdir()] == ["table.off"]
    assert path.read_bytes() == before


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

"""PLY, OBJ, STL, glTF and 3MF files: what is understood, what is refused and why, and files written."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest
import trimesh

from pointproj.geometry.files import read_mesh, threemf, write_mesh
from pointproj.geometry.meshes import Mesh, MeshError
from tests.geometry.test_files import SQUARE, VERTICES


def floats(*values, order="<"):
    return struct.pack(f"{order}{len(values)}f", *values)


CORNERS = SQUARE.ravel().tolist()
TWICE = np.array([[0, 1, 2], [0, 2, 3]])
PLY_HEAD = "ply\nformat {}\nelement vertex 4\nproperty float x\nproperty float y\nproperty float z\n"
PLY_FACES = "element face {}\nproperty list uchar int vertex_indices\nend_header\n"
TEXT_PLY = PLY_HEAD.format("ascii 1.0") + PLY_FACES.format(2) + VERTICES + "3 0 1 2\n3 0 2 3\n"
MORE_PLY = (
    "ply\r\nformat ascii 1.0\r\ncomment of nobody\r\nelement camera 1\r\nproperty list int float view\r\n"
    "element vertex 4\r\nproperty uchar red\r\n"
    "property double z\r\nproperty double x\r\nproperty double y\r\n"
    "element face 1\r\nproperty list uchar float uv\r\nproperty list uchar uint vertex_index\r\n"
    "property int part\r\nend_header\r\n2 0.5 0.5\r\n"
    "255 0 0 0\r\n255 0 4 0\r\n255 0 4 3\r\n255 0 0 3\r\n2 0.1 0.2 4 0 1 2 3 7\r\n"
)
TRIANGLES = struct.pack("<B3iB3i", 3, 0, 1, 2, 3, 0, 2, 3)
BINARY_PLY = (PLY_HEAD.format("binary_little_endian 1.0") + PLY_FACES.format(2)).encode() + floats(*CORNERS)
BIG_PLY = (PLY_HEAD.format("binary_big_endian 1.0") + PLY_FACES.format(1)).encode() + (
    floats(*CORNERS, order=">") + struct.pack(">B4i", 4, 0, 1, 2, 3)
)
MIXED_PLY = (PLY_HEAD.format("binary_little_endian 1.0") + PLY_FACES.format(3)).encode() + (
    floats(*CORNERS) + struct.pack("<B2iB3iB3i", 2, 0, 1, 3, 0, 1, 2, 3, 0, 2, 3)
)
TEXT_STL = "solid a\n" + "".join(
    "facet normal 0 0 1\n outer loop\n"
    + "".join(f"  vertex {x:e} {y:e} {z:e}\n" for x, y, z in SQUARE[face])
    + " endloop\nendfacet\n"
    for face in TWICE
)
BINARY_STL = (
    bytes(80)
    + struct.pack("<I", 2)
    + b"".join(floats(0, 0, 1, *SQUARE[face].ravel()) + bytes(2) for face in TWICE)
)
OBJ = "".join(f"v {line}\n" for line in VERTICES.splitlines()) + "f 1 2 3\nf 1 3 4\n"

STRIP_PLY = PLY_HEAD.format("{}") + "element tristrips 1\nproperty list int int vertex_indices\nend_header\n"
COMMENT = "comment a\x0cb\u2028c end_header"

OTHER_FORMATS = {
    "a strip.ply": STRIP_PLY.format("ascii 1.0") + VERTICES + "8 0 1 2 -1 0 2 3 -1",
    "a binary strip.ply": STRIP_PLY.format("binary_little_endian 1.0").encode()
    + floats(*CORNERS)
    + struct.pack("<8i", 7, 0, 1, 2, -1, 0, 2, 3),
    "odd comments.ply": TEXT_PLY.replace("element vertex", f"{COMMENT}\nelement vertex"),
    "CR alone.ply": TEXT_PLY.replace("\n", "\r"),
    "CR alone and binary.ply": BINARY_PLY.replace(b"\n", b"\r") + TRIANGLES,
    "no surface beside.ply": TEXT_PLY.replace(
        "element face", "element material 1\nproperty uchar red\nelement face"
    ).replace("4 0 0\n4 3 0\n0 3 0\n", "4 0 0\n4 3 0\n0 3 0\n7\n"),
    "older name of faces.obj": OBJ.replace("f 1 3 4", "fo 1 3 4"),
    "odd comments.obj": "# a\fv 1 1 1 C:\\\n" + OBJ.replace("f 1 2 3", "f 1 2 3 # b\u2028v 1 1 1"),
    "CR alone.obj": OBJ.replace("\n", "\r"),
    "text.ply": TEXT_PLY,
    "other elements and properties.ply": MORE_PLY,
    "binary.ply": BINARY_PLY + TRIANGLES,
    "big-endian quadrilateral.ply": BIG_PLY,
    "lists of different lengths.ply": MIXED_PLY,
    "plain.obj": OBJ,
    "references.obj": OBJ.replace("f 1 2 3", "f\t1/1 2/5/7 3//9 # a face").replace(
        "f 1 3 4", "f -4 \\\n-2 -1"
    ),
    "a quadrilateral among other lines.obj": "mtllib ../../etc/passwd\no a\nusemtl b\nvn 0 0 1\n"
    + OBJ.replace("f 1 2 3\nf 1 3 4", "s off\nl 1 2\nf 1 2 3 4"),
    "colours.obj": OBJ.replace("v 4 3 0", "v 4 3 0 0.5 0.5 0.5"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_other_formats_read_as_the_plain_file(tmp_path, name):
    path = tmp_path / name
    content = OTHER_FORMATS[name]
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    mesh = read_mesh(path)
    np.testing.assert_array_equal(mesh.vertices, SQUARE)
    first = mesh.faces.argmin(axis=1)[:, None]  # the library begins some triangles at another corner
    np.testing.assert_array_equal(np.take_along_axis(mesh.faces, (first + np.arange(3)) % 3, axis=1), TWICE)


L_SHAPE = ((0, 0), (2, 0), (2, 1), (1, 1), (1, 2), (0, 2))
ARROW = ((0, 0), (3, 3), (0, 1), (-3, 3))
SPIRAL = ((0, 0), (5, 0), (5, 5), (0, 5), (0, 2), (3, 2), (3, 3), (1, 3), (1, 4), (4, 4), (4, 1), (0, 1))
BRIDGED = ((0, 0), (4, 0), (4, 4), (0, 4), (0, 0), (1, 1), (1, 3), (3, 3), (3, 1), (1, 1))  # with a hole
CONCAVE = [(L_SHAPE, 3), (ARROW, 3), (SPIRAL, 17), (BRIDGED, 12)]


@pytest.mark.parametrize("suffix", ["off", "obj", "ply"])
@pytest.mark.parametrize(("polygon", "area"), CONCAVE)
def test_concave_polygons_keep_their_area(tmp_path, suffix, polygon, area):
    """A fan would fold; whichever corner comes first, and in any plane."""
    count = len(polygon)
    turn = np.linalg.qr(np.random.default_rng(count).normal(size=(3, 3)))[0]
    for first in range(count):
        for order in (1, -1):
            corners = np.roll(polygon, first, axis=0)[::order]
            rows = [" ".join(map(repr, row)) for row in (np.pad(corners, ((0, 0), (0, 1))) @ turn).tolist()]
            numbers = " ".join(map(str, range(suffix == "obj", count + (suffix == "obj"))))
            text = {
                "off": f"OFF\n{count} 1 0\n" + "\n".join(rows) + f"\n{count} {numbers}\n",
                "obj": "".join(f"v {row}\n" for row in rows) + f"f {numbers}\n",
                "ply": PLY_HEAD.format("ascii 1.0").replace("vertex 4", f"vertex {count}")
                + PLY_FACES.format(1)
                + "\n".join(rows)
                + f"\n{count} {numbers}\n",
            }[suffix]
            (tmp_path / f"a.{suffix}").write_text(text)
            mesh = read_mesh(tmp_path / f"a.{suffix}")
            a, b, c = np.moveaxis(mesh.vertices[mesh.faces], 1, 0)
            normals = np.cross(b - a, c - a) / 2
            assert len(normals) == count - 2
            assert np.linalg.norm(normals, axis=1).sum() == pytest.approx(area)
            expected = order * area * np.cross(turn[0], turn[1])
            np.testing.assert_allclose(normals.sum(axis=0), expected, atol=1e-9)


STL_FILES = {
    "text.stl": (TEXT_STL + "endsolid a\n").encode(),
    "two solids.STL": (TEXT_STL.replace("endfacet\nfacet", "endfacet\nendsolid a\nsolid b\nfacet")).encode()
    + b"endsolid",
    "names.stl": (
        TEXT_STL.replace("solid a", "solid vertex facet\fendsolid\u2028") + "endsolid vertex facet\n"
    ).encode(),
    "CR alone.stl": (TEXT_STL + "endsolid a\n").replace("\n", "\r").encode(),
    "binary.stl": BINARY_STL,
    "binary that begins with solid.stl": b"solid" + BINARY_STL[5:],
}


@pytest.mark.parametrize("name", STL_FILES)
def test_stl_triangles_have_their_own_corners(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(STL_FILES[name])
    mesh = read_mesh(path)
    np.testing.assert_array_equal(mesh.vertices, SQUARE[TWICE.ravel()])
    np.testing.assert_array_equal(mesh.faces, [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("suffix", ["off", "obj", "ply", "stl", "glb", "3mf"])
def test_files_of_another_program_hold_the_same_triangles(tmp_path, suffix):
    made = trimesh.creation.icosphere(subdivisions=2)
    made.export(tmp_path / f"sphere.{suffix}")
    mesh = read_mesh(tmp_path / f"sphere.{suffix}")
    np.testing.assert_allclose(mesh.vertices[mesh.faces], made.triangles, atol=1e-6)


REFUSED = {
    "a.ply": ("solid", "begin with ply, got 'solid'"),
    "no end.ply": (TEXT_PLY.replace("end_header", ""), "has no end_header"),
    "another format.ply": (
        TEXT_PLY.replace("ascii", "binary_middle_endian"),
        "header line that is not of the PLY format",
    ),
    "no format.ply": (TEXT_PLY.replace("format ascii 1.0\n", ""), "must say its format"),
    "another type.ply": (
        TEXT_PLY.replace("float x", "quad x"),
        "header line that is not of the PLY format: 'property quad",
    ),
    "no x.ply": (
        TEXT_PLY.replace("float x", "float a"),
        "element vertex must have the property x, got 'a, y, z'",
    ),
    "points alone.ply": (
        PLY_HEAD.format("ascii 1.0") + "end_header\n" + VERTICES,
        "no face with three vertices",
    ),
    "vertices twice.ply": (TEXT_PLY.replace("element face", "element vertex"), "one element vertex"),
    "fractions.ply": (TEXT_PLY.replace("uchar int", "uchar float"), "whole numbers"),
    "cut.ply": (TEXT_PLY[:-8], "declares 2 of element face, but only 1 lines follow"),
    "cut in a line.ply": (TEXT_PLY[:-2], "face 1 must list as many values"),
    "a word.ply": (TEXT_PLY.replace("4 3 0", "4 b 0"), "a word where a number must be"),
    "two coordinates.ply": (TEXT_PLY.replace("4 3 0", "4 3"), "too few in a line"),
    "a blank line.ply": (TEXT_PLY.replace("4 3 0\n", "\n") + "\n", "but only 1 lines follow"),
    "counts beyond the file.ply": (
        BINARY_PLY.replace(b"vertex 4", b"vertex 400000000"),
        "declares 400000000 of element vertex, but only 48 bytes follow",
    ),
    "binary and cut.ply": (BINARY_PLY + TRIANGLES[:-1], "declares 2 of element face, but only a part"),
    "a list beyond the file.ply": (BIG_PLY[:-17] + b"\xff" + BIG_PLY[-16:], "only a part of them follows"),
    "another surface.ply": (
        TEXT_PLY.replace(
            "element face 2\nproperty list uchar int vertex_indices",
            "element face 2\nproperty "
            "list uchar int vertex_indices\nelement patch 1\nproperty list uchar int corners",
        )
        + "3 0 1 2\n",
        "has the element patch, which may be surface",
    ),
    "corners by name.ply": (
        TEXT_PLY.replace(
            "element face 2\nproperty list uchar int vertex_indices",
            "element triangle 2\n" + "".join(f"property int {name}\n" for name in "abc").strip(),
        ),
        "has the element triangle, which may be surface",
    ),
    "free-form.obj": (OBJ + "surf 0 1 0 1 1 2 3 4\n", r"has free-form surfaces (surf)"),
    "weights.obj": (OBJ.replace("v 4 3 0", "v 4 3 0 2"), "a fourth coordinate that is not 1: 'v 4 3 0 2'"),
    "another file.obj": (OBJ + "call more.obj\n", "needs another file or program"),
    "unknown lines.obj": (OBJ + "t 1 2 3\n", "may hold surface: 't 1 2 3'"),
    "no triangle.stl": (bytes(84), "no face with three vertices"),
    "empty.obj": ("", "is not an OBJ file"),
    "points alone.obj": ("v 0 0 0\n", "no face with three vertices"),
    "before the first.obj": (OBJ.replace("1 3 4", "1 3 -5"), "face 1 names a vertex before the first"),
    "from 0.obj": (OBJ.replace("1 3 4", "0 1 2"), "face 1 names a vertex before the first, got '0 1 2'"),
    "beyond the last.obj": (OBJ.replace("1 3 4", "1 3 5"), "names a vertex outside 0 to 3"),
    "beyond all counts.obj": (OBJ.replace("1 3 4", "1 3 " + "9" * 30), "names a vertex outside 0 to 3"),
    "a word.obj": (OBJ.replace("f 1 3 4", "f 1 three 4"), "face 1 must list whole numbers, got '1 three 4'"),
    "cut.stl": (TEXT_STL, "is cut short: expected endsolid after 2 facets"),
    "two corners.stl": (
        TEXT_STL.replace("  vertex 0.0", "# 0.0", 1) + "endsolid",
        "facet 0 must have 3 vertices",
    ),
    "no facet.stl": ("solid\nendsolid\n", "no face with three vertices"),
    "binary and cut.stl": (BINARY_STL[:-1], "2 triangles in 184 bytes; got 183 bytes"),
    "another.glb": (OBJ, "is not a GLB file: expected it to begin with glTF, got 'v 0 0 0"),
    "another.3mf": (OBJ, "is not a complete 3MF file (BadZipFile"),
    "another.fbx": (OBJ, "not a mesh file: expected .off, .ply, .obj, .stl, .glb, .gltf, .3mf, got '.fbx'"),
}


def scene_text(scene, **changes):
    """A glTF file with its numbers in it, or as ``changes`` have it."""
    made = trimesh.exchange.gltf.export_gltf(scene, embed_buffers=True)["model.gltf"]
    return json.dumps({**json.loads(made), **changes})


def test_parts_of_a_scene_are_where_the_scene_has_them(tmp_path):
    box, ball = trimesh.creation.box(), trimesh.creation.icosphere(subdivisions=1)
    scene = trimesh.Scene([box, ball])
    scene.add_geometry(box, transform=trimesh.transformations.translation_matrix([5, 0, 0]))
    (tmp_path / "scene.gltf").write_text(scene_text(scene))
    (tmp_path / "scene.glb").write_bytes(scene.export(file_type="glb"))
    for name in ("scene.gltf", "scene.glb"):
        mesh = read_mesh(tmp_path / name)
        assert len(mesh.faces) == 2 * len(box.faces) + len(ball.faces)
        np.testing.assert_allclose(mesh.vertices.max(axis=0), [5.5, 1, 1], atol=0.06)
        found = trimesh.Trimesh(mesh.vertices, mesh.faces)
        assert found.volume == pytest.approx(2 + ball.volume, rel=1e-5)


BOX_SCENE = trimesh.Scene(trimesh.creation.box())
BOX_TEXT = scene_text(BOX_SCENE)
BOX_GLB = BOX_SCENE.export(file_type="glb")
ACCESSORS = json.loads(BOX_TEXT)["accessors"]
MESHES = json.loads(BOX_TEXT)["meshes"]

REFUSED |= {
    "another file.gltf": (
        scene_text(BOX_SCENE, buffers=[{"uri": "../../etc/passwd", "byteLength": 9}] * 2),
        "names another file, '../../etc/passwd', which is not opened",
    ),
    "a decoder.gltf": (scene_text(BOX_SCENE, extensionsRequired=["KHR_draco"]), "needs KHR_draco, which"),
    "another kind of primitives.gltf": (
        scene_text(BOX_SCENE, meshes=[{"primitives": [{**MESHES[0]["primitives"][0], "mode": 7}]}]),
        "has primitives of mode 7",
    ),
    "numbers without bytes.gltf": (
        scene_text(
            BOX_SCENE, accessors=[{"componentType": 5126, "type": "VEC3", "count": 10**9} for _ in ACCESSORS]
        ),
        "declares 2,000,000,000 values",
    ),
    "beyond its bytes.gltf": (
        scene_text(BOX_SCENE, accessors=[{**entry, "count": 3 * entry["count"]} for entry in ACCESSORS]),
        "has values beyond the bytes of its buffer view",
    ),
    "no scene.gltf": ("[]", "is not a complete GLTF file"),
    "cut.glb": (BOX_GLB[:-40], f"declares {len(BOX_GLB)} bytes, but holds {len(BOX_GLB) - 40}"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_files_of_other_formats_are_refused_with_the_reason(tmp_path, name):
    content, reason = REFUSED[name]
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(MeshError) as caught:
        read_mesh(tmp_path / name)
    assert reason in caught.value.reason


def archive_of(model):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("3D/3dmodel.model", model)
    return buffer.getvalue()


def test_packed_files_do_not_unfold_without_end(tmp_path, monkeypatch):
    levels = "".join(
        f'<object id="{n}"><components><component objectid="{n - 1}"/><component objectid="{n - 1}"/>'
        "</components></object>"
        for n in range(2, 41)
    )
    mesh = '<mesh><vertices><vertex x="0" y="0" z="0"/></vertices><triangles/></mesh>'
    build = '<build><item objectid="40"/></build>'
    model = f'<model><resources><object id="1">{mesh}</object>{levels}</resources>{build}</model>'
    path = tmp_path / "repeated.3mf"
    path.write_bytes(archive_of(model))
    with pytest.raises(MeshError, match="repeats its objects more than"):
        read_mesh(path)
    path.write_bytes(archive_of(model.replace('objectid="1"', 'objectid="2"')))
    with pytest.raises(MeshError, match="has object 2 inside of itself"):
        read_mesh(path)
    monkeypatch.setattr(threemf, "LARGEST_CONTENT", len(model) - 1)
    with pytest.raises(MeshError, match=f"unfolds to {len(model):,} bytes"):
        read_mesh(path)


@pytest.mark.parametrize("suffix", [".off", ".ply", ".obj", ".stl", ".glb"])
def test_each_format_written_reads_back(tmp_path, suffix):
    made = trimesh.creation.icosphere(subdivisions=2)
    written = Mesh(1e3 * made.vertices + [4e5, 5e6, 7], made.faces, "ball")
    write_mesh(written, tmp_path / f"ball{suffix}")
    read = read_mesh(tmp_path / f"ball{suffix}")
    digits = {".stl": 1e-4, ".glb": 1e-4}.get(suffix, 0)
    assert len(read.faces) == len(made.faces)
    np.testing.assert_allclose(
        read.vertices[read.faces], written.vertices[written.faces], rtol=0, atol=digits
    )


def test_other_suffixes_are_not_written(tmp_path):
    with pytest.raises(MeshError, match=r"expected \.off, \.ply, \.obj, \.stl, \.glb, got '\.vtk'"):
        write_mesh(Mesh(SQUARE, TWICE, "a"), tmp_path / "a.vtk")

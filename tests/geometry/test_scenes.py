"""3MF and glTF: parts are placed as the file says; what decides a shape and is not understood is refused."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest

from pointproj.geometry.files import parse_mesh
from pointproj.geometry.files.points import read_cloud
from pointproj.geometry.meshes import MeshError

CORNERS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], np.float32)  # of a tetrahedron
FACES = np.array([[0, 2, 1], [0, 1, 3], [0, 3, 2], [1, 2, 3]], np.uint16)


def shape_of(content, name):
    """Number of faces, six times the volume, and the highest corner."""
    mesh = parse_mesh(content, name)
    triangles = mesh.vertices[mesh.faces]
    volume = np.einsum("ij,ij->", triangles[:, 0], np.cross(triangles[:, 1], triangles[:, 2]))
    return len(mesh.faces), round(float(volume), 4), triangles.reshape(-1, 3).max(axis=0).round(4).tolist()


# --- 3MF

PRODUCTION = 'xmlns:p="http://schemas.microsoft.com/3dmanufacturing/production/2015/06"'
AWAY = 'transform="1 0 0 0 1 0 0 0 1 5 0 0"'
MIRROR = 'transform="-1 0 0 0 1 0 0 0 1 0 0 0"'


def solid(number, size=1.0, kind="model", more=""):
    vertices = "".join('<vertex x="{}" y="{}" z="{}"/>'.format(*row) for row in size * CORNERS)
    faces = "".join('<triangle v1="{}" v2="{}" v3="{}"/>'.format(*row) for row in FACES)
    mesh = f"<mesh><vertices>{vertices}</vertices><triangles>{faces}</triangles>{more}</mesh>"
    return f'<object id="{number}" type="{kind}" name="Body{number}">{mesh}</object>'


def group(number, *uses):
    inside = "".join(f"<component objectid={use}/>" for use in uses)
    return f'<object id="{number}" name="Part({number})"><components>{inside}</components></object>'


def model(objects, *items, head=PRODUCTION):
    build = "".join(f"<item objectid={item}/>" for item in items)
    return f"<model {head}><resources>{objects}</resources><build>{build}</build></model>"


def packed(root, **files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in {"3D/3dmodel.model": root, **files}.items():
            archive.writestr(name, text)
    return buffer.getvalue()


OTHER = 'p:path="/3D/Other.model"'
PARTS = {
    "two items": (packed(model(solid(1), '"1"', f'"1" {AWAY}')), (8, 2, [6, 1, 1])),
    "one part number": (
        packed(model(solid(1), '"1" partnumber="a"', f'"1" partnumber="a" {AWAY}')),
        (8, 2, [6, 1, 1]),
    ),
    "bodies of parts": (
        packed(model(solid(1) + solid(2, 2) + group(3, '"1"') + group(4, '"2"'), '"3"', f'"4" {AWAY}')),
        (8, 9, [7, 2, 2]),
    ),
    "one id in two files": (
        packed(model(solid(1, 2), '"1"', f'"1" {OTHER} {AWAY}'), **{"3D/other.model": model(solid(1))}),
        (8, 9, [6, 2, 2]),
    ),
    "components of another file": (
        packed(
            model(group(9, f'"2" {OTHER}', f'"1" {OTHER}'), '"9"'),
            **{"3D/Other.model": model(solid(1) + group(2, f'"1" {AWAY}'), '"1"')},
        ),
        (8, 2, [6, 1, 1]),
    ),
    "a mirrored part": (packed(model(solid(1), f'"1" {MIRROR}')), (4, 1, [0, 1, 1])),
    "the root that the package names": (
        packed(
            model(solid(1, 3), '"1"'),
            **{
                "3D/real.model": model(solid(1), '"1"'),
                "_rels/.rels": '<Relationships><Relationship Target="/3D/real.model" Type="http://schemas.'
                'microsoft.com/3dmanufacturing/2013/01/3dmodel"/></Relationships>',
            },
        ),
        (4, 1, [1, 1, 1]),
    ),
    "an unused object": (packed(model(solid(1) + solid(2, 2), '"1"')), (4, 1, [1, 1, 1])),
}

CURA = '<metadatagroup><metadata name="cura:infill_mesh">{}</metadata></metadatagroup>'
PARTS |= {
    "a setting of Cura that is off": (
        packed(model(solid(1).replace("<mesh>", CURA.format("False") + "<mesh>"), '"1"')),
        (4, 1, [1, 1, 1]),
    ),
    "a path with dots": (
        packed(model("", '"1" p:path="/3D/../3D/other.model"'), **{"3D/other.model": model(solid(1))}),
        (4, 1, [1, 1, 1]),
    ),
}

UNCLEAR = {
    "an object that is not there": (
        packed(model(solid(1), '"2"')),
        "uses object 2, which .* does not define",
    ),
    "a file that is not there": (
        packed(model(solid(1), f'"1" {OTHER}')),
        "'/3d/other.model', which it does not",
    ),
    "support": (packed(model(solid(1, kind="support"), '"1"')), "type 'support'"),
    "a modifier": (
        packed(model(solid(1) + solid(2, kind="other") + group(3, '"1"', '"2"'), '"3"')),
        "'other'",
    ),
    "a lattice": (packed(model(solid(1, more="<beamlattice/>"), '"1"')), "has beamlattice in object 1"),
    "another shape": (
        packed(model('<object id="1"><booleanshape/></object>', '"1"')),
        "made of booleanshape",
    ),
    "an extension": (
        packed(model(solid(1), '"1"', head='xmlns:v="urn:volumes" requiredextensions="v"')),
        "needs the extension 'urn:volumes'",
    ),
    "a setting of Cura": (
        packed(model(solid(1).replace("<mesh>", CURA.format("True") + "<mesh>"), '"1"')),
        "object 1, a infill_mesh, which is no part",
    ),
    "a modifier of a slicer": (
        packed(
            model(solid(1), '"1"'),
            **{"Metadata/a.config": "<metadata value='1' type='volume' key='modifier'/>"},
        ),
        "has parts that are no solid",
    ),
    "other units": (
        packed(model(solid(1), f'"1" {OTHER}'), **{"3D/other.model": model(solid(1), head='unit="inch"')}),
        "in inch and in millimeter",
    ),
    "one id twice": (packed(model(solid(1) + solid(1), '"1"')), "defines object 1 twice"),
    "no build": (packed(model(solid(1))), "builds nothing"),
    "volumes of a slicer": (
        packed(model(solid(1), '"1"'), **{"Metadata/a.config": '<metadata value="NegativeVolume"/>'}),
        r"no solid \(NegativeVolume in Metadata/a.config\)",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_3mf_file_has_each_part_where_its_build_has_it(name):
    content, expected = PARTS[name]
    assert shape_of(content, "a.3mf") == expected


# --- glTF


TYPES = {"float32": 5126, "uint16": 5123, "uint8": 5121, "int16": 5122}


class Glb:
    """A file with the tetrahedron, made entry by entry."""

    def __init__(self, positions=CORNERS, faces=FACES, mode=4, **accessor):
        self.binary, self.views, self.accessors = b"", [], []
        self.primitive = {"attributes": {"POSITION": self.add(positions, "VEC3", **accessor)}, "mode": mode}
        if faces is not None:
            self.primitive["indices"] = self.add(np.ravel(faces), "SCALAR")

    def view(self, array):
        self.binary += b"\0" * (-len(self.binary) % 4)
        self.views.append({"buffer": 0, "byteOffset": len(self.binary), "byteLength": array.nbytes})
        self.binary += array.tobytes()
        return len(self.views) - 1

    def add(self, array, kind, **more):
        entry = {"componentType": TYPES[str(array.dtype)], "count": len(array), "type": kind, **more}
        self.accessors.append({**entry, "bufferView": self.view(array)})
        return len(self.accessors) - 1

    def content(self, *nodes, roots=(0,), **more):
        document = {
            **{"asset": {"version": "2.0"}, "scenes": [{"nodes": roots}], "nodes": nodes},
            **{"meshes": [{"primitives": [self.primitive]}], "buffers": [{"byteLength": len(self.binary)}]},
            **{"bufferViews": self.views, "accessors": self.accessors, **more},
        }
        text = json.dumps(document).encode()
        text += b" " * (-len(text) % 4)
        chunks = struct.pack("<I4s", len(text), b"JSON") + text
        chunks += struct.pack("<I4s", len(self.binary), b"BIN\0") + self.binary
        return struct.pack("<4sII", b"glTF", 2, 12 + len(chunks)) + chunks


def sparse():
    made = Glb()
    indices = {"bufferView": made.view(np.array([3], np.uint8)), "componentType": 5121}
    values = {"bufferView": made.view(np.array([[0, 0, 5]], np.float32))}
    made.accessors[0]["sparse"] = {"count": 1, "indices": indices, "values": values}
    return made.content({"mesh": 0})


def instances():
    made = Glb()
    attributes = {
        "TRANSLATION": made.add(np.array([[0, 0, 0], [5, 0, 0]], np.float32), "VEC3"),
        "SCALE": made.add(np.array([[1, 1, 1], [-2, 2, 2]], np.float32), "VEC3"),
    }
    return made.content({"mesh": 0, "extensions": {"EXT_mesh_gpu_instancing": {"attributes": attributes}}})


def morphed(**weights):
    made = Glb()
    made.primitive["targets"] = [
        {"POSITION": made.add(np.array([[0, 0, 0]] * 3 + [[0, 0, 4]], "f4"), "VEC3")}
    ]
    return made.content({"mesh": 0, **weights})


def skinned(matrix, weight=255):
    made = Glb()
    made.primitive["attributes"] |= {
        "JOINTS_0": made.add(np.zeros((4, 4), np.uint8), "VEC4"),
        "WEIGHTS_0": made.add(np.array([[weight, 0, 0, 0]] * 4, np.uint8), "VEC4", normalized=True),
    }
    bind = made.add(np.diag([2, 2, 2, 1]).astype("f4").reshape(1, 16), "MAT4")
    skins = [{"joints": [1], "inverseBindMatrices": bind}]
    nodes = {"mesh": 0, "skin": 0, "translation": [9, 9, 9]}, {"children": [2], "scale": matrix}, {}
    return made.content(*nodes, roots=(0, 1), skins=skins)


def plain(node, *more, **document):
    return Glb().content({"mesh": 0, **node}, *more, **document)


QUARTER = {"rotation": [0, 0, 0.5**0.5, 0.5**0.5]}  # of a turn about z
SHORTS = np.round(32767 * CORNERS).astype(np.int16)
SCENES = {
    "scaled": (plain({"scale": [2, 1, 1]}), (4, 2, [2, 1, 1])),
    "turned below a moved node": (
        plain(QUARTER, {"children": [0], "translation": [3, 0, 0]}, roots=(1,)),
        (4, 1, [3, 1, 1]),
    ),
    "a matrix": (plain({"matrix": [1, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1, 0, 7, 0, 0, 1]}), (4, 2, [8, 2, 1])),
    "mirrored": (plain({"scale": [-1, 1, 1]}), (4, 1, [0, 1, 1])),
    "a camera's node": (plain({"camera": 0}, cameras=[{"type": "perspective"}]), (4, 1, [1, 1, 1])),
    "below a camera": (
        plain({}, {"camera": 0, "children": [0], "translation": [3, 0, 0]}, roots=(1,)),
        (4, 1, [4, 1, 1]),
    ),
    "sparse": (sparse(), (4, 5, [1, 1, 5])),
    "instances, one mirrored": (instances(), (8, 9, [5, 2, 2])),
    "weights of the node": (morphed(weights=[0.5]), (4, 3, [1, 1, 3])),
    "no weights": (morphed(), (4, 1, [1, 1, 1])),
    "a skin": (skinned([5, 5, 5]), (4, 1000, [10, 10, 10])),
    "a mirrored skin": (skinned([-1, 1, 1]), (4, 8, [0, 2, 2])),
    "normalised shorts": (Glb(SHORTS, normalized=True).content({"mesh": 0}), (4, 1, [1, 1, 1])),
    "lowest shorts": (
        Glb(np.where(CORNERS > 0, -(2**15), 0).astype("i2"), normalized=True).content({"mesh": 0}),
        (4, -1, [0, 0, 0]),
    ),
    "plain shorts": (
        Glb(7 * CORNERS.astype(np.int16)).content({"mesh": 0}, extensionsRequired=["KHR_mesh_quantization"]),
        (4, 343, [7, 7, 7]),
    ),
    "a strip": (
        Glb(faces=np.array([0, 2, 1, 3, 0, 2], np.uint16), mode=5).content({"mesh": 0}),
        (4, 1, [1, 1, 1]),
    ),
    "a fan": (
        Glb(faces=np.array([3, 0, 1, 2, 0], np.uint16), mode=6).content({"mesh": 0}),
        (3, 1, [1, 1, 1]),
    ),
    "without indices": (Glb(CORNERS[FACES.ravel()], None).content({"mesh": 0}), (4, 1, [1, 1, 1])),
    "metadata": (plain({}, extensionsRequired=["KHR_xmp_json_ld"]), (4, 1, [1, 1, 1])),
    "the default of two scenes": (
        plain({}, {"mesh": 0, "scale": [3, 3, 3]}, scene=1, scenes=[{"nodes": [0]}, {"nodes": [1]}]),
        (4, 27, [3, 3, 3]),
    ),
    "no scenes": (plain({}, scenes=[]), (4, 1, [1, 1, 1])),
}

UNCLEAR_SCENES = {
    "an extension of an accessor": (
        Glb(extensions={"ACME_pack": {}}).content({"mesh": 0}),
        "needs ACME_pack",
    ),
    "indices with fractions": (Glb(faces=FACES.astype("f4")).content({"mesh": 0}), "no whole numbers"),
    "an extension of a node": (plain({"extensions": {"ACME_bend": {}}}), "needs ACME_bend"),
    "an extension of the file": (plain({}, extensions={"CESIUM_RTC": {}}), "needs CESIUM_RTC"),
    "a hidden node": (plain({"extensions": {"KHR_node_visibility": {"visible": False}}}), "hides node 0"),
    "two scenes": (plain({}, scenes=[{"nodes": [0]}, {"nodes": [0]}]), "2 scenes and no default"),
    "a node below two": (plain({}, {"children": [0]}, {"children": [0]}, roots=(1, 2)), "below two nodes"),
    "a node below itself": (
        plain({}, {"children": [1], "mesh": 0}, roots=(0, 1)),
        "has node 1 below itself|twice",
    ),
    "half a skin": (skinned([1, 1, 1], 120), "joints whose sum is not 1"),
    "no rotation": (plain({"rotation": [0, 0, 0, 0]}), "no unit quaternion"),
    "version 1": (plain({}, asset={"version": "1.0"}), "of version '1.0'"),
    "a face too far": (Glb(faces=FACES + np.uint16(1)).content({"mesh": 0}), "outside 0 to 3"),
}


@pytest.mark.parametrize("name", SCENES)
def test_a_gltf_file_has_the_shape_that_it_describes(name):
    content, expected = SCENES[name]
    assert shape_of(content, "a.glb") == expected


@pytest.mark.parametrize("name", [*UNCLEAR, *UNCLEAR_SCENES])
def test_what_a_scene_needs_and_is_not_understood_is_refused_by_name(name):
    content, reason = (UNCLEAR | UNCLEAR_SCENES)[name]
    with pytest.raises(MeshError, match=reason):
        parse_mesh(content, f"a.{'3mf' if name in UNCLEAR else 'glb'}")


def test_points_of_a_gltf_file_are_a_cloud_and_lines_are_not(tmp_path):
    made = Glb(CORNERS, None, mode=0)
    made.primitive["attributes"]["NORMAL"] = made.add(np.array([[1, 1, 0]] * 4, np.float32), "VEC3")
    (tmp_path / "a.glb").write_bytes(made.content({"mesh": 0, "scale": [2, 1, 1], "translation": [5, 0, 0]}))
    cloud = read_cloud(tmp_path / "a.glb", 4)
    assert cloud.placement.centre.tolist() == [6, 0.5, 0.5]
    np.testing.assert_allclose(cloud.normals, [[0.2**0.5, 0.8**0.5, 0]] * 4, atol=1e-6)
    (tmp_path / "a.glb").write_bytes(Glb(CORNERS, None, mode=3).content({"mesh": 0}))
    with pytest.raises(MeshError, match="holds lines"):
        read_cloud(tmp_path / "a.glb", 4)

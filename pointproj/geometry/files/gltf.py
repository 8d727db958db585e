"""glTF and GLB: the meshes and points of the default scene, placed by its nodes.

Instances (EXT_mesh_gpu_instancing), skins and morph weights are applied as they stand; animations are not
played. An extension of anything that decides the shape is refused by name, unless it is known to leave the
shape alone.

Specification: glTF 2.0, sections 3.5 (scenes) and 3.7 (meshes).
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.files.gltf_data import Document, read_glb, write_glb
from pointproj.geometry.files.origin import float32_origin
from pointproj.geometry.files.polygons import strip
from pointproj.geometry.files.text import SHOWN, Content, FormatError, joined, placed

LARGEST_SCENE = 1 << 26
"""Most faces, or points, of a scene that repeats its parts."""

_INSTANCES = "EXT_mesh_gpu_instancing"
_VISIBILITY = "KHR_node_visibility"

# Extensions that leave the shape alone, or that are understood.
_HARMLESS = re.compile(
    r"(KHR|EXT|MSFT|ADOBE|NV)_(materials|texture|lights|image)_\w+|KHR_(xmp|xmp_json_ld|mesh_quantization"
    r"|animation_pointer|node_selectability|node_hoverability)|EXT_(mesh_features"
    r"|structural_metadata|instance_features|mesh_manifold)|MSFT_lod|CESIUM_primitive_outline"
    rf"|FB_geometry_metadata|{_INSTANCES}|{_VISIBILITY}"
)

_POINTS, _LINES, _TRIANGLES, _STRIP, _FAN = 0, (1, 2, 3), 4, 5, 6


class _Shape(NamedTuple):
    """A primitive before it is placed."""

    points: Float[np.ndarray, "V 3"]
    faces: Int[np.ndarray, "F 3"]
    normals: Float[np.ndarray, "V 3"] | None
    mode: int


def parse_glb(content: bytes) -> Content:
    """Return the triangles of a GLB file, or its points if there are none; FormatError if it is damaged."""
    return _content(read_glb(content))


def parse(content: bytes) -> Content:
    """Return the triangles of a glTF file, or its points; FormatError if it is damaged or names a file."""
    return _content(Document(content, None))


def _content(document: Document) -> Content:
    version = str(document.json.get("asset", {}).get("version", ""))
    if not version.startswith("2."):
        raise FormatError(f"is of version {version[:SHOWN]!r} of glTF: expected 2.0")
    for name in document.json.get("extensionsRequired", []):
        _check_extension(name)
    _check_extensions(document.json)
    shapes = list(_Scene(document).shapes())
    surfaces = [(shape.points, shape.faces) for shape in shapes if shape.mode >= _TRIANGLES]
    clouds = [shape for shape in shapes if shape.mode == _POINTS]
    if surfaces:
        note = f"{sum(len(cloud.points) for cloud in clouds)} points beside the surface are left out"
        return Content(*joined(surfaces), notes=(note,) if clouds else ())
    if not clouds:
        return Content(np.concatenate([np.empty((0, 3)), *(each.points for each in shapes)]), other="lines")
    left = ("lines beside the points are left out",) if len(clouds) < len(shapes) else ()
    normals = [cloud.normals for cloud in clouds if cloud.normals is not None]
    whole = np.concatenate(normals) if len(normals) == len(clouds) else None
    return Content(np.concatenate([cloud.points for cloud in clouds]), normals=whole, notes=left)


def _check_extensions(entry: dict[str, Any]) -> None:
    for name in entry.get("extensions", {}):
        _check_extension(name)


def _check_extension(name: str) -> None:
    if not _HARMLESS.fullmatch(name):
        raise FormatError(f"needs {name[:SHOWN]}, which is not understood: write it as plain triangles")


class _Scene:
    """The default scene: where its nodes are, and what they show."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._places: dict[int, Float[np.ndarray, "4 4"]] = {}
        self._shown = 0
        children = [child for node in document.entries("nodes") for child in node.get("children", [])]
        if len(set(children)) < len(children):
            raise FormatError("has a node below two nodes")
        above = {c: i for i, node in enumerate(document.entries("nodes")) for c in node.get("children", [])}
        self._parents = above

    def shapes(self) -> Iterator[_Shape]:
        """Yield the primitives of all nodes of the scene, placed."""
        document, seen = self._document, set()
        stack = self._roots()[::-1]
        while stack:
            index = stack.pop()
            node = document.entry("nodes", index)
            if index in seen:
                raise FormatError(f"has node {index} twice in its scene")
            seen.add(index)
            _check_extensions(node)
            if not node.get("extensions", {}).get(_VISIBILITY, {}).get("visible", True):
                raise FormatError(f"hides node {index}: leave it out, or show it")
            stack += node.get("children", [])[::-1]
            if "mesh" in node:
                yield from self._mesh(index, node)

    def _roots(self) -> list[int]:
        document = self._document
        scenes = document.entries("scenes")
        if not scenes:
            return [index for index in range(len(document.entries("nodes"))) if index not in self._parents]
        if "scene" not in document.json and len(scenes) > 1:
            raise FormatError(f"has {len(scenes)} scenes and no default: write one")
        scene = document.entry("scenes", document.json.get("scene", 0))
        _check_extensions(scene)
        return list(scene.get("nodes", []))

    def _place(self, index: int) -> Float[np.ndarray, "4 4"]:
        """Return the place of a node in the world."""
        chain, at = [], index
        while at is not None and at not in self._places:
            if at in chain:
                raise FormatError(f"has node {at} below itself")
            chain.append(at)
            at = self._parents.get(at)
        for each in reversed(chain):
            local = _local_place(self._document.entry("nodes", each))
            parent = self._parents.get(each)
            self._places[each] = local if parent is None else self._places[parent] @ local
        return self._places[index]

    def _mesh(self, index: int, node: dict[str, Any]) -> Iterator[_Shape]:
        """Yield the primitives of a node's mesh, once for each of its instances."""
        mesh = self._document.entry("meshes", node["mesh"])
        _check_extensions(mesh)
        weights = node.get("weights", mesh.get("weights", []))
        instances = node.get("extensions", {}).get(_INSTANCES)
        if instances is not None and "skin" in node:
            raise FormatError(f"has instances of a skin in node {index}, which are not understood")
        places = [self._place(index)] if instances is None else self._instances(index, instances)
        for primitive in mesh["primitives"]:
            shape = self._primitive(primitive, weights)
            self._shown += max(len(shape.faces), len(shape.points)) * len(places)
            if self._shown > LARGEST_SCENE:
                raise FormatError(f"repeats its parts to more than {LARGEST_SCENE:,} faces")
            if "skin" in node:
                yield self._skinned(shape, primitive["attributes"], node["skin"])
            else:
                yield from (_placed(shape, place) for place in places)

    def _instances(self, index: int, instances: dict[str, Any]) -> list[Float[np.ndarray, "4 4"]]:
        kinds = {"TRANSLATION": "VEC3", "ROTATION": "VEC4", "SCALE": "VEC3"}
        given = {
            name: self._document.array(accessor, kinds[name])
            for name, accessor in instances.get("attributes", {}).items()
            if name in kinds
        }
        if len({len(values) for values in given.values()}) != 1:
            raise FormatError(
                f"must give as many rotations and scales as places of instances, in node {index}"
            )
        count = len(next(iter(given.values())))
        keys = {name: name.lower() for name in given}
        rows = ({keys[name]: values[row].tolist() for name, values in given.items()} for row in range(count))
        return [self._place(index) @ _local_place(row) for row in rows]

    def _primitive(self, primitive: dict[str, Any], weights: list[float]) -> _Shape:
        """Return the points and faces of a primitive, with its morph targets."""
        document = self._document
        compressed = "KHR_draco_mesh_compression"  # optional if the accessors have the values too
        extensions = {name: None for name in primitive.get("extensions", {}) if name != compressed}
        _check_extensions({"extensions": extensions})
        attributes, mode = primitive["attributes"], primitive.get("mode", _TRIANGLES)
        if "POSITION" not in attributes:
            raise FormatError("has a primitive without positions")
        if mode not in (_POINTS, *_LINES, _TRIANGLES, _STRIP, _FAN):
            raise FormatError(f"has primitives of mode {mode}: expected 0 to 6")
        used = [attributes["POSITION"], *([primitive["indices"]] if "indices" in primitive else [])]
        accessors = [document.entry("accessors", each) for each in used]
        if compressed in primitive.get("extensions", {}) and any("bufferView" not in a for a in accessors):
            _check_extension(compressed)
        points = document.array(attributes["POSITION"], "VEC3").astype(np.float64)
        targets = primitive.get("targets", [])
        if len(weights) not in (0, len(targets)):
            raise FormatError(f"has {len(weights)} weights of {len(targets)} morph targets")
        for weight, target in zip(weights, targets, strict=False):
            if weight and "POSITION" in target:
                points = points + weight * document.array(target["POSITION"], "VEC3")
        indices = np.arange(len(points))
        if "indices" in primitive:
            indices = document.array(primitive["indices"], "SCALAR")[:, 0]
            if indices.dtype.kind == "f":
                raise FormatError("has indices that are no whole numbers")
        if mode == _POINTS:
            if len(indices) and not 0 <= indices.min() <= indices.max() < len(points):
                raise FormatError(f"has a point outside 0 to {len(points) - 1}")
            normals = document.array(attributes["NORMAL"], "VEC3") if "NORMAL" in attributes else None
            normals = None if normals is None or any(weights) else normals[indices]
            return _Shape(points[indices], np.empty((0, 3), np.int64), normals, mode)
        return _Shape(points, _triangles(indices, mode), None, mode)

    def _skinned(self, shape: _Shape, attributes: dict[str, int], number: int) -> _Shape:
        """Return a shape moved by the joints of its skin; the place of its own node does not count."""
        skin = self._document.entry("skins", number)
        if shape.mode == _POINTS:
            raise FormatError("has a skin of points, which is not understood")
        joints = np.stack([self._place(joint) for joint in skin["joints"]])
        if "inverseBindMatrices" in skin:
            bind = self._document.array(skin["inverseBindMatrices"], "MAT4")
            joints = joints @ bind[: len(joints)].reshape(-1, 4, 4).swapaxes(1, 2)
        blended = np.zeros((len(shape.points), 4, 4))
        sets = sorted(name for name in attributes if name.startswith("JOINTS_"))
        if not sets:
            raise FormatError("has a skin without joints of its vertices")
        for name in sets:
            weights = self._document.array(attributes[name.replace("JOINTS", "WEIGHTS")], "VEC4")
            rows = self._document.array(attributes[name], "VEC4")
            used = weights != 0
            if used.any() and not 0 <= rows[used].min() <= rows[used].max() < len(joints):
                raise FormatError(f"has a vertex of a joint outside 0 to {len(joints) - 1}")
            rows = np.where(used, rows, 0)
            for column in range(4):
                blended += weights[:, column, None, None] * joints[rows[:, column]]
        total = blended[:, 3:, 3:]  # of the weights
        if not (np.abs(total - 1) < 0.05).all():
            raise FormatError("has weights of joints whose sum is not 1")
        blended /= total
        moved = np.einsum("vij,vj->vi", blended[:, :3, :3], shape.points) + blended[:, :3, 3]
        mirrored = np.linalg.det(blended[:, :3, :3]) < 0
        if mirrored.any() and not mirrored.all():
            raise FormatError("has a skin that mirrors a part of its mesh, which is not understood")
        faces = shape.faces[:, ::-1] if mirrored.any() else shape.faces
        return _Shape(moved, faces, None, shape.mode)


def _placed(shape: _Shape, place: Float[np.ndarray, "4 4"]) -> _Shape:
    points, faces = placed(shape.points, shape.faces, place)
    if shape.normals is None:
        return _Shape(points, faces, None, shape.mode)
    try:
        normals = shape.normals @ np.linalg.inv(place[:3, :3])
    except np.linalg.LinAlgError:
        raise FormatError("has points in a node whose scale is 0") from None
    return _Shape(points, faces, normals, shape.mode)


def _triangles(indices: Int[np.ndarray, " n"], mode: int) -> Int[np.ndarray, "F 3"]:
    """Return the triangles of a primitive's indices, oriented as the first one."""
    if mode == _TRIANGLES:
        if len(indices) % 3:
            raise FormatError(f"has triangles of {len(indices)} corners: expected a multiple of 3")
        return indices.reshape(-1, 3)
    if mode in _LINES or len(indices) < 3:
        return np.empty((0, 3), np.int64)
    if mode == _FAN:
        first = np.full(len(indices) - 2, indices[0])
        return np.stack([indices[1:-1], indices[2:], first], axis=1)
    return strip(indices)


def _local_place(node: dict[str, Any]) -> Float[np.ndarray, "4 4"]:
    """Return the matrix of a node relative to the node above it."""
    if "matrix" in node:
        matrix = np.array(node["matrix"], np.float64).reshape(4, 4).T
        if not np.array_equal(matrix[3], [0, 0, 0, 1]):
            raise FormatError("has a node whose matrix is not affine")
    else:
        matrix = np.eye(4)
        x, y, z, w = _unit(node.get("rotation", (0, 0, 0, 1)))
        matrix[:3, :3] = [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
        matrix[:3, :3] *= np.array(node.get("scale", (1, 1, 1)), np.float64)
        matrix[:3, 3] = node.get("translation", (0, 0, 0))
    if not np.isfinite(matrix).all():
        raise FormatError("has a node whose place is not finite")
    return matrix


def _unit(rotation: Any) -> Float[np.ndarray, " 4"]:
    quaternion = np.array(rotation, np.float64)
    length = np.linalg.norm(quaternion)
    if not abs(length - 1) < 0.05:  # stored with few digits, or as 8-bit numbers
        raise FormatError(f"has a rotation that is no unit quaternion: {rotation!s:.{SHOWN}}")
    return quaternion / length


def dump(vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"]) -> bytes:
    """Return the content of a GLB file.

    Positions have single precision. Those far from the origin are relative to a place near them, which the
    node holds in double precision.
    """
    origin = float32_origin(vertices)
    local = (vertices - origin).astype("<f4")
    corners = faces.astype("<u4")
    views = [local.tobytes(), corners.tobytes()]
    document = {
        "asset": {"version": "2.0", "generator": "pointproj"},
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0, **({"translation": origin.tolist()} if origin.any() else {})}],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}, "indices": 1}]}],
        "buffers": [{"byteLength": sum(map(len, views))}],
        "bufferViews": [
            {"buffer": 0, "byteOffset": 0, "byteLength": len(views[0]), "target": 34962},
            {"buffer": 0, "byteOffset": len(views[0]), "byteLength": len(views[1]), "target": 34963},
        ],
        "accessors": [
            {
                **{"bufferView": 0, "componentType": 5126, "count": len(local), "type": "VEC3"},
                **{"min": local.min(axis=0).tolist(), "max": local.max(axis=0).tolist()},
            },
            {"bufferView": 1, "componentType": 5125, "count": corners.size, "type": "SCALAR"},
        ],
    }
    return write_glb(document, b"".join(views))

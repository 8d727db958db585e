"""The formats that trimesh reads and writes, with checks before and after.

Trimesh is told to merge no vertices and to open no second file. The counts that it read are compared with
those that the file declares.
"""

import io
import warnings
from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float, Int

from pointproj.geometry.files import checks
from pointproj.geometry.files.text import Checked, Content, FormatError

CHECKS: dict[str, Callable[[bytes], Checked]] = {
    ".obj": checks.obj,
    ".stl": checks.stl,
    ".glb": checks.glb,
    ".gltf": checks.gltf,
    ".3mf": checks.threemf,
}

_SCENES = (".glb", ".gltf", ".3mf")  # formats that give each part a place

_LARGEST_SCENE = 1 << 26  # most faces of a scene that repeats its parts

# Warnings of numpy: it stops reading at a word that is no number, or misreads a number that is too large.
_SILENT_LOSS = "string or file could not be read|invalid value encountered in cast"

Part = tuple[Float[np.ndarray, "V 3"], Int[np.ndarray, "F 3"], Float[np.ndarray, "V 3"] | None]


def parse(content: bytes, suffix: str) -> Content:
    """Read the content of a file whose suffix is in :data:`CHECKS`; polygons become fans of triangles.

    Points give no faces. Raises FormatError if the file is damaged, names another file, or declares counts
    that its content does not have.
    """
    try:
        declared = CHECKS[suffix](content)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", _SILENT_LOSS)
            read = _scene_parts if suffix in _SCENES else _file_parts
            parts = list(read(declared.content, suffix))
    except FormatError:
        raise
    except Warning:
        raise FormatError("holds a word where a number must be, or a number that is too large") from None
    except Exception as error:  # damaged files raise errors of many kinds
        reason = f"is not a complete {suffix[1:].upper()} file ({type(error).__name__}: {error})"
        raise FormatError(reason) from error
    for index, what in ((1, "triangles"), (0, "vertices")):
        found, wanted = sum(len(part[index]) for part in parts), getattr(declared, what)
        if wanted is not None and found != wanted:
            raise FormatError(f"declares {wanted} {what}, but only {found} could be read")
    return _joined(parts)


class _NoSecondFile:
    """Given to the library to open the files that a file names; refuses each of them."""

    def get(self, name: str) -> bytes:
        raise FormatError(f"names another file, {name[:80]!r}, which is not opened: write it as one file")

    __getitem__ = get


def _file_parts(content: bytes, suffix: str) -> Iterator[Part]:
    """Yield the solids of a file."""
    from trimesh.exchange.load import mesh_loaders
    from trimesh.geometry import triangulate_quads

    how = {"skip_materials": True, "maintain_order": True, "fix_texture": False}
    loaded = mesh_loaders[suffix[1:]](io.BytesIO(content), resolver=_NoSecondFile(), **how)
    for part in loaded.get("geometry", {"": loaded}).values():
        faces = triangulate_quads(part.get("faces") if part.get("faces") is not None else [])
        yield np.asarray(part["vertices"], np.float64), faces.reshape(-1, 3), part.get("vertex_normals")


def _scene_parts(content: bytes, suffix: str) -> Iterator[Part]:
    """Yield the parts of a scene, each placed where the scene places it."""
    import trimesh

    how = {"resolver": _NoSecondFile(), "skip_materials": True, "process": False}
    scene = trimesh.load_scene(io.BytesIO(content), file_type=suffix[1:], **how)
    places = [scene.graph[node] for node in scene.graph.nodes_geometry]
    shapes = [(scene.geometry[name], place) for place, name in places]
    shapes = [(shape, place) for shape, place in shapes if isinstance(shape, trimesh.Trimesh)]
    if sum(len(shape.faces) for shape, _ in shapes) > _LARGEST_SCENE:
        raise FormatError(f"repeats its parts to more than {_LARGEST_SCENE:,} faces")
    for shape, place in shapes:
        yield trimesh.transform_points(shape.vertices, place), shape.faces, None


def _joined(parts: list[Part]) -> Content:
    """Put all parts into one list of vertices and one of faces."""
    for vertices, faces, _ in parts:  # checked first: once joined, an index could name another part's vertex
        if len(faces) and not 0 <= faces.min() <= faces.max() < len(vertices):
            raise FormatError(f"has a face that names a vertex outside 0 to {len(vertices) - 1}")
    counts = np.cumsum([0, *(len(vertices) for vertices, _, _ in parts)])
    none = np.empty((0, 3))
    vertices = np.concatenate([none, *(vertices for vertices, _, _ in parts)])
    shifted = (faces + start for (_, faces, _), start in zip(parts, counts, strict=False))
    faces = np.concatenate([none.astype(np.int64), *shifted])
    return Content(vertices, faces, parts[0][2] if len(parts) == 1 else None)


def dump(vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"], suffix: str) -> bytes:
    """Return the content of an OBJ, STL or GLB file; STL and GLB have single precision."""
    import trimesh

    mesh = trimesh.Trimesh(vertices, faces, process=False)
    options = {"digits": 12, "header": None} if suffix == ".obj" else {}
    content = mesh.export(file_type=suffix[1:], **options)
    return content.encode() if isinstance(content, str) else content

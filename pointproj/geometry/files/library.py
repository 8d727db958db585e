"""The formats that trimesh reads and writes, between checks of ours.

It merges no vertices here, opens no second file, and what it read is compared with what the file declares.
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

_SCENES = (".glb", ".gltf", ".3mf")  # whose parts lie somewhere each

_LARGEST_SCENE = 1 << 26  # faces, where a scene repeats its parts

# Numpy stops at a word that is no number, and turns a number that is too large into another, with a warning.
_SILENT_LOSS = "string or file could not be read|invalid value encountered in cast"

Part = tuple[Float[np.ndarray, "V 3"], Int[np.ndarray, "F 3"], Float[np.ndarray, "V 3"] | None]


def parse(content: bytes, suffix: str) -> Content:
    """Read the content of a file of one of :data:`CHECKS`, polygons cut into fans; points have no faces.

    A FormatError says that it is no whole file of its format, names another file, or gives other counts than
    it declares.
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
    except Exception as error:  # there are as many as ways to be damaged
        reason = f"is no whole {suffix[1:].upper()} file ({type(error).__name__}: {error})"
        raise FormatError(reason) from error
    for index, what in ((1, "triangles"), (0, "vertices")):
        found, wanted = sum(len(part[index]) for part in parts), getattr(declared, what)
        if wanted is not None and found != wanted:
            raise FormatError(f"declares {wanted} {what}, of which {found} could be read")
    return _joined(parts)


class _NoSecondFile:
    """What the library asks for files that a file names."""

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
    """Yield the parts of a scene, each where the scene has it."""
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
    for vertices, faces, _ in parts:  # before an index can mean a vertex of the next part
        if len(faces) and not 0 <= faces.min() <= faces.max() < len(vertices):
            raise FormatError(f"has a face that names a vertex outside 0 to {len(vertices) - 1}")
    counts = np.cumsum([0, *(len(vertices) for vertices, _, _ in parts)])
    none = np.empty((0, 3))
    vertices = np.concatenate([none, *(vertices for vertices, _, _ in parts)])
    shifted = (faces + start for (_, faces, _), start in zip(parts, counts, strict=False))
    faces = np.concatenate([none.astype(np.int64), *shifted])
    return Content(vertices, faces, parts[0][2] if len(parts) == 1 else None)


def dump(vertices: Float[np.ndarray, "V 3"], faces: Int[np.ndarray, "F 3"], suffix: str) -> bytes:
    """Content of an OBJ file, or of an STL or GLB file: these two hold single precision."""
    import trimesh

    mesh = trimesh.Trimesh(vertices, faces, process=False)
    options = {"digits": 12, "header": None} if suffix == ".obj" else {}
    content = mesh.export(file_type=suffix[1:], **options)
    return content.encode() if isinstance(content, str) else content

"""3MF: an archive of model files whose objects, components and build items place meshes.

The reader walks from the build items of the root model through components, also into other model files, and
places each mesh as often as it is used. An object is known by its file and its id. What changes the shape and
is not understood is refused by name: other kinds of objects, extensions that are required, and the modifiers
of slicers. Lengths are in the unit of the root model.

Specifications: 3MF Core 1.3, Production 1.1.
"""

import io
import posixpath
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import numpy as np
from jaxtyping import Float

from pointproj.geometry.files.text import SHOWN, Content, FormatError, Part, joined, placed

LARGEST_CONTENT = 1 << 28
"""Most bytes that an archive may expand to."""

LARGEST_INSTANCES = 10_000
"""Most uses of objects that a file may make."""

LARGEST_SCENE = 1 << 26
"""Most faces of a scene that repeats its parts."""

_START_PART = re.compile(r"/3dmanufacturing/20\d\d/\d\d/3dmodel$")
_PATH = re.compile(r"\{http://schemas\.(microsoft|3mf)\.(com|io)/3dmanufacturing/production/[^}]*\}path$")

# Extensions that leave the surface of objects as it is, but for elements that are refused where they occur.
_UNDERSTOOD = re.compile(
    r"http://schemas\.(microsoft\.com|3mf\.io)/3dmanufacturing/(core|production|material|trianglesets)/"
)

# Files of slicers say there which triangles are no part of the solid.
_SLICER_FILES = re.compile(r"metadata/.*\.config$", re.IGNORECASE)
_SLICER_PARTS = re.compile(
    rb"ParameterModifier|NegativeVolume|Support(?:Blocker|Enforcer)|modifier_part|negative_part"
    rb"|support_(?:blocker|enforcer)|<(?=[^>]*key=[\"']modifier[\"'])[^>]*value=[\"']1[\"']",
)
_MODIFIERS = ("infill_mesh", "cutting_mesh", "support_mesh", "anti_overhang_mesh")  # settings of Cura

Use = tuple[str, int, Float[np.ndarray, "4 4"]]  # file, id of an object, and its place


@dataclass
class _Object:
    kind: str
    mesh: Part | None = None
    components: list[Use] = field(default_factory=list)


@dataclass
class _Model:
    unit: str
    objects: dict[int, _Object]
    build: list[Use]


def parse(content: bytes) -> Content:
    """Return the placed triangles of all build items of a 3MF file, or raise FormatError."""
    archive = zipfile.ZipFile(io.BytesIO(content))
    unfolded = sum(member.file_size for member in archive.infolist())
    if unfolded > LARGEST_CONTENT:
        raise FormatError(f"unfolds to {unfolded:,} bytes: expected at most {LARGEST_CONTENT:,}")
    names = {"/" + unquote(name).lstrip("/").lower(): name for name in archive.namelist()}
    for name in archive.namelist():
        if _SLICER_FILES.search(name) and (found := _SLICER_PARTS.search(archive.read(name))):
            what = found.group().decode()[:SHOWN]
            raise FormatError(f"has parts that are no solid ({what} in {name}): write it without them")
    return Content(*joined(list(_parts(_Archive(archive, names)))))


class _Archive:
    """The model files of an archive, each read once, by their names in small letters."""

    def __init__(self, archive: zipfile.ZipFile, names: dict[str, str]) -> None:
        self._archive, self._names, self._models = archive, names, {}
        self.root = self._start()

    def model(self, name: str) -> _Model:
        if name not in self._models:
            if name not in self._names:
                raise FormatError(f"names the model file {name[:SHOWN]!r}, which it does not hold")
            with self._archive.open(self._names[name]) as file:
                self._models[name] = _model(file, name)
        return self._models[name]

    def _start(self) -> str:
        """Return the name of the root model: what the package's relationships say, else the usual name."""
        from lxml import etree

        if "/_rels/.rels" in self._names:
            content = self._archive.read(self._names["/_rels/.rels"])
            for relation in etree.fromstring(content, _parser()).iter("{*}Relationship"):
                if _START_PART.search(relation.get("Type", "")):
                    return _part(relation.get("Target"))
        models = [name for name in self._names if name.endswith(".model")]
        usual = [name for name in models if name.startswith("/3d/3dmodel")]
        chosen = usual or models
        if len(chosen) != 1:
            raise FormatError(f"must hold one root model, 3D/3dmodel.model, got {len(chosen)}")
        return chosen[0]


def _part(path: str) -> str:
    """Return the name of the archive's file at a path, which may begin at the root or not."""
    return posixpath.normpath("/" + unquote(path)).replace("//", "/").lower()


def _parser() -> Any:
    from lxml import etree

    return etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True, remove_pis=True)


def _parts(archive: _Archive) -> Iterator[Part]:
    """Yield the mesh of each use of an object, placed."""
    root = archive.model(archive.root)
    if not root.build:
        raise FormatError("builds nothing: expected items in the build of its root model")
    uses = faces = 0
    stack = [(use, ()) for use in reversed(root.build)]
    while stack:
        (name, number, matrix), above = stack.pop()
        model = archive.model(name)
        if model.unit != root.unit:
            raise FormatError(f"has model files in {model.unit} and in {root.unit}: write them in one unit")
        if number not in model.objects:
            raise FormatError(f"uses object {number}, which {name[:SHOWN]!r} does not define")
        if (name, number) in above:
            raise FormatError(f"has object {number} inside of itself")
        found = model.objects[number]
        if found.kind not in ("model", "surface"):
            raise FormatError(
                f"uses object {number}, of type {found.kind!r}, which is no part of the solid: leave it out"
            )
        uses += 1
        if uses > LARGEST_INSTANCES:
            raise FormatError(f"repeats its objects more than {LARGEST_INSTANCES:,} times")
        if found.mesh is not None:
            faces += len(found.mesh[1])
            if faces > LARGEST_SCENE:
                raise FormatError(f"repeats its parts to more than {LARGEST_SCENE:,} faces")
            yield placed(*found.mesh, matrix)
        inside = [(where, each, matrix @ place) for where, each, place in found.components]
        stack += [(use, (*above, (name, number))) for use in reversed(inside)]


def _model(file: Any, name: str) -> _Model:
    """Read a model file: its objects by id, and its build."""
    from lxml import etree

    root = etree.parse(file, _parser()).getroot()
    for prefix in root.get("requiredextensions", "").split():
        space = root.nsmap.get(prefix, prefix)
        if not _UNDERSTOOD.match(space):
            raise FormatError(f"needs the extension {space[-2 * SHOWN :]!r}, which is not understood")
    objects: dict[int, _Object] = {}
    for element in root.iterfind("{*}resources/{*}object"):
        number = int(element.get("id"))
        if number in objects:
            raise FormatError(f"defines object {number} twice in {name[:SHOWN]!r}")
        objects[number] = _object(element, number, name)
    build = [_use(item, name) for item in root.iterfind("{*}build/{*}item")]
    return _Model(root.get("unit", "millimeter"), objects, build)


def _object(element: Any, number: int, name: str) -> _Object:
    made = _Object(element.get("type", "model"))
    shapes = [each for each in element if _local(each) != "metadatagroup"]
    if [_local(each) for each in shapes] not in (["mesh"], ["components"]):
        kinds = ", ".join(_local(each) for each in shapes)[:SHOWN] or "nothing"
        raise FormatError(f"has object {number} made of {kinds}: expected one mesh, or components")
    for setting in element.iterfind("{*}metadatagroup/{*}metadata"):
        said = setting.get("name", "").rpartition(":")[2]
        if said in _MODIFIERS and (setting.text or "").strip().lower() in ("true", "1"):
            raise FormatError(f"has object {number}, a {said}, which is no part of the solid: leave it out")
    if any(
        key.rpartition("}")[2] == "meshresolution" and value != "fullres" for key, value in element.items()
    ):
        raise FormatError(f"has slices of object {number}, which are not understood, and a coarse mesh")
    if _local(shapes[0]) == "components":
        made.components = [_use(each, name) for each in shapes[0] if _local(each) == "component"]
        return made
    unknown = {_local(each) for each in shapes[0]} - {"vertices", "triangles", "trianglesets"}
    if unknown:
        raise FormatError(f"has {', '.join(sorted(unknown))[:SHOWN]} in object {number}, not understood")
    vertices = [[each.get(axis) for axis in "xyz"] for each in shapes[0].iterfind("{*}vertices/{*}vertex")]
    corners = ("v1", "v2", "v3")
    faces = [[int(each.get(v)) for v in corners] for each in shapes[0].iterfind("{*}triangles/{*}triangle")]
    made.mesh = (
        np.array(vertices, np.float64).reshape(-1, 3),
        np.array(faces, np.int64).reshape(-1, 3),
    )
    return made


def _use(element: Any, name: str) -> Use:
    """Return which object an item or a component uses, and where."""
    words = element.get("transform", "1 0 0 0 1 0 0 0 1 0 0 0").split()
    matrix = np.eye(4)
    matrix[:3] = np.array(words, np.float64).reshape(4, 3).T
    if not np.isfinite(matrix).all():
        raise FormatError(f"has a transform that is not finite: {' '.join(words)[:SHOWN]!r}")
    path = next((value for key, value in element.attrib.items() if _PATH.match(key)), None)
    file = name if path is None else _part(path)
    return file, int(element.get("objectid")), matrix


def _local(element: Any) -> str:
    return element.tag.rpartition("}")[2]

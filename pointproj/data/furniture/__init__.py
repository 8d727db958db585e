"""Procedural furniture in the ten classes of ModelNet10, fixed by a seed.

With this data set the application is trained and tested without a download. Pieces are written as OFF files
in ModelNet10's layout and read like real ones. They are watertight, or have the defects of real files if the
config says so.
"""

import json
import logging
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from manifold3d import Manifold

from pointproj.data.errors import DataError
from pointproj.data.furniture import bathroom, beds, case_goods, monitors, upholstery
from pointproj.data.furniture.defects import defective_surface
from pointproj.data.furniture.parts import Rng
from pointproj.data.furniture.solids import union
from pointproj.data.layout import SPLITS
from pointproj.geometry.files import write_mesh
from pointproj.geometry.files.writing import replacing
from pointproj.geometry.meshes import Mesh
from pointproj.runtime.helpers import HelperProcesses

log = logging.getLogger(__name__)

# Two functions for each class: the first has few styles and common sizes, the second many builds and sizes.
_MAKERS = {
    "bathtub": (bathroom.bathtub, bathroom.varied_bathtub),
    "bed": (beds.bed, beds.varied_bed),
    "chair": (upholstery.chair, upholstery.varied_chair),
    "desk": (case_goods.desk, case_goods.varied_desk),
    "dresser": (case_goods.dresser, case_goods.varied_dresser),
    "monitor": (monitors.monitor, monitors.varied_monitor),
    "night_stand": (case_goods.night_stand, case_goods.varied_night_stand),
    "sofa": (upholstery.sofa, upholstery.varied_sofa),
    "table": (case_goods.table, case_goods.varied_table),
    "toilet": (bathroom.toilet, bathroom.varied_toilet),
}

CLASSES = tuple(sorted(_MAKERS))
GENERATOR_VERSION = 2  # to be raised whenever a change of the code gives a seed another shape
SHORTEST_EDGE = 1e-5  # metres, before scaling
MARKER = "furniture.json"  # marks a folder as generated, and holds the settings


def make_furniture(
    class_name: str, seed: int | Sequence[int], *, varied: bool = False, defects: bool = False
) -> Mesh:
    """Make one piece of furniture that stands on z = 0, with z upwards.

    Its scale is arbitrary, like that of real files: the longest side has 15 to 2,000 units. Without defects
    the mesh is watertight, with faces oriented outwards.

    Parameters
    ----------
    class_name : str
        One of :data:`CLASSES`.
    seed : int or sequence of int
        Equal seeds give equal meshes, vertex for vertex.
    varied : bool
        Draw from many more builds, thin and thick, of any height, width and depth, as in real collections.
    defects : bool
        Give the same solid a surface with the defects of real files (:mod:`.defects`).

    Raises
    ------
    DataError
        If there is no such class.
    """
    if class_name not in _MAKERS:
        raise DataError(f"expected a class of {', '.join(CLASSES)}; got {class_name!r}")
    entropy = [CLASSES.index(class_name), *([seed] if isinstance(seed, int) else seed)]
    rng = Rng(np.random.PCG64(entropy))
    closed = False
    while not closed:  # not closed: parts happen to touch along an edge; draw again
        start = rng.bit_generator.state
        # The order of the parts decides the order of the faces. The parts are not assigned to a variable:
        # while a variable refers to them, the library merges them in another order, with other rounding.
        vertices, faces = _merged(union(_parts(class_name, rng, varied)))
        edges = np.sort(faces[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), axis=1)
        closed = (np.unique(edges, axis=0, return_counts=True)[1] == 2).all()
    floor = vertices[:, 2].min()  # the ends of leaning legs are a little below 0
    vertices[:, 2] -= floor
    longest = np.exp(rng.uniform(np.log(15.0), np.log(2000.0)))
    scale = longest / np.ptp(vertices, axis=0).max()
    if defects:
        rng.bit_generator.state = start
        parts = _parts(class_name, rng, varied)
        vertices, faces = defective_surface(parts, Rng(np.random.PCG64([*entropy, 1])))
        vertices[:, 2] -= floor
    return Mesh(vertices=vertices * scale, faces=faces, name=class_name)


def _parts(class_name: str, rng: Rng, varied: bool) -> list[Manifold]:
    """Draw the overlapping solids of a piece."""
    plain, other = _MAKERS[class_name]
    if not varied:
        return list(plain(rng))
    made = list((plain if rng.chance(0.3) else other)(rng))
    scales = np.exp(rng.uniform(-0.3, 0.3, 3)) * [rng.choice([-1.0, 1.0]), 1.0, 1.0]
    return [part.scale(list(scales)) for part in made if not part.is_empty()]


def _merged(solid: Manifold) -> tuple[Float[np.ndarray, "v 3"], Int[np.ndarray, "f 3"]]:
    """Return vertices and faces of a solid without its hidden cavities, with equal vertices merged.

    Unions leave very short edges between vertices that differ only by rounding. These are collapsed here, so
    that readers which merge vertices get a closed surface too.
    """
    shells = [shell for shell in solid.simplify(SHORTEST_EDGE).decompose() if shell.volume() > 0]
    mesh = Manifold.compose(shells).to_mesh()
    snapped = np.round(mesh.vert_properties[:, :3].astype(np.float64) / SHORTEST_EDGE) * SHORTEST_EDGE
    vertices, renumbered = np.unique(snapped, axis=0, return_inverse=True)
    faces = renumbered.reshape(-1)[mesh.tri_verts].astype(np.int64)
    a, b, c = faces.T
    return vertices, faces[(a != b) & (b != c) & (c != a)]


def write_furniture(
    root: Path | str,
    classes: Sequence[str] = CLASSES,
    train: int = 6,
    test: int = 2,
    seed: int = 0,
    *,
    varied: bool = False,
    defects: bool = False,
    helpers: HelperProcesses | None = None,
) -> list[Path]:
    """Write furniture as OFF files in ModelNet10's layout; existing files stay.

    Parameters
    ----------
    root : Path or str
        Folder for ``<class>/{train,test}/<class>_NNNN.off``.
    classes : sequence of str
        Which of :data:`CLASSES` to write.
    train, test : int
        Pieces of each class in each split.
    seed : int
        Seed of all pieces.
    varied, defects : bool
        As in :func:`make_furniture`. Other values, or a newer generator, replace all pieces in the folder.
    helpers : HelperProcesses, optional
        Processes that make pieces side by side; by default this process makes them.

    Returns
    -------
    list of Path
        The files of all these pieces, new or existing.

    Raises
    ------
    DataError
        If a class is unknown, or the folder has OFF files that were not generated here.
    """
    root = Path(root)
    if unknown := [name for name in classes if name not in _MAKERS]:
        raise DataError(f"expected classes of {', '.join(CLASSES)}; got {', '.join(unknown)}")
    family = {"varied": varied, "defects": defects}
    _claim(root, {"generator": GENERATOR_VERSION, "seed": seed, **family})
    pieces = {}
    for class_name, (index, split) in product(classes, enumerate(SPLITS)):
        # The splits have separate ranges of numbers, so more training pieces do not rename test pieces.
        first, count = (1, train) if split == "train" else (5001, test)
        for number in range(count):
            path = root / class_name / split / f"{class_name}_{first + number:04d}.off"
            pieces[path] = partial(_write_piece, path, class_name, (seed, index, 1 + number), **family)
    missing = {path: job for path, job in pieces.items() if not path.exists()}
    list((helpers or HelperProcesses(1)).results("making furniture", missing, "pieces"))
    return list(pieces)


def _write_piece(path: Path, class_name: str, seed: Sequence[int], *, varied: bool, defects: bool) -> None:
    write_mesh(make_furniture(class_name, seed, varied=varied, defects=defects), path)


def _claim(root: Path, settings: dict[str, int | bool]) -> None:
    """Mark the folder as generated from ``settings``, and remove pieces made from other settings."""
    marker = root / MARKER
    found = json.loads(marker.read_text()) if marker.exists() else None
    if found == settings:
        return
    present = [path for name in CLASSES for path in root.glob(f"{name}/*/{name}_*.off")]
    if found is None and present:
        raise DataError(
            f"expected a folder that is empty or holds generated furniture; {root} holds {len(present)} "
            f"other OFF files, such as {present[0].name}: choose another data.root, or read these by "
            "data=modelnet10"
        )
    for path in present:
        path.unlink()
    with replacing(marker) as temporary:
        temporary.write_text(json.dumps(settings) + "\n")
    log.info("making furniture in %s", root)

"""Write predicted values beside what their file holds: VTP, VTU, VTI and VTK by pyvista, or NPZ."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float

from pointproj.geometry.files.measured import VTK_SUFFIXES, FieldSample
from pointproj.geometry.files.writing import replacing
from pointproj.geometry.meshes import MeshError

SUFFIXES = (".vtp", ".vtu", ".vtk", ".npz")
PREDICTED = "_predicted"  # is appended to the name of a field, so that the file's own values stay


def write_values(
    path: Path, source: Path, sample: FieldSample, values: Mapping[str, Float[np.ndarray, "p c"]]
) -> None:
    """Write the content of ``source`` with values at its points or cells; NaN where it has no area.

    ``sample`` was read from ``source``. The file is written completely or not at all.
    """
    named = {name + PREDICTED: _plain(each) for name, each in values.items()}
    if path.suffix.lower() == ".npz":
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, points=sample.points, **named)
        return
    import pyvista as pv

    if source.suffix.lower() in VTK_SUFFIXES:
        from pointproj.geometry.files.measured.vtk import load

        data = load(source)
    elif sample.mesh is not None:
        data = pv.PolyData.from_regular_faces(sample.mesh.vertices, sample.mesh.faces)
    else:
        data = pv.PolyData(sample.points)
    if path.suffix.lower() == ".vtu":
        data = data.cast_to_unstructured_grid()
    elif path.suffix.lower() == ".vtp" and not isinstance(data, pv.PolyData):
        raise MeshError(source, f"may hold a volume, which VTP cannot: write {path.with_suffix('.vtk')}")
    held = data.cell_data if sample.place == "cells" else data.point_data
    count = data.n_cells if sample.place == "cells" else data.n_points
    for name, each in named.items():
        whole = np.full((count, *each.shape[1:]), np.nan, dtype=np.float32)
        whole[sample.rows] = each
        held[name] = whole
    _save(data, path)


def write_grid(
    path: Path, values: Mapping[str, Float[np.ndarray, "n n n c"]], corner: np.ndarray, spacing: float
) -> None:
    """Write values of a regular grid, indexed by x, y, z, as a VTI file; ``corner`` has the lowest."""
    import pyvista as pv

    shape = next(iter(values.values())).shape[:3]
    data = pv.ImageData(dimensions=shape, spacing=(spacing,) * 3, origin=tuple(corner))
    for name, each in values.items():
        data.point_data[name] = _plain(each.reshape(-1, each.shape[-1], order="F"))
    _save(data, path)


def _plain(values: Float[np.ndarray, "p c"]) -> np.ndarray:
    """Return the values without the axis of a scalar's one channel."""
    return values[:, 0] if values.shape[1] == 1 else values


def _save(data, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.new{path.suffix}")  # pyvista tells the format by the suffix
    try:
        data.save(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)

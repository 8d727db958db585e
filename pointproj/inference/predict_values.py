"""Predict values at the points of a file, or on a grid around it, and write them for ParaView."""

import argparse
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from pointproj.config import TARGETS
from pointproj.data.clouds import Sampling, sample_cloud
from pointproj.data.errors import DataError
from pointproj.data.fields.samples import parameters_of, read_parameters
from pointproj.geometry.files.measured import INSTALL, VTK_SUFFIXES, missing_package, read_geometry
from pointproj.geometry.files.measured.writing import SUFFIXES, write_grid, write_values
from pointproj.geometry.files.points import SUFFIXES as READABLE
from pointproj.geometry.files.points import Cloud, read_cloud
from pointproj.geometry.files.text import Content
from pointproj.geometry.meshes import query_grid
from pointproj.inference.field_model import FieldModel
from pointproj.inference.trained_model import TrainedModel, load_trained
from pointproj.runtime.run_folder import require_writable

log = logging.getLogger(__name__)


def predict_values(given: argparse.Namespace, target: str) -> None:
    """Predict for the files of the arguments, and print the name of each file that was written.

    Raises DataError before any work if the arguments do not go together, or pyvista is missing.
    """
    where = given.points or ("own" if target == "field" else "grid")
    outputs = _outputs(given, where)
    if missing := [path for path in given.files if not path.is_file()]:
        raise DataError(f"{missing[0]}: no such file")
    needs_vtk = any(path.suffix != ".npz" for path in outputs.values())
    if reason := missing_package(given.files):
        raise DataError(reason)
    if needs_vtk and find_spec("pyvista") is None:
        raise DataError(
            f"{', '.join(VTK_SUFFIXES)} are written by pyvista, which is not installed: {INSTALL}"
        )
    parameters = _parameters(given.parameters)
    if target == "field":
        model = FieldModel.load(given.checkpoint, given.device)
        if where == "grid" and model.statistics.on_surface:
            raise DataError(
                "the network was trained with values on surfaces: leave --points grid out, "
                f"and end --out with {', '.join(SUFFIXES)}"
            )
        if unknown := parameters.keys() - {*model.statistics.parameters}:
            has = ", ".join(model.statistics.parameters) or "none"
            raise DataError(
                f"--parameters {', '.join(sorted(unknown))}: the parameters of the network are {has}"
            )
        for source, path in outputs.items():
            numbers = _table_row(source) | parameters
            print(_predict_fields(model, source, path, numbers, where, given.side), path, sep="\n")
        return
    if parameters:
        raise DataError(f"target={target} has no parameters: leave --parameters out")
    trained = load_trained(given.checkpoint, given.device, targets=tuple(TARGETS))
    for source, path in outputs.items():
        print(_predict_of_solid(trained, source, path, where, given.side), path, sep="\n")


def _predict_fields(
    model: FieldModel,
    source: Path,
    path: Path,
    parameters: Mapping[str, float],
    where: str,
    side: int | None,
) -> str:
    """Write the fields at the points of a file, or in the box of the training samples; return a line."""
    sample = read_geometry(source, model.statistics.place)
    if where == "own":
        values = model(sample, parameters)
        write_values(path, source, sample, values)
        return f"{source}: {', '.join(values)} at {len(sample.points):,} {sample.place}"
    side, centre, scale = side or model.trained.default_side, *model.statistics.box
    values = model(sample, parameters, at=query_grid(side) * scale + centre)
    grids = {name: each.reshape(side, side, side, -1) for name, each in values.items()}
    write_grid(path, grids, centre - scale, 2 * scale / (side - 1))
    return f"{source}: {', '.join(values)} on a grid of {side}^3 points"


def _predict_of_solid(trained: TrainedModel, source: Path, path: Path, where: str, side: int | None) -> str:
    """Write the values of a target of meshes, such as distances in the unit of the file; return a line."""
    cloud = _cloud(trained, source)
    field = trained.field(cloud.points, cloud.normals, cloud.sensors)
    target, placement = TARGETS[trained.config.target.name], cloud.placement
    factor = placement.scale if target.is_distance else -1.0  # logits of being inside
    name = trained.config.target.name
    if where == "own":
        sample = read_geometry(source, "points")
        values = field(placement.to_cube(sample.points).astype(np.float32)) * factor
        write_values(path, source, sample, {name: values[:, None]})
        return f"{source}: {name} at {len(values):,} points"
    side = side or trained.default_side
    values = field(query_grid(side)).reshape(side, side, side, 1) * factor
    spacing = 2 * placement.scale / (side - 1)
    write_grid(path, {name: values}, placement.centre - placement.scale, spacing)
    return f"{source}: {name} on a grid of {side}^3 points"


def _cloud(trained: TrainedModel, source: Path) -> Cloud:
    data = trained.config.data
    sampling = Sampling.for_prediction(data)
    sample = lambda surface, _, generator: sample_cloud(surface, sampling, generator)[:2]  # noqa: E731
    chosen = {"most": data.most_points, "sample": sample, "thin": sampling.thin}
    if source.suffix.lower() in VTK_SUFFIXES:
        held = read_geometry(source, "points")
        mesh = held.mesh or held.geometry
        chosen["content"] = Content(mesh.vertices, mesh.faces)
    return read_cloud(source, data.points, **chosen)


def _outputs(given: argparse.Namespace, where: str) -> dict[Path, Path]:
    """Return the file to write for each input file."""
    kinds = (".vti",) if where == "grid" else SUFFIXES

    def in_folder(path: Path, stem: Path) -> list[Path]:
        own = path.suffix.lower() if path.suffix.lower() in VTK_SUFFIXES else ".vtp"
        return [stem.with_name(f"{stem.name}-values{'.vti' if where == 'grid' else own}")]

    outputs = {
        path: files[0] for path, files in outputs_for(given, kinds, lambda out: [out], in_folder).items()
    }
    for path, out in outputs.items():
        if (path.suffix.lower(), out.suffix.lower()) == (".vtu", ".vtp"):
            raise DataError(f"--out {out}: a VTU file may hold a volume, so write {out.with_suffix('.vtu')}")
    return outputs


def outputs_for(
    given: argparse.Namespace,
    kinds: Sequence[str],
    alone: Callable[[Path], list[Path]],
    in_folder: Callable[[Path, Path], list[Path]],
) -> dict[Path, list[Path]]:
    """Return the files to write for each input file, by the arguments ``files`` and ``out``.

    ``alone`` gives them for a file that is named; ``in_folder`` for an input file and the path of its name in
    a folder. Raises DataError if ``out`` cannot hold them, if two input files would have the same, or if one
    is an input file itself.
    """
    out: Path = given.out
    suffix = out.suffix.lower()
    if not out.is_dir() and (suffix in (*kinds, *READABLE) or suffix[1:].isalpha()):
        if suffix not in kinds:
            raise DataError(f"--out {out}: expected a folder, or a file of {', '.join(kinds)}")
        if len(given.files) > 1:
            raise DataError(f"--out {out} is one file for {len(given.files)} files: name a folder")
        require_writable(out.parent)
        outputs = {given.files[0]: alone(out)}
    else:
        stems = Counter(path.stem for path in given.files)
        names = [path.stem if stems[path.stem] == 1 else path.name for path in given.files]
        if same := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError(
                f"several files are called {', '.join(same)}: give them to calls with their own --out"
            )
        require_writable(out)
        outputs = {p: in_folder(p, out / name) for p, name in zip(given.files, names, strict=True)}
    inputs = {path.resolve() for path in given.files}
    if taken := [path for files in outputs.values() for path in files if path.resolve() in inputs]:
        raise DataError(f"--out {out}: {taken[0]} is an input file, which stays as it is: name another")
    return outputs


def _table_row(source: Path) -> dict[str, float]:
    """Return the parameters of a file in ``parameters.csv`` of its folder, or of the folder above."""
    for root in (source.parent, source.parent.parent):
        row = parameters_of(source, root, read_parameters(root), {})
        if row:
            return row
    return {}


def _parameters(written: list[str]) -> dict[str, float]:
    """Read NAME=NUMBER of the command line."""
    try:
        given = {name: float(number) for name, number in (text.split("=", 1) for text in written)}
    except ValueError as error:
        raise DataError(f"--parameters {' '.join(written)}: expected NAME=NUMBER ... ({error})") from error
    if len(given) < len(written) or not np.isfinite([*given.values()]).all():
        raise DataError(f"--parameters {' '.join(written)}: expected each name once, and finite numbers")
    return given

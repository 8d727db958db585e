"""Samples as named arrays: NPZ, PT (a dictionary of tensors), and CSV.

``points`` (P, 3) are where the fields lie; ``vertices`` is another name for them. Optional are ``normals``
(P, 3), ``areas`` (P,) and ``faces`` (F, 3), triangles between the points. A field has a row for each point or
each face. Numbers without an axis are parameters of the sample. In a CSV file, positions are the columns x,
y, z, or Points:0, Points:1, Points:2 as ParaView writes them; a vector is NAME:0, NAME:1, NAME:2.
"""

import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pointproj.geometry.files.measured.sample import FieldSample, Place, chosen, columns, of_mesh
from pointproj.geometry.meshes import Mesh, MeshError

POSITIONS = ("points", "vertices")
GEOMETRY = (*POSITIONS, "normals", "areas", "faces")  # all other arrays may be fields


def read(path: Path, fields: Sequence[str], geometry: Mesh | None, place: Place = "points") -> FieldSample:
    """Read a sample; ``geometry`` is the mesh of a file beside it. Without fields, of ``place``."""
    arrays = READERS[path.suffix.lower()](path)
    try:
        return _sample(arrays, fields, geometry, place)
    except ValueError as error:
        raise MeshError(path, str(error)) from error


def _sample(
    arrays: Mapping[str, np.ndarray], fields: Sequence[str], geometry: Mesh | None, place: Place
) -> FieldSample:
    parameters = {
        name: float(array) for name, array in arrays.items() if array.ndim == 0 and array.dtype.kind in "fiu"
    }
    given = next((arrays[name] for name in POSITIONS if name in arrays), None)
    faces = arrays.get("faces")
    if given is None:
        if geometry is None:
            raise ValueError(f"has no array {' or '.join(POSITIONS)}: it has {', '.join(arrays)}")
        given, faces, geometry = geometry.vertices, geometry.faces, None
    points = columns(given, "points")
    if points.shape[1] != 3:
        raise ValueError(f"has points of shape {points.shape}: expected (n, 3)")
    if faces is not None and (faces.ndim != 2 or faces.shape[1] != 3 or faces.min(initial=0) < 0):
        raise ValueError(f"has faces of shape {faces.shape}: expected triangles (n, 3) of indices from 0")
    sizes = {"points": len(points), "cells": -1 if faces is None else len(faces)}
    named = {name: array for name, array in arrays.items() if name not in GEOMETRY and array.ndim}
    found = {
        place: {name: array for name, array in named.items() if len(array) == size}
        for place, size in sizes.items()
    }
    values = {}
    if fields:
        place, values = chosen(found, fields)
    own = {name: columns(arrays[name], name) for name in ("normals", "areas") if name in arrays}
    if faces is None or (place == "points" and len(own) == 2):
        mesh = None if faces is None else Mesh(points, faces, "surface")
        sample = FieldSample(points, {}, rows=np.arange(len(points)), place=place, mesh=mesh)
    else:
        sample = of_mesh(points, faces, place)
    if own.keys() - {"areas"} and len(own["normals"]) == sizes[place]:
        sample = replace(sample, normals=own["normals"][sample.rows])
    if "areas" in own and len(own["areas"]) == sizes[place]:
        sample = replace(sample, areas=own["areas"][sample.rows, 0])
    values = {name: rows[sample.rows] for name, rows in values.items()}
    return replace(sample, values=values, parameters=parameters, geometry=geometry)


def _npz(path: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise MeshError(path, "is not an NPZ file")
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


def _pt(path: Path) -> dict[str, np.ndarray]:
    import torch

    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise MeshError(path, f"holds a {type(content).__name__}: expected a dictionary of named tensors")
    return {str(name): np.asarray(values) for name, values in content.items()}


def _csv(path: Path) -> dict[str, np.ndarray]:
    with path.open(encoding="utf-8-sig") as file:
        names = [name.strip().strip('"') for name in file.readline().split(",")]
        numbers = np.loadtxt(file, delimiter=",", ndmin=2, quotechar='"')
    if numbers.shape[1] != len(names) or len({*names}) < len(names):
        own = f"{', '.join(names)[:80]} in its first line, and {numbers.shape[1]} columns"
        raise MeshError(path, f"has the names {own}: expected one name of each, all different")
    arrays: dict[str, np.ndarray] = {}
    vectors: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        part = re.fullmatch(r"(.+):(\d)", name)
        if part and int(part[2]) == len(vectors.setdefault(part[1], [])):
            vectors[part[1]].append(number)
        else:
            arrays[name] = numbers[:, number]
    arrays |= {name: numbers[:, own] for name, own in vectors.items() if own}
    axes = {name.lower(): name for name in names}
    if all(axis in axes for axis in "xyz"):
        arrays["points"] = np.stack([arrays.pop(axes[axis]) for axis in "xyz"], axis=1)
    elif "Points" in arrays:
        arrays["points"] = arrays.pop("Points")
    return arrays


READERS: dict[str, Callable[[Path], dict[str, np.ndarray]]] = {".npz": _npz, ".pt": _pt, ".csv": _csv}

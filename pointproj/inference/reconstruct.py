"""Reconstruct solids from mesh and point files, and write them."""

import argparse
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from trimesh import Trimesh

from pointproj.data.clouds import Sampling, sample_cloud
from pointproj.data.errors import DataError
from pointproj.geometry.files import SINGLE_PRECISION, WRITERS, read_mesh, write_mesh
from pointproj.geometry.files.points import Cloud, read_cloud
from pointproj.geometry.isosurfaces import reconstruct, side_for
from pointproj.geometry.meshes import LONGEST_SIDE, Mesh, piece_volumes
from pointproj.geometry.sampling import PointSource
from pointproj.inference.arguments import MOST_SIDE, WEIGHTS
from pointproj.inference.predict_values import outputs_for, predict_values
from pointproj.inference.trained_model import SOLID_TARGETS, TrainedModel, load_trained, target_of
from pointproj.runtime.errors import is_user_error
from pointproj.runtime.progress_bar import progress
from pointproj.viz.renderings import cloud_panel, draw_rows, surface_panel

log = logging.getLogger(__name__)

CRUMBS = 1e-3  # of the volume
STRAY = 3.0  # a stray is this many times as far from the middle as 99% of the points


def predict(trained: TrainedModel, cloud: Cloud, files: Sequence[Path], side: int | None = None) -> str:
    """Reconstruct a cloud, write the files, and return a line that describes the result.

    A file with the suffix ``.png`` gets a picture; the other ``files`` get the mesh, in the coordinates of
    the cloud's file. The surface is extracted from a grid of ``side`` points a side, by default as many as
    the cloud's spacing asks for, and at least those of the model's device. Raises DataError, and writes
    nothing, if the cloud has too few points, or lacks normals that the model needs, or if the model finds
    nothing inside.
    """
    _warn_of_strays(cloud)
    started = time.perf_counter()
    field = trained.field(cloud.points, cloud.normals, cloud.sensors)
    side = side or side_for(cloud.points, trained.default_side)
    mesh = reconstruct(field, cloud.name, side, cloud=cloud.points, device=str(trained.device)).mesh
    if not len(mesh.faces):
        raise DataError(
            f"{cloud.name}: the model finds nothing inside; give it more points, or a model trained longer"
        )
    seconds = time.perf_counter() - started
    placed = cloud.placement.to_file(mesh)
    for file in files:
        if file.suffix == ".png":
            points = cloud_panel(f"{len(cloud.points):,} points", cloud.points)
            draw_rows(file, [(cloud.name, [points, surface_panel("reconstruction", mesh)])])
        else:
            write_mesh(placed, file)
    solid, pieces = _written(placed, files), _pieces(mesh, side)
    closed = "watertight" if solid.is_watertight else "not watertight"
    return (
        f"{len(cloud.points):,} points, grid {side}^3: {len(solid.vertices):,} vertices, "
        f"{len(solid.faces):,} faces, volume {solid.volume:.4g}, {closed}, "
        f"{pieces} piece{'s' * (pieces != 1)}, {seconds:.1f} s"
    )


def _written(mesh: Mesh, files: Sequence[Path]) -> Trimesh:
    """Return the mesh as the first file holds it: rounded, if its format has single precision."""
    rounded = [file for file in files if file.suffix.lower() in SINGLE_PRECISION]
    vertices, faces = mesh.vertices, mesh.faces
    if rounded:
        found = read_mesh(rounded[0])
        vertices, same = np.unique(found.vertices, axis=0, return_inverse=True)  # STL repeats corners
        faces = same.reshape(-1)[found.faces]
    return Trimesh(vertices, faces, process=False)


def _pieces(mesh: Mesh, side: int) -> int:
    """Return how many separate solids a reconstruction has; warn if there are others than crumbs."""
    volumes = piece_volumes(mesh)
    solids = volumes[volumes > 0]  # others are cavities
    beside = 1 - solids[0] / solids.sum()
    if beside > CRUMBS:
        log.warning(
            "%s: %d separate pieces; all but the largest have %.2g%% of the volume. If they belong together, "
            "write a finer grid, --side %d, or give more points",
            *(mesh.name, len(solids), 100 * beside, min(2 * side, MOST_SIDE)),
        )
    return len(solids)


def _warn_of_strays(cloud: Cloud) -> None:
    """Warn if a few far points make the shape so small in the query cube that the grid is too coarse."""
    distances = np.abs(cloud.points - np.median(cloud.points, axis=0)).max(axis=1)
    most = np.quantile(distances, 0.99)
    if STRAY * 2 * most < LONGEST_SIDE:
        placement = cloud.placement
        farthest = cloud.points[distances.argmax()] * placement.scale + placement.centre
        farthest[np.abs(farthest) < 1e-5 * placement.scale] = 0  # removes rounding errors of float32
        log.warning(
            "%s: 99%% of its points fill only %.2g of the bounding box, and the farthest is (%s). Remove the "
            "strays (%d), otherwise the shape is too small for the grid",
            cloud.name,
            2 * most / LONGEST_SIDE,
            ", ".join(f"{coordinate:.4g}" for coordinate in farthest),
            (distances > STRAY * most).sum(),
        )


def _outputs(given: argparse.Namespace) -> dict[Path, list[Path]]:
    """Return the files to write for each input file."""
    suffixes = ".ply", ".off", ".png"
    return outputs_for(
        given,
        [*WRITERS],
        lambda out: [out, out.with_suffix(".png")],
        lambda _, stem: [stem.with_name(f"{stem.name}-reconstruction{suffix}") for suffix in suffixes],
    )


def predict_files(given: argparse.Namespace) -> None:
    """Reconstruct the files of the arguments; if one of several cannot be used, the others still are."""
    target = target_of(given.checkpoint)
    if given.points is not None or target not in SOLID_TARGETS:
        predict_values(given, target)
        return
    outputs = _outputs(given)
    trained = load_trained(given.checkpoint, given.device)
    if given.checkpoint.parent == WEIGHTS:
        print(
            f"weights of the package, {given.checkpoint.name}: trained on data that this project generates, "
            f"for any use under its licence, Apache-2.0 ({given.checkpoint / 'README.md'})"
        )
    else:
        log.info("%s", trained.origin)
    data = trained.config.data
    sampling = Sampling.for_prediction(data)
    if given.sensors is not None and not trained.config.projector.sensors:
        raise DataError("the model was trained without sensors: leave --sensors out")

    def sample(source: PointSource, _: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return sample_cloud(source, sampling, generator)[:2]

    chosen = {"most": data.most_points, "sample": sample, "thin": sampling.thin}
    failed = 0
    with progress("reconstructing", len(outputs), unit="files") as advance:
        for path, files in outputs.items():
            try:
                cloud = read_cloud(path, data.points, sensors=given.sensors, **chosen)
                print(f"{path}: {predict(trained, cloud, files, given.side)}", *files, sep="\n")
            except Exception as error:
                if len(outputs) == 1 or not is_user_error(error):
                    raise
                failed += 1
                log.error("%s: %s", type(error).__name__, error)
            advance(1)
    if failed:
        raise DataError(f"{failed} of {len(outputs)} files could not be reconstructed")

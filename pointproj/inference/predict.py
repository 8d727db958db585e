"""Reconstruct the solid behind any mesh or point file."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pointproj.data.clouds import Sampling, sample_cloud
from pointproj.data.modelnet import DataError
from pointproj.geometry.files import write_mesh
from pointproj.geometry.files.points import SUFFIXES, Cloud, read_cloud
from pointproj.geometry.isosurfaces import reconstruct
from pointproj.geometry.sampling import PointSource
from pointproj.inference.trained_model import TrainedModel, add_arguments, load_trained
from pointproj.runtime.run_folder import require_writable
from pointproj.viz.renderings import cloud_panel, draw_rows, surface_panel


def predict(trained: TrainedModel, cloud: Cloud, out: Path, side: int | None = None) -> list[Path]:
    """Reconstruct a cloud and write mesh and picture.

    Parameters
    ----------
    trained : TrainedModel
    cloud : Cloud
        From :func:`pointproj.geometry.files.points.read_cloud`.
    out : Path
        Folder, made as needed.
    side : int, optional
        Points a side of the grid that the surface is extracted from; by default that of the model's device.

    Returns
    -------
    list of Path
        ``NAME-reconstruction.ply`` and ``.off``, in the coordinates of the cloud's file, and ``.png``.

    Raises
    ------
    DataError
        If the model needs normals that the cloud has not, or finds nothing inside; nothing is written then.
    """
    field = trained.field(cloud.points, cloud.normals, cloud.sensors)
    side = side or trained.default_side
    mesh = reconstruct(field, cloud.name, side, cloud=cloud.points, device=str(trained.device)).mesh
    if not len(mesh.faces):
        raise DataError(
            f"{cloud.name}: the model finds nothing inside; give it more points, or a model trained longer"
        )
    files = [out / f"{cloud.name}-reconstruction{suffix}" for suffix in (".ply", ".off", ".png")]
    for file in files[:2]:
        write_mesh(cloud.placement.to_file(mesh), file)
    panels = [
        cloud_panel(f"{len(cloud.points):,} points", cloud.points),
        surface_panel("reconstruction", mesh),
    ]
    draw_rows(files[2], [(cloud.name, panels)])
    return files


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pointproj predict",
        description="Reconstruct the solid behind a mesh or a cloud of points; z points up.",
    )
    add_arguments(parser)
    parser.add_argument("file", type=Path, help=f"what to reconstruct: {', '.join(SUFFIXES)}")
    help_sensors = (
        "points from where the cloud's points were seen, in its coordinates: one for each, or one for all"
    )
    parser.add_argument("--sensors", type=Path, help=help_sensors)
    parser.add_argument("--out", type=Path, default=Path("outputs/predictions"), help="folder of the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Reconstruct the file that the arguments name."""
    given = _parsed(arguments)
    require_writable(given.out)
    trained = load_trained(given.checkpoint, given.device)
    data = trained.config.data
    sampling = Sampling.for_prediction(data)
    if given.sensors is not None and not trained.config.projector.sensors:
        raise DataError("the model was trained without sensors: leave --sensors out")

    def sample(source: PointSource, _: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return sample_cloud(source, sampling, generator)[:2]

    chosen = {"most": data.most_points, "sample": sample, "thin": sampling.thin}
    cloud = read_cloud(given.file, data.points, sensors=given.sensors, **chosen)
    for file in predict(trained, cloud, given.out, given.side):
        print(file)

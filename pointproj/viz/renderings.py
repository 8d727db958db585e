"""Pictures of solids and clouds: samples of a surface are shaded and drawn from far to near."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int
from matplotlib import colormaps
from matplotlib.figure import Figure

from pointproj.geometry.meshes import Mesh
from pointproj.geometry.sampling import sample_surface
from pointproj.viz.plots import save_figure

SIZE = 280  # pixels a side
SAMPLES = 250_000  # of a surface: several for each pixel, so that the picture has no holes
ELEVATION, AZIMUTH = np.radians(24.0), np.radians(-55.0)
HALF_WIDTH = 1.25  # from the picture's centre to its edge, in units of the query cube
LIGHT = np.array([0.25, 0.5, 0.83])  # in the picture's axes: right, up, towards the viewer
COLOUR = np.array([0.42, 0.60, 0.80])


Pixels = Int[np.ndarray, "SIZE SIZE 3"]
Panel = tuple[str, Pixels]  # one picture in a row, under its heading


def surface_panel(title: str, mesh: Mesh) -> Panel:
    """Draw a mesh in the query cube; without faces, the picture is white."""
    if not len(mesh.faces):
        return title, np.full((SIZE, SIZE, 3), 255, dtype=np.uint8)
    points, normals = sample_surface(mesh, SAMPLES, np.random.default_rng(0))
    facing = normals @ view_axes()
    facing *= np.where(facing[:, 2:] < 0, -1, 1)
    shade = 0.25 + 0.75 * np.clip(facing @ LIGHT, 0, 1)
    return title, _drawn(points, shade[:, None] * COLOUR)


def cloud_panel(title: str, points: Float[np.ndarray, "n 3"]) -> Panel:
    """Draw points in the query cube, coloured by height."""
    return title, _drawn(points, height_colours(points))


def height_colours(points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
    """Return colours of points, by their height."""
    return value_colours(points[:, 2])


def value_colours(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n 3"]:
    """Return colours of values, from the lowest to the highest."""
    low, high = values.min(), values.max()
    return colormaps["cividis"]((values - low) / max(high - low, 1e-9))[:, :3]


def draw_rows(path: Path, rows: Sequence[tuple[str, Sequence[Panel]]]) -> None:
    """Write rows of panels, each row with a caption above it, as one PNG file; an older one is replaced."""
    columns = max(len(panels) for _, panels in rows)
    figure = Figure(figsize=(2.3 * columns, 2.65 * len(rows)), layout="constrained")
    strips = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for strip, (caption, panels) in zip(strips, rows, strict=True):
        strip.suptitle(caption, fontsize=9)
        for place, (title, pixels) in enumerate(panels, start=1):
            axis = strip.add_subplot(1, columns, place)
            axis.imshow(pixels)
            axis.set_title(title, fontsize=8)
            axis.set_axis_off()
    save_figure(figure, path)


def view_axes() -> Float[np.ndarray, "3 3"]:
    """Return the directions right, up and towards the viewer of a picture, as columns, in the cube's axes."""
    right = np.array([np.cos(AZIMUTH + np.pi / 2), np.sin(AZIMUTH + np.pi / 2), 0.0])
    ahead = np.array(
        [np.cos(ELEVATION) * np.cos(AZIMUTH), np.cos(ELEVATION) * np.sin(AZIMUTH), np.sin(ELEVATION)]
    )
    return np.stack([right, np.cross(ahead, right), ahead], axis=1)


def _drawn(points: Float[np.ndarray, "n 3"], colours: Float[np.ndarray, "n 3"]) -> Pixels:
    """Draw points, each as 2 x 2 pixels, from the farthest to the nearest."""
    seen = points @ view_axes()
    order = np.argsort(seen[:, 2])
    places = np.round((seen[order, :2] / HALF_WIDTH + 1) / 2 * (SIZE - 1)).astype(int)
    pixels = np.full((SIZE, SIZE, 3), 255, dtype=np.uint8)
    for right_up in ((0, 0), (0, 1), (1, 0), (1, 1)):
        column, row = np.clip(places + right_up, 0, SIZE - 1).T
        pixels[SIZE - 1 - row, column] = np.round(255 * colours[order])
    return pixels

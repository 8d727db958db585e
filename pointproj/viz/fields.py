"""Pictures of fields at the points of samples: true, predicted, and the error."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from pointproj.viz.plots import save_figure
from pointproj.viz.scenes import write_scene

MOST_POINTS = 2000  # of a panel
MOST_IN_VIEW = 20_000
COLORS, ERROR_COLORS = "viridis", "magma"


def draw_fields(
    path: Path, name: str, points: Float[np.ndarray, "q 3"], fields: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Draw a row of panels for each field; of a vector its length.

    ``fields`` has ``"true"``, and perhaps ``"predicted"``: values (Q, C) by the name of the field. With both,
    a third panel has the size of the error. All panels of true and predicted values have the same colours.
    """
    some = np.linspace(0, len(points) - 1, min(len(points), MOST_POINTS)).astype(int)
    names = [*fields["true"]]
    titles = [*fields, *(["error"] if len(fields) > 1 else [])]
    figure = Figure(figsize=(4.5 * len(titles), 4 * len(names)), layout="constrained")
    figure.suptitle(name)
    for row, field in enumerate(names):
        values = {title: _shown(every[field])[some] for title, every in fields.items()}
        low, high = np.quantile(values["true"], [0.005, 0.995])
        if "error" in titles:
            difference = fields["predicted"][field] - fields["true"][field]
            values["error"] = difference.norm(dim=-1).numpy()[some]
        for column, title in enumerate(titles):
            axes = figure.add_subplot(
                len(names), len(titles), row * len(titles) + column + 1, projection="3d"
            )
            limits = {"vmin": low, "vmax": high} if title != "error" else {"vmin": 0}
            colors = ERROR_COLORS if title == "error" else COLORS
            drawn = axes.scatter(*points[some].T, c=values[title], s=4, cmap=colors, **limits)
            axes.set_aspect("equal")
            axes.set_title(f"{field}: {title}")
            figure.colorbar(drawn, ax=axes, shrink=0.7)
    save_figure(figure, path)


def write_views(
    folder: Path, points: Float[np.ndarray, "q 3"], true: Tensor, predicted: Tensor
) -> dict[str, Path]:
    """Write views of one field (Q, C) that turn: true, predicted and error; return the files by title.

    ``points`` are in the units of the network.
    """
    some = np.linspace(0, len(points) - 1, min(len(points), MOST_IN_VIEW)).astype(int)
    error = (predicted - true).norm(dim=-1).numpy()[some]
    true, predicted = _shown(true)[some], _shown(predicted)[some]
    low, high = np.quantile(true, [0.005, 0.995])
    files = {}
    for title, values, limits, name in (
        ("true", true, (low, high), COLORS),
        ("predicted", predicted, (low, high), COLORS),
        ("error", error, (0.0, float(error.max()) or 1.0), ERROR_COLORS),
    ):
        scaled = ((values - limits[0]) / ((limits[1] - limits[0]) or 1.0)).clip(0, 1)
        legend = f"{title}: {limits[0]:.3g} to {limits[1]:.3g}"
        files[legend] = folder / f"{title}.glb"
        write_scene(points[some], files[legend], colormaps[name](scaled)[:, :3])
    return files


def _shown(values: Float[Tensor, "q c"]) -> Float[np.ndarray, " q"]:
    return (values[:, 0] if values.shape[1] == 1 else values.norm(dim=-1)).numpy()

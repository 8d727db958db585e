"""Pictures of fields at the points of samples: true, predicted, and the error."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from pointproj.viz.plots import save_figure

MOST_POINTS = 5000  # of a panel
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


def _shown(values: Float[Tensor, "q c"]) -> Float[np.ndarray, " q"]:
    return (values[:, 0] if values.shape[1] == 1 else values.norm(dim=-1)).numpy()

"""Pictures of a run: the points, target, prediction and error of a shape, and the losses over the steps."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from pointproj.config import TARGETS
from pointproj.config.targets import Output
from pointproj.geometry.files.writing import replacing

ERROR_COLORS = "magma"
BLUE, ORANGE = "#0072B2", "#D55E00"

TICKS = (1, 1.5, 2, 3, 5, 7)  # of a logarithmic axis, times powers of ten

SURFACE_LEVELS: dict[Output, float] = {"signed_distance": 0.0, "logit": 0.5}
"""Value on the surface, for targets that tell inside from outside; logits are drawn as probabilities."""


def draw_shape(
    path: Path,
    *,
    name: str,
    target_name: str,
    reference_points: Float[np.ndarray, "n 3"],
    target: Float[np.ndarray, " q"],
    prediction: Float[np.ndarray, " q"],
) -> None:
    """Draw one shape: its cloud; and target, prediction and error on a vertical slice through the grid.

    Parameters
    ----------
    path : Path
        PNG file to write; an older one is replaced.
    name : str
        Name of the shape, for the title.
    target_name : str
        A key of :data:`pointproj.config.TARGETS`.
    reference_points : array, shape (N, 3)
        The network's input, in the query cube [-1, 1]^3.
    target, prediction : arrays, shape (Q,)
        Values on a grid of Q = side^3 points of the query cube; x changes slowest and z fastest. If the
        target has labels, the prediction has logits.
    """
    facts = TARGETS[target_name]
    if facts.output == "logit":
        prediction = 0.5 * (1 + np.tanh(0.5 * prediction))  # the logistic function, without overflow
    side = round(len(target) ** (1 / 3))
    # Row of the grid nearest to the points' median y, so that the slice passes through the shape.
    row = round((float(np.median(reference_points[:, 1])) + 1) / 2 * (side - 1))
    row = min(max(row, 0), side - 1)
    y = -1 + 2 * row / (side - 1)
    wanted, predicted = (values.reshape(side, side, side)[:, row].T for values in (target, prediction))

    figure = Figure(figsize=(15, 4), layout="constrained")
    figure.suptitle(f"{name}: {facts.title}; lengths in units of the query cube [-1, 1]³")
    _draw_cloud(figure, reference_points, y)
    low, high = _limits(facts.output, wanted)
    axes = [figure.add_subplot(1, 4, place) for place in (2, 3, 4)]
    _draw_slice(axes[0], f"target at y = {y:+.2f}", wanted, facts.colors, low, high)
    _draw_slice(axes[1], "prediction", predicted, facts.colors, low, high)
    _draw_slice(axes[2], "|prediction - target|", abs(predicted - wanted), ERROR_COLORS, 0.0, None)
    level, ticks = SURFACE_LEVELS.get(facts.output, np.inf), np.linspace(-1, 1, side)
    for axis, values in ((axes[0], wanted), (axes[1], predicted)):
        if values.min() < level < values.max():
            axis.contour(ticks, ticks, values, levels=[level], colors="black", linewidths=1)
    save_figure(figure, path)


def draw_losses(
    path: Path,
    *,
    loss_name: str,
    losses: Sequence[tuple[int, float]],
    metric_name: str,
    errors: Sequence[tuple[int, float]],
    baseline: float,
) -> None:
    """Draw the training loss and the validation error over the steps into a PNG file.

    ``losses`` and ``errors`` are pairs of step and value. Values that are not above 0 are left out, since the
    axes are logarithmic. ``loss_name`` and ``metric_name`` label the axes. ``baseline`` is the error of the
    baseline, which needs no training.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(*np.reshape(losses, (-1, 2)).T, color=BLUE, linewidth=1.2)
    left.set(title="training", xlabel="step", ylabel=loss_name, yscale="log")
    right.plot(*np.reshape(errors, (-1, 2)).T, color=BLUE, marker="o", markersize=4, label="network")
    right.axhline(baseline, color=ORANGE, linestyle="--", label="baseline, which needs no training")
    right.set(title="validation meshes", xlabel="step", ylabel=metric_name, yscale="log")
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3, which="both")
        axis.yaxis.set_major_locator(LogLocator(subs=TICKS))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    save_figure(figure, path)


def _limits(output: Output, values: Float[np.ndarray, "s s"]) -> tuple[float, float]:
    """Return the lowest and highest value of the colour scale."""
    if output == "logit":
        return 0.0, 1.0
    if output == "signed_distance":
        largest = float(abs(values).max())
        return -largest, largest
    return min(0.0, float(values.min())), float(values.max())


def _draw_cloud(figure: Figure, points: Float[np.ndarray, "n 3"], y: float) -> None:
    axis = figure.add_subplot(1, 4, 1, projection="3d", proj_type="ortho")
    shown = points[:: max(1, len(points) // 3000)]
    axis.scatter(*shown.T, c=shown[:, 2], cmap="cividis", s=2.5, linewidths=0, depthshade=False)
    corners = np.array([(-1, y, -1), (1, y, -1), (1, y, 1), (-1, y, 1), (-1, y, -1)])
    axis.plot(*corners.T, color=ORANGE, linewidth=0.8)
    ticks = (-1, 0, 1)
    axis.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1), xlabel="x", ylabel="y", zlabel="z")
    axis.set(xticks=ticks, yticks=ticks, zticks=ticks)
    axis.set_title(f"cloud of {len(points):,} points, and the slice", fontsize=10)
    axis.set_box_aspect((1, 1, 1))
    axis.view_init(elev=22, azim=-60)
    axis.tick_params(labelsize=7)


def _draw_slice(
    axis: Axes, title: str, values: Float[np.ndarray, "s s"], colors: str, low: float, high: float | None
) -> None:
    cell = 1 / (len(values) - 1)
    edges = (-1 - cell, 1 + cell, -1 - cell, 1 + cell)
    image = axis.imshow(values, origin="lower", extent=edges, cmap=colors, vmin=low, vmax=high)
    axis.set_title(title, fontsize=10)
    axis.set(xlabel="x", ylabel="z", xticks=(-1, 0, 1), yticks=(-1, 0, 1))
    axis.figure.colorbar(image, ax=axis, shrink=0.8)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file; an older one is replaced."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)  # a Figure without pyplot needs no display

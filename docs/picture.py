"""Draw the picture on top of README: ``python docs/picture.py`` writes ``docs/operator.svg``.

Left: the features of a cloud on a grid, and the weights of one query. Right: time against the number of
points, from the newest results of one GPU.
"""

from pathlib import Path

import matplotlib
import numpy as np
import torch
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from matplotlib.ticker import FixedLocator, NullLocator
from trimesh import Trimesh

from pointproj import knn, knn_aggregate
from pointproj.benchmark.results import OK, Row, read_rows, select
from pointproj.data.furniture import make_furniture

PROJECT = Path(__file__).resolve().parent.parent
PICTURE = PROJECT / "docs/operator.svg"

K, SIGMA = 6, 0.06
SPACING, SIDE = 0.075, 19  # of the cloud's points; grid points along an edge
CENTER = (0.08, -0.14)  # of the cloud
QUERY = 11 * SIDE + 7  # row in the grid
LENS, RADIUS, ZOOM = np.array((-0.45, 0.47)), 0.5, 2.45  # the circle that shows the query's neighbours larger
COLORS, INK, GREY, LINE = "viridis", "#1f2933", "#52606d", "#e4e7eb"
# Implementation, its label, the label's height above the line's end in points, the line's colour and width.
LINES = (
    ("torch", "plain torch", 0, "#7b8794", 1.5),
    ("PhysicsNeMo", "PhysicsNeMo", 6, "#a87a00", 1.5),
    ("cuML", "cuML", -6, "#7b4ea3", 1.5),
    ("jz-tree", "jz-tree", 0, "#2b6cb0", 1.5),
    ("warp", "pointproj: warp", 6, "#e8833a", 2.6),
    ("native", "pointproj: native", -7, "#c1121f", 2.6),
)


def newest(files: list[Path]) -> list[Row]:
    """Self-kNN on uniform points, from the newest file of a GPU that has other libraries beside ours."""
    found = [select(read_rows(file), workload="scaling_uniform", operator="knn", status=OK) for file in files]
    compared = [rows for rows in found if any(row.kind == "peer" and row.cuda for row in rows)]
    return max(compared, key=lambda rows: rows[0].date)


def outline() -> Float[np.ndarray, "n 2"]:
    """Points on the outline of a sofa's cross-section, in [-1, 1]^2."""
    made = make_furniture("sofa", 23)
    solid = Trimesh(made.vertices, made.faces)
    left, right = solid.bounds[:, 0]
    line = max(solid.section([1, 0, 0], [0.65 * left + 0.35 * right, 0, 0]).discrete, key=len)[:, 1:]
    low, high = line.min(0), line.max(0)
    line = 1.64 * (line - (low + high) / 2) / (high - low).max() + CENTER
    lengths = np.concatenate([[0], np.linalg.norm(np.diff(line, axis=0), axis=1).cumsum()])
    places = np.arange(0, lengths[-1] - SPACING / 2, SPACING)
    places += np.random.default_rng(1).uniform(-0.2, 0.2, len(places)) * SPACING
    return np.stack([np.interp(places, lengths, line[:, axis]) for axis in (0, 1)], axis=1)


def draw_weights(axis: Axes) -> None:
    """Draw a cloud, its features on a grid, and the neighbours and weights of one query."""
    cloud = outline()
    features = np.sin(4.5 * cloud[:, 0]) + np.cos(4 * cloud[:, 1] - 0.5)
    ticks = np.linspace(-1, 1, SIDE)
    grid = np.stack(np.meshgrid(ticks, ticks, indexing="ij"), axis=-1).reshape(-1, 2)
    points = torch.tensor(grid), torch.tensor(cloud)
    distances, neighbors = (found[QUERY].numpy() for found in knn(*points, K))
    weights = np.exp(-distances / SIGMA)
    weights /= weights.sum()
    carried = knn_aggregate(*points, torch.tensor(features)[:, None], K, sigma=SIGMA)[:, 0].numpy()

    scale = {"cmap": COLORS, "vmin": features.min(), "vmax": features.max()}
    shown = np.linalg.norm(grid - LENS, axis=1) > RADIUS + 0.04
    axis.scatter(*grid[shown].T, c=carried[shown], marker="s", s=27, linewidths=0, alpha=0.6, **scale)
    axis.scatter(*cloud.T, c=features, s=17, edgecolors="white", linewidths=0.5, zorder=3, **scale)

    center = (grid[QUERY] + cloud[neighbors].mean(0)) / 2
    _draw_lens(axis, center)
    query, *ends = ZOOM * (np.stack([grid[QUERY], *cloud[neighbors]]) - center) + LENS
    for end, weight in zip(ends, weights, strict=True):
        axis.plot(
            *np.stack([query, end]).T, color=INK, linewidth=28 * weight, zorder=6, solid_capstyle="butt"
        )
        away = end + 0.1 * (end - query) / np.linalg.norm(end - query)
        axis.text(*away, f"{100 * weight:.0f}%", fontsize=7.5, color=INK, ha="center", va="center", zorder=8)
    large = {"linewidths": 1, "zorder": 7, **scale}
    axis.scatter(*np.transpose(ends), c=features[neighbors], s=65, edgecolors="white", **large)
    axis.scatter(*query, c=carried[QUERY], s=110, marker="s", edgecolors=INK, **large)
    axis.set(xlim=(-1.04, 1.04), ylim=(-1.04, 1.04), aspect="equal")
    axis.set_axis_off()
    _title(
        axis,
        "Features of a cloud (●), carried onto a grid (■)",
        "weights: exp(-distance / σ), divided by their sum",
    )


def _draw_lens(axis: Axes, center: Float[np.ndarray, " 2"]) -> None:
    """Draw a small circle around ``center``, the large circle, and the two lines that join them."""
    circle = {"edgecolor": GREY, "linewidth": 1}
    axis.add_patch(Circle(center, RADIUS / ZOOM, facecolor="none", zorder=4, **circle))
    axis.add_patch(Circle(LENS, RADIUS, facecolor="white", zorder=5, **circle))
    ahead = LENS - center
    across = np.array([-ahead[1], ahead[0]]) / np.linalg.norm(ahead)
    for side in (-across, across):
        axis.plot(
            *np.transpose([center + side * RADIUS / ZOOM, LENS + side * RADIUS]), color=GREY, linewidth=0.6
        )


def draw_times(axis: Axes, rows: list[Row]) -> None:
    """Draw time against the number of points, of each implementation in its fastest execution."""
    for name, label, height, color, width in LINES:
        found = sorted(select(rows, implementation=name), key=lambda row: (row.references, -row.p50_ms))
        times = {row.references: row.p50_ms for row in found}  # the last of a size is the fastest
        axis.plot(*zip(*times.items(), strict=True), color=color, linewidth=width, marker="o", markersize=3.5)
        weight = "bold" if label.startswith("pointproj") else "normal"
        how = {"textcoords": "offset points", "va": "center", "color": color, "weight": weight}
        axis.annotate(label, [*times.items()][-1], (8, height), **how)
    axis.set(xscale="log", yscale="log", xlim=(7e3, 5e9), ylim=(0.03, 2500))
    axis.xaxis.set_major_locator(FixedLocator([10**n for n in range(4, 9)]))
    axis.yaxis.set_major_locator(FixedLocator([0.1, 1, 10, 100, 1000]))
    axis.set_yticklabels(["0.1 ms", "1 ms", "10 ms", "100 ms", "1 s"])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_minor_locator(NullLocator())
    axis.grid(axis="y", color=LINE, linewidth=0.8)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(GREY)
    axis.tick_params(length=0, labelcolor=GREY)
    axis.set_xlabel("N", color=GREY, loc="center")
    _title(
        axis,
        f"Time to find the {rows[0].k} nearest neighbours of N points",
        f"one {rows[0].device}; calls over 2 s are left out",
    )


def _title(axis: Axes, title: str, subtitle: str) -> None:
    axis.set_title(f"{title}\n", loc="left", color=INK, weight="bold", fontsize=9.5)
    axis.text(0, 1.025, subtitle, transform=axis.transAxes, color=GREY, fontsize=8.5)


def main() -> None:
    rows = newest(sorted((PROJECT / "benchmarks").glob("*.csv")))
    matplotlib.rcParams.update({"svg.hashsalt": "pointproj", "font.size": 9})  # the same file in every run
    figure = Figure(figsize=(8.8, 4.4), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.08))
    draw_weights(left)
    draw_times(right, rows)
    figure.savefig(PICTURE, metadata={"Date": None, "Description": f"commit {rows[0].commit}"})


if __name__ == "__main__":
    main()

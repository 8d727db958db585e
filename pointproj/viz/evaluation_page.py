"""Results of an evaluation: a table, CSV files, and a page of pictures, with the lowest IoU first."""

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Template
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from pointproj.geometry.files.writing import replacing
from pointproj.geometry.metrics import METRICS, Measured
from pointproj.geometry.well_posed import WELL_POSED
from pointproj.viz.scenes import viewer

COLUMNS = {
    "class": "class of the meshes; last, all meshes with well-posed labels, and all meshes",
    "samples": "how the mesh was sampled, and the number of points in the cloud",
    "method": "the network, or a baseline",
    "meshes": "number of meshes in the means",
    "well posed": f"number of these whose label agrees with two flood fills: IoU of {WELL_POSED} or more",
    "IoU, grid": "intersection over union of the reconstruction and the label, on the query grid",
    "IoU": "the same at 100,000 random points of the cube",
    "Chamfer-L1": "mean distance between both surfaces, in tenths of the longest side: lower is better",
    "F-score": "share of each surface within 1% of the longest side of the other surface, as harmonic mean",
    "normals": "mean absolute cosine between the normals of nearest samples",
    "s": "seconds for each reconstruction",
}
"""Headings of the table, and their meanings."""

WELL_POSED_MESHES = "well posed"
HEADINGS = [*COLUMNS]
NAMES = 3  # the first columns, which have words
NOTE = "\n".join(f"{heading}: {COLUMNS[heading]}" for heading in HEADINGS[NAMES:])
MOST_SHOWN = 50  # meshes on the page, which includes all pictures and scenes


def summary(results: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return means by class, then over well-posed meshes and over all.

    Rows have ``class`` (or :data:`WELL_POSED_MESHES`, ``"all"``), ``samples``, ``points``, ``method``,
    ``meshes``, ``well_posed`` (the number of well-posed meshes), the metrics and ``seconds``.
    """
    kinds = list(dict.fromkeys((r.samples, r.points, r.method) for r in results))
    classes = sorted({r.class_name for r in results})
    groups = {name: [r for r in results if r.class_name == name] for name in classes}
    groups |= {WELL_POSED_MESHES: [*filter(_is_well_posed, results)], "all": results}
    rows = []
    for group, of_group in groups.items():
        for samples, points, method in kinds:
            chosen = [r for r in of_group if (r.samples, r.points, r.method) == (samples, points, method)]
            if chosen:
                row = {"class": group, "samples": samples, "points": points, "method": method}
                counts = {"meshes": len(chosen), "well_posed": sum(map(_is_well_posed, chosen))}
                means = {key: fmean(r.values[key] for r in chosen) for key in METRICS}
                rows.append({**row, **counts, **means, "seconds": fmean(r.seconds for r in chosen)})
    return rows


def summary_table(results: Sequence[Measured]) -> str:
    """Return :func:`summary` as a table for a console."""
    table = Table()
    for heading in HEADINGS[:NAMES]:
        table.add_column(heading)
    for heading in HEADINGS[NAMES:]:
        table.add_column(heading, justify="right")
    shown = None
    for row in summary(results):
        group, *others = _cells(row)
        if group != shown:
            table.add_section()
        table.add_row(group if group != shown else "", *others)
        shown = group
    buffer = io.StringIO()
    Console(file=buffer, width=130, color_system=None).print(table)
    return f"{buffer.getvalue().rstrip()}\n{NOTE}"


def write_summary(folder: Path, results: Sequence[Measured]) -> None:
    """Write the table of :func:`summary` as ``summary.csv`` and, for documents, ``summary.md``."""
    rows = summary(results)
    write_rows(folder / "summary.csv", rows)
    right = len(HEADINGS) - NAMES
    lines = [HEADINGS, ["---"] * NAMES + ["---:"] * right, *map(_cells, rows)]
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    with replacing(folder / "summary.md") as temporary:
        temporary.write_text(f"{text}\n{NOTE}\n", encoding="utf-8")


def write_csv(path: Path, results: Sequence[Measured], facts: Mapping[str, Any]) -> None:
    """Write one row for each mesh and method; ``facts`` are further columns, the same in each row."""
    rows = []
    for result in results:
        row = {"class": result.class_name, "mesh": result.name, "samples": result.samples}
        row |= {"points": result.points, "method": result.method, "label_agreement": result.label_agreement}
        rows.append({**row, **result.values, "seconds": result.seconds, **facts})
    write_rows(path, rows)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file; the first row has the names of all columns."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()})


def write_page(path: Path, results: Sequence[Measured], facts: Mapping[str, Any]) -> None:
    """Write an HTML page of the meshes, with the lowest IoU first; it needs no other file and no network.

    Parameters
    ----------
    path : Path
        File to write. Its folder has ``pictures/NAME.png`` and ``views/NAME/TITLE.glb``, which are copied
        into the page.
    results : sequence of Measured
        The meshes are ordered by their IoU with the samples and method of the first result.
    facts : mapping
        Facts to list below the title.
    """
    first = results[0].samples, results[0].method
    meshes = sorted((r for r in results if (r.samples, r.method) == first), key=lambda r: r.values["iou"])
    render_page(
        path,
        title=f"Reconstruction of {len(meshes)} meshes",
        facts=facts,
        columns=COLUMNS,
        rows=[(row["class"], _cells(row)) for row in summary(results)],
        judged=f"{first[1]}, {first[0]} samples",
        histogram=data_url(_histogram(results)),
        meshes=[_shown(path.parent, mesh, results) for mesh in meshes[:MOST_SHOWN]],
    )


def render_page(path: Path, **content: Any) -> None:
    """Write the page ``evaluation.html`` with its content: title, facts, columns, rows and meshes."""
    template = (Path(__file__).parent / "evaluation.html").read_text(encoding="utf-8")
    page = Template(template, autoescape=True).render(viewer=viewer(), **content)
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _shown(folder: Path, mesh: Measured, results: Sequence[Measured]) -> dict[str, Any]:
    """Return the text, scenes and picture of a mesh for the page."""
    of_mesh = [r for r in results if (r.class_name, r.name) == (mesh.class_name, mesh.name)]
    posed = "" if _is_well_posed(mesh) else "not "
    lines = [f"label: IoU {mesh.label_agreement:.3f} with flood fills from outside, so {posed}well posed"]
    for result in of_mesh:
        values = ", ".join(f"{METRICS[key]} {value:.3f}" for key, value in result.values.items())
        lines.append(f"{result.method}, {result.samples}, {result.points:,} points: {values}")
    shown = {r.method: f"{r.method}: IoU {r.values['iou']:.3f}" for r in of_mesh if r.samples == mesh.samples}
    titles = {"cloud": f"cloud: {mesh.points:,} points", **shown, "label": "label", "file": "file"}
    files = {folder / "views" / mesh.name / f"{name}.glb": title for name, title in titles.items()}
    views = [(title, base64.b64encode(file.read_bytes()).decode()) for file, title in files.items()]
    picture = data_url((folder / "pictures" / f"{mesh.name}.png").read_bytes())
    return {"name": mesh.name, "lines": lines, "views": views, "picture": picture}


def _histogram(results: Sequence[Measured]) -> bytes:
    """Draw a histogram of the meshes' IoU, with a line for each method and kind of samples."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    axis = figure.subplots()
    for samples, method in dict.fromkeys((r.samples, r.method) for r in results):
        values = [r.values["iou"] for r in results if (r.samples, r.method) == (samples, method)]
        axis.hist(values, bins=20, range=(0, 1), histtype="step", linewidth=1.5, label=f"{method}, {samples}")
    axis.set(xlabel="IoU", ylabel="meshes", xlim=(0, 1))
    axis.legend(loc="upper left")
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    return drawn.getvalue()


def data_url(png: bytes) -> str:
    """Return a picture as an address for an HTML page."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _is_well_posed(result: Measured) -> bool:
    return result.label_agreement >= WELL_POSED


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a row, one for each heading."""
    samples = f"{row['samples']}, {row['points']:,}"
    counts = str(row["meshes"]), str(row["well_posed"])
    means = [f"{row[key]:.3f}" for key in METRICS]
    return [row["class"], samples, row["method"], *counts, *means, f"{row['seconds']:.2f}"]

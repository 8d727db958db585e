"""Results of an evaluation for readers: a table, a CSV file, and a page of pictures, the lowest IoU first."""

import csv
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from pointproj.geometry.files.writing import replacing
from pointproj.geometry.metrics import METRICS, Measured

NOTE = (
    "IoU on the query grid and at 100,000 random points of the cube; Chamfer-L1 in tenths of the longest "
    "side; F-score at 1% of the longest side; normals: mean absolute cosine. Means over meshes."
)

STYLE = """
body { font-family: sans-serif; margin: 2em; max-width: 80em; }
table { border-collapse: collapse; } td, th { padding: 0.2em 0.8em; text-align: right; }
td:first-child, th:first-child, td:nth-child(2), th:nth-child(2) { text-align: left; }
tr.all { border-top: 1px solid; font-weight: bold; } img { max-width: 100%; } h2 { margin-bottom: 0; }
"""


def summary(results: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return means by class and method, then over all meshes.

    Parameters
    ----------
    results : sequence of Measured

    Returns
    -------
    list of dict
        ``class_name`` (``"all"`` for the last ones), ``method``, ``meshes``, the metrics and ``seconds``.
    """
    methods = list(dict.fromkeys(result.method for result in results))
    classes = sorted({result.class_name for result in results})
    rows = []
    for class_name in (*classes, "all"):
        for method in methods:
            chosen = [r for r in results if r.method == method and class_name in (r.class_name, "all")]
            if chosen:
                means = {key: fmean(r.values[key] for r in chosen) for key in METRICS}
                row = {"class_name": class_name, "method": method, "meshes": len(chosen)}
                rows.append({**row, **means, "seconds": fmean(r.seconds for r in chosen)})
    return rows


def summary_table(results: Sequence[Measured]) -> str:
    """Lay out :func:`summary` as a table for a console.

    Parameters
    ----------
    results : sequence of Measured

    Returns
    -------
    str
        Several lines.
    """
    table = Table()
    for name in ("class", "method"):
        table.add_column(name)
    for name in ("meshes", *METRICS.values(), "s"):
        table.add_column(name, justify="right")
    shown = None
    for row in summary(results):
        if row["class_name"] != shown:
            table.add_section()
        first = row["class_name"] if row["class_name"] != shown else ""
        shown = row["class_name"]
        table.add_row(first, row["method"], *_numbers(row))
    buffer = io.StringIO()
    Console(file=buffer, width=110, color_system=None).print(table)
    return f"{buffer.getvalue().rstrip()}\n{NOTE}"


def write_csv(path: Path, results: Sequence[Measured], facts: Mapping[str, Any]) -> None:
    """Write one row for each mesh and method.

    Parameters
    ----------
    path : Path
    results : sequence of Measured
    facts : mapping
        Further columns, the same in each row.
    """
    buffer = io.StringIO(newline="")
    columns = ["class", "mesh", "method", *METRICS, "seconds", *facts]
    writer = csv.DictWriter(buffer, columns)
    writer.writeheader()
    for result in results:
        names = {"class": result.class_name, "mesh": result.name, "method": result.method}
        values = {key: f"{value:.6g}" for key, value in result.values.items()}
        writer.writerow({**names, **values, "seconds": f"{result.seconds:.4g}", **facts})
    with replacing(path) as temporary:
        temporary.write_text(buffer.getvalue(), encoding="utf-8", newline="")


def write_page(path: Path, results: Sequence[Measured], facts: Mapping[str, Any]) -> None:
    """Write an HTML page with the table and ``pictures/NAME.png`` of each mesh, the lowest IoU first.

    Parameters
    ----------
    path : Path
    results : sequence of Measured
        The meshes are ordered by the IoU of the first result's method.
    facts : mapping
        Named below the title.
    """
    first_method = results[0].method
    meshes = sorted((r for r in results if r.method == first_method), key=lambda r: r.values["iou"])
    headings = "".join(f"<th>{name}</th>" for name in ("class", "method", "meshes", *METRICS.values(), "s"))
    lines = [f'<!doctype html><meta charset="utf-8"><title>Reconstructions</title><style>{STYLE}</style>']
    lines.append(f"<h1>Reconstruction of {len(meshes)} meshes</h1><p>{html.escape(_listed(facts))}</p>")
    lines.append(f"<table><tr>{headings}</tr>")
    for row in summary(results):
        cells = "".join(f"<td>{cell}</td>" for cell in (row["class_name"], row["method"], *_numbers(row)))
        lines.append(f'<tr class="{"all" if row["class_name"] == "all" else "one"}">{cells}</tr>')
    lines.append(f"</table><p>{NOTE}</p>")
    for result in meshes:
        values = ", ".join(f"{METRICS[key]} {value:.3f}" for key, value in result.values.items())
        name = html.escape(result.name)
        lines.append(f'<h2>{name}</h2>{values}<br><img src="pictures/{name}.png" alt="{name}">')
    with replacing(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _numbers(row: Mapping[str, Any]) -> list[str]:
    return [str(row["meshes"]), *(f"{row[key]:.3f}" for key in METRICS), f"{row['seconds']:.2f}"]


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())

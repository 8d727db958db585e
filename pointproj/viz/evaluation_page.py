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
from pointproj.geometry.well_posed import WELL_POSED

NOTE = (
    "IoU on the query grid and at 100,000 random points of the cube; Chamfer-L1 in tenths of the longest "
    "side; F-score at 1% of the longest side; normals: mean absolute cosine. Means over meshes. Well posed: "
    f"two floods from outside agree with the label, IoU {WELL_POSED} or more."
)

WELL_POSED_MESHES = "well posed"
HEADINGS = ["class", "samples", "method", "meshes", "well posed", *METRICS.values(), "s"]
NAMES = 3  # the first of these are words

STYLE = """
body { font-family: sans-serif; margin: 2em; max-width: 80em; }
table { border-collapse: collapse; } td, th { padding: 0.2em 0.8em; text-align: right; }
td:nth-child(-n + 3), th:nth-child(-n + 3) { text-align: left; }
tr.all { border-top: 1px solid; font-weight: bold; } img { max-width: 100%; } h2 { margin-bottom: 0; }
"""


def summary(results: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return means by class, then over well-posed meshes and over all.

    Parameters
    ----------
    results : sequence of Measured

    Returns
    -------
    list of dict
        ``class`` (or :data:`WELL_POSED_MESHES`, ``"all"``), ``samples``, ``points``, ``method``, ``meshes``,
        ``well_posed`` (how many of them are), the metrics and ``seconds``.
    """
    kinds = list(dict.fromkeys((r.samples, r.points, r.method) for r in results))
    rows = []
    for group in (*sorted({r.class_name for r in results}), WELL_POSED_MESHES, "all"):
        for samples, points, method in kinds:
            kind = samples, points, method
            chosen = [r for r in results if (r.samples, r.points, r.method) == kind and _belongs(r, group)]
            if chosen:
                row = {"class": group, "samples": samples, "points": points, "method": method}
                counts = {"meshes": len(chosen), "well_posed": sum(map(_is_well_posed, chosen))}
                means = {key: fmean(r.values[key] for r in chosen) for key in METRICS}
                rows.append({**row, **counts, **means, "seconds": fmean(r.seconds for r in chosen)})
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
    """Write the table of :func:`summary` as ``summary.csv`` and, for documents, ``summary.md``.

    Parameters
    ----------
    folder : Path
    results : sequence of Measured
    """
    rows = summary(results)
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, list(rows[0]))
    writer.writeheader()
    for row in rows:
        writer.writerow(row | {key: f"{v:.6g}" for key, v in row.items() if isinstance(v, float)})
    right = len(HEADINGS) - NAMES
    lines = [HEADINGS, ["---"] * NAMES + ["---:"] * right, *map(_cells, rows)]
    text = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    for name, content in (("summary.csv", buffer.getvalue()), ("summary.md", f"{text}\n{NOTE}\n")):
        with replacing(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8", newline="")


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
    names = "class", "mesh", "samples", "points", "method", "label_agreement"
    columns = [*names, *METRICS, "seconds", *facts]
    writer = csv.DictWriter(buffer, columns)
    writer.writeheader()
    for result in results:
        names = {"class": result.class_name, "mesh": result.name, "samples": result.samples}
        names |= {"points": result.points, "method": result.method}
        names["label_agreement"] = f"{result.label_agreement:.4g}"
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
        The meshes are ordered by the IoU of the first result's samples and method.
    facts : mapping
        Named below the title.
    """
    first = results[0].samples, results[0].method
    meshes = sorted((r for r in results if (r.samples, r.method) == first), key=lambda r: r.values["iou"])
    headings = "".join(f"<th>{name}</th>" for name in HEADINGS)
    lines = [f'<!doctype html><meta charset="utf-8"><title>Reconstructions</title><style>{STYLE}</style>']
    lines.append(f"<h1>Reconstruction of {len(meshes)} meshes</h1><p>{html.escape(_listed(facts))}</p>")
    lines.append(f"<table><tr>{headings}</tr>")
    for row in summary(results):
        cells = "".join(f"<td>{cell}</td>" for cell in _cells(row))
        lines.append(f'<tr class="{row["class"]}">{cells}</tr>')
    lines.append(f"</table><p>{NOTE}</p>")
    for result in meshes:
        values = ", ".join(f"{METRICS[key]} {value:.3f}" for key, value in result.values.items())
        name = html.escape(result.name)
        posed = "" if _is_well_posed(result) else "; the label is not well posed"
        lines.append(f'<h2>{name}</h2>{values}{posed}<br><img src="pictures/{name}.png" alt="{name}">')
    with replacing(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _belongs(result: Measured, group: str) -> bool:
    return group in (result.class_name, "all") or (group == WELL_POSED_MESHES and _is_well_posed(result))


def _is_well_posed(result: Measured) -> bool:
    return result.label_agreement >= WELL_POSED


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Cells of a row, one for each of the headings."""
    samples = f"{row['samples']}, {row['points']:,}"
    counts = str(row["meshes"]), str(row["well_posed"])
    means = [f"{row[key]:.3f}" for key in METRICS]
    return [row["class"], samples, row["method"], *counts, *means, f"{row['seconds']:.2f}"]


def _listed(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())

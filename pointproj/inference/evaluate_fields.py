"""Measure a network of target=field on its test samples: a table, and a page of pictures."""

import base64
import io
import logging
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pointproj.data.batches import collate
from pointproj.data.errors import DataError
from pointproj.data.fields.dataset import FieldDataset, prepare_fields
from pointproj.inference.trained_model import CPU_POINTS, TrainedModel, load_trained
from pointproj.runtime.devices import to_device
from pointproj.runtime.progress_bar import progress
from pointproj.runtime.run_folder import require_writable
from pointproj.training.baselines import baselines
from pointproj.training.field_measures import METRIC, FieldMeasures
from pointproj.training.networks import with_features
from pointproj.training.validation import Predictor
from pointproj.viz.evaluation_page import MOST_SHOWN, data_url, render_page, write_rows
from pointproj.viz.fields import draw_fields, write_views

log = logging.getLogger(__name__)

NETWORK = "network"
MEANINGS = {
    METRIC: "root of the integral of |error|^2 over that of |truth|^2; on surfaces by area; lower is better",
    "mean_absolute_error": "mean absolute error, in the unit of the field",
    "r2": "1 less the integral of |error|^2 over that of |truth - mean|^2",
    "force_error": "error of the integral of value times normal, divided by the integral of |value|",
}


def evaluate_fields(path: Path, out: Path, device: str, limit: int | None = None) -> dict[str, Any]:
    """Measure the test samples of a run by its network and the baselines, write all, and return the means.

    Files: ``results.csv``, ``index.html``, ``pictures/NAME.png`` and ``views/NAME/*.glb``.
    """
    require_writable(out)
    trained = load_trained(path, device, targets=("field",))
    data = prepare_fields(trained.config)
    if data.statistics != trained.statistics:
        raise DataError(
            "the training samples are not those that the checkpoint was trained with: its statistics differ; "
            "restore data.root and data.fields"
        )
    backend = trained.model.backend
    methods = {NETWORK: predictor(trained), **baselines(trained.config, data, trained.device, backend)}
    measure, rows, pages = FieldMeasures(data.statistics), [], []
    count = min(limit or len(data.test), len(data.test))
    with progress("evaluating", count, unit="samples") as advance:
        for index in range(count):
            batch = collate([data.test[index]])
            on_device = to_device(batch, trained.device)
            predicted = {name: predict(on_device) for name, predict in methods.items()}
            for name, values in predicted.items():
                errors = {key: each.item() for key, each in measure(values, on_device).items()}
                rows.append({"sample": batch["name"][0], "method": name, **errors})
            shown = _picture(out, data.test, batch, predicted[NETWORK].cpu())
            pages.append((rows[-len(methods)][METRIC], shown))
            advance(1)
    write_rows(out / "results.csv", rows)
    keys = [key for key in rows[0] if key not in ("sample", "method")]
    means = {
        method: {key: fmean(row[key] for row in rows if row["method"] == method) for key in keys}
        for method in methods
    }
    worst = [page for _, page in sorted(pages, key=lambda page: -page[0])[:MOST_SHOWN]]
    _write_page(out, path, means, worst)
    log.info("%s", _table(means, count))
    log.info("pictures, worst first: %s; in its folder results.csv, pictures/, views/", out / "index.html")
    return means


def predictor(trained: TrainedModel) -> Predictor:
    """Return the network's prediction for batches of one sample, in bounded memory."""

    @torch.inference_mode()
    def predict(batch: dict[str, Any]) -> Tensor:
        shown, parts = with_features(batch, trained.config.projector, trained.statistics), []
        encoding = trained.model.encode(shown["reference_points"], shown["features"])
        places = (shown[name].split(CPU_POINTS, dim=1) for name in ("query_points", "query_features"))
        for points, features in zip(*places, strict=True):
            parts.append(trained.model.decode(points, encoding, query_features=features))
        return torch.cat(parts, dim=1).squeeze(-1).float()

    return predict


def _picture(out: Path, test: FieldDataset, batch: dict[str, Any], prediction: Tensor) -> dict[str, Any]:
    """Draw a sample, and return its part of the page."""
    name, points, statistics = batch["name"][0], batch["query_points"][0].numpy(), test.statistics
    fields = {
        title: statistics.split(statistics.in_units(values[0].reshape(len(points), -1)))
        for title, values in (("true", batch["target"]), ("predicted", prediction))
    }
    picture = out / "pictures" / f"{name}.png"
    draw_fields(picture, name, points, fields)
    views = []
    for field in statistics.fields:
        pair = fields["true"][field], fields["predicted"][field]
        files = write_views(out / "views" / name / field, points, *pair)
        views += [
            (f"{field}, {title}", base64.b64encode(f.read_bytes()).decode()) for title, f in files.items()
        ]
    return {"name": name, "lines": [], "views": views, "picture": data_url(picture.read_bytes())}


def _write_page(
    out: Path, path: Path, means: dict[str, dict[str, float]], samples: list[dict[str, Any]]
) -> None:
    keys = [*means[NETWORK]]
    meanings = {key.replace("_", " "): MEANINGS[key.split(" ")[-1]] for key in keys}
    columns = {"method": "the network, or a baseline", **meanings}
    rows = [(name, [name, *(f"{of[key]:.4g}" for key in keys)]) for name, of in means.items()]
    title = f"Fields of {len(samples)} samples"
    render_page(
        out / "index.html",
        title=title,
        facts={"checkpoint": path},
        columns=columns,
        rows=rows,
        meshes=samples,
    )


def _table(means: dict[str, dict[str, float]], count: int) -> str:
    table = Table("field and measure", box=box.ASCII, title=f"means over {count} test samples")
    for name in means:
        table.add_column(name, justify="right")
    for key in means[NETWORK]:
        table.add_row(key.replace("_", " "), *(f"{of[key]:.4g}" for of in means.values()))
    buffer = io.StringIO()
    Console(file=buffer, width=130, color_system=None).print(table)
    return buffer.getvalue().rstrip()

"""Reports of a run: its pace, and a comparison of the model with a baseline, as text, JSON and pictures."""

import io
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pointproj.config import TARGETS, Config
from pointproj.data.batches import collate
from pointproj.data.dataset import ShapeDataset
from pointproj.data.fields.dataset import FieldDataset
from pointproj.runtime.run_folder import RunFolder
from pointproj.training.checkpoint import Position
from pointproj.training.validation import Evaluation

log = logging.getLogger(__name__)


def comparison(trained: Evaluation, baseline: Evaluation, before: float) -> dict[str, Any]:
    """Compare the errors of model and baseline on the same meshes, for ``metrics.json``.

    ``before`` is the model's error on the validation meshes before its first step. In the result, ``ratio``
    is None if the baseline's error is 0.
    """
    baselines = baseline.by_class()
    return {
        "metric": trained.metric,
        **_compared(trained, baseline),
        "before_training": before,
        "measured": trained.means(),
        "baseline_measured": baseline.means(),
        "classes": {
            name: {"meshes": len(evaluation.meshes), **_compared(evaluation, baselines[name])}
            for name, evaluation in trained.by_class().items()
        },
    }


def _compared(trained: Evaluation, baseline: Evaluation) -> dict[str, float | None]:
    ratio = trained.error / baseline.error if baseline.error else None
    return {"metric_value": trained.error, "baseline": baseline.error, "ratio": ratio}


def text(compared: dict[str, Any], target_name: str, measured_on: str, baseline: str) -> str:
    """Return the result of :func:`comparison` as a table with one row for each class and one for all.

    ``measured_on``, such as ``"20 unseen meshes"``, is for the title. ``baseline`` says what it predicts.
    """
    table = Table("class", box=box.ASCII)  # readable in any encoding of the terminal
    for column in ("meshes", "network", "baseline", "network / baseline"):
        table.add_column(column, justify="right")
    meshes = sum(row["meshes"] for row in compared["classes"].values())
    for name, row in [*compared["classes"].items(), ("all", {**compared, "meshes": meshes})]:
        if name == "all":
            table.add_section()
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        table.add_row(name, str(row["meshes"]), f"{row['metric_value']:.5f}", f"{row['baseline']:.5f}", ratio)
    buffer = io.StringIO()
    Console(file=buffer, width=100, color_system=None).print(table)
    target = TARGETS[target_name]
    in_unit = f", in {target.unit}" if target.unit else ""
    title = f"{target_name}: {target.metric.replace('_', ' ')} on {measured_on}{in_unit}"
    note = f"baseline, which needs no training: {baseline}"
    others = [
        f"{_title(name)}: network {value:.3f}, baseline {compared['baseline_measured'][name]:.3f}\n"
        for name, value in compared["measured"].items()
        if name != target.metric
    ]
    return f"{title}\n{buffer.getvalue().rstrip()}\n{''.join(others)}{note}"


def fields_text(compared: dict[str, Any], target_name: str, measured_on: str, baseline: str) -> str:
    """Return the result of :func:`comparison` for fields: a table with a row for each measure of each field.

    The mean absolute error is in the unit of the field in its files. The other arguments are as for
    :func:`text`.
    """
    table = Table("field and measure", box=box.ASCII)
    for column in ("network", "baseline"):
        table.add_column(column, justify="right")
    for name, value in compared["measured"].items():
        shown = "all fields: relative L2" if name == compared["metric"] else name.replace("_", " ")
        table.add_row(shown, f"{value:.4g}", f"{compared['baseline_measured'][name]:.4g}")
    buffer = io.StringIO()
    Console(file=buffer, width=100, color_system=None).print(table)
    title = f"{TARGETS[target_name].title}: means over {measured_on}"
    return f"{title}\n{buffer.getvalue().rstrip()}\nbaseline, which needs no training: {baseline}"


def one_line(trained: Evaluation, baseline: Evaluation) -> str:
    """Return ``"error rate 0.0120, baseline 0.0313 (ratio 0.38); IoU 0.883"``: the metric, then the rest."""
    ratio = _compared(trained, baseline)["ratio"]
    line = f"{trained.metric.replace('_', ' ')} {trained.error:.5f}"
    line += f", baseline {baseline.error:.5f}" + ("" if ratio is None else f" (ratio {ratio:.2f})")
    # Names with a blank are measures of one field of several; the last table has these.
    means = trained.means().items()
    others = {name: value for name, value in means if name != trained.metric and " " not in name}
    return "; ".join([line, *(f"{_title(name)} {value:.3f}" for name, value in others.items())])


@torch.no_grad()
def draw(
    run: RunFolder,
    config: Config,
    position: Position,
    baseline: Evaluation,
    test: ShapeDataset,
    predict: Callable[[dict[str, Any]], Tensor],
) -> list[Path]:
    """Draw the losses, and ``training.pictures`` shapes at equal steps of the test set; return the files.

    ``baseline`` is its evaluation on the validation meshes. ``predict`` takes a batch on the CPU, and returns
    (1, Q) on any device.
    """
    from pointproj.viz import plots  # matplotlib takes seconds to import

    paths = [run.picture_path("losses")]
    plots.draw_losses(
        paths[0],
        loss_name=f"loss: {TARGETS[config.target.name].title}",
        losses=position.losses,
        metric_name=baseline.metric.replace("_", " "),
        errors=position.errors,
        baseline=baseline.error,
    )
    if isinstance(test, FieldDataset):
        return [*paths, *_draw_samples(run, config, test, predict)]
    count = min(config.training.pictures, len(test))
    for place in range(count):
        sample = test[place * len(test) // count]
        batch = {**collate([sample]), "query_points": test.query_points}
        paths.append(run.picture_path(sample["name"]))
        plots.draw_shape(
            paths[-1],
            name=sample["name"],
            target_name=config.target.name,
            reference_points=sample["reference_points"].numpy(),
            target=sample["target"].numpy(),
            prediction=predict(batch)[0].cpu().numpy(),
        )
    return paths


@torch.no_grad()
def sample_cloud(
    run: RunFolder,
    config: Config,
    test: ShapeDataset | FieldDataset,
    predict: Callable[[dict[str, Any]], Tensor],
) -> tuple[Path, Float[np.ndarray, "n 3"], Float[np.ndarray, "n 3"]]:
    """Write what is predicted of the first test sample as a cloud in 3-D; return file, points and colours.

    Of a field these are all points, coloured by the first channel; else grid points predicted to be inside,
    or those of the smallest distances, as many as the input has, coloured by height.
    """
    from pointproj.viz.renderings import height_colours, value_colours
    from pointproj.viz.scenes import write_scene

    if isinstance(test, FieldDataset):
        batch = collate([test.whole(0)])
        points = batch["query_points"][0].numpy()
        colours = value_colours(predict(batch)[0].reshape(len(points), -1)[:, 0].cpu().numpy())
    else:
        batch = {**collate([test[0]]), "query_points": test.query_points}
        values = predict(batch)[0].cpu()
        values = -values if TARGETS[config.target.name].output == "logit" else values.abs()
        points = test.query_points[values.argsort()[: batch["reference_points"].shape[1]]].numpy()
        colours = height_colours(points)
    path = run.picture_path(batch["name"][0]).with_suffix(".glb")
    write_scene(points, path, colours)
    return path, points, colours


def _draw_samples(
    run: RunFolder, config: Config, test: FieldDataset, predict: Callable[[dict[str, Any]], Tensor]
) -> Iterator[Path]:
    """Draw samples with fields, true and predicted; yield the files."""
    count = min(config.training.pictures, len(test))
    for place in range(count):
        yield draw_sample(run, test, place * len(test) // count, predict)


def draw_sample(
    run: RunFolder,
    data: FieldDataset,
    index: int = 0,
    predict: Callable[[dict[str, Any]], Tensor] | None = None,
) -> Path:
    """Draw the fields of a sample, and the predicted ones if there is a predictor; return the file."""
    from pointproj.viz.fields import draw_fields

    batch = collate([data.whole(index)])
    prediction = None if predict is None else predict(batch)
    points, statistics = batch["query_points"][0], data.statistics
    shown = {"true": batch["target"], "predicted": prediction}
    fields = {
        title: statistics.split(statistics.in_units(each[0].cpu().reshape(len(points), -1)))
        for title, each in shown.items()
        if each is not None
    }
    path = run.picture_path(batch["name"][0] if prediction is not None else f"sample-{batch['name'][0]}")
    draw_fields(path, batch["name"][0], points.numpy(), fields)
    return path


def _title(name: str) -> str:
    return "IoU" if name == "iou" else name.replace("_", " ")


class Interval(NamedTuple):
    """Pace of the steps since the last reading."""

    ms_per_step: float
    samples_per_second: float
    expected_ms: float  # of a coming step: without the first step, which may include compilation


class Pace:
    """Time of training steps, without validation and checkpoints."""

    def __init__(self) -> None:
        self._began = self._paused = time.perf_counter()
        self._steps = self._samples = 0
        self._first_seconds: float | None = None  # of the run's first step
        self._history: list[float] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the clock during the block."""
        self._began += time.perf_counter() - self._paused
        try:
            yield
        finally:
            self._paused = time.perf_counter()

    def count(self, samples: int) -> None:
        """Count one step over ``samples`` samples."""
        self._steps += 1
        self._samples += samples
        if self._first_seconds is None:
            self._first_seconds = time.perf_counter() - self._began

    def read(self) -> Interval:
        """Return the pace since the last reading, over at least one step, and begin a new interval.

        Call this while the clock runs, just after the device has finished the last counted step.
        """
        now, steps = time.perf_counter(), self._steps
        seconds = now - self._began
        ms = expected = seconds / steps * 1e3
        if not self._history and steps > 1:
            expected = (seconds - self._first_seconds) / (steps - 1) * 1e3
        interval = Interval(ms, self._samples / seconds, expected)
        self._history.append(ms)
        self._began, self._steps, self._samples = now, 0, 0
        return interval

    @property
    def ms_per_step(self) -> float | None:
        """Median over all intervals, so that compilation in the first has no influence; None without any."""
        return median(self._history) if self._history else None


def log_end(target_name: str, run: Path) -> None:
    """Log where the results of a run are, and the command that comes next."""
    log.info("report, pictures and checkpoints are in %s", run)
    if target_name == "udf":
        log.info("next: python -m pointproj predict %s FILE --out distances.vti", run)
    elif target_name != "random":  # whose network predicts nothing of use
        log.info("next: python -m pointproj evaluate %s", run)


def log_progress(
    config: Config, position: Position, total_steps: int, loss: float, lr: float, pace: Interval, memory: int
) -> None:
    """Log one line; ``memory`` is the most bytes in use so far."""
    epochs, step = config.training.epochs, position.step
    left = timedelta(seconds=round((total_steps - step) * pace.expected_ms / 1e3))
    log.info(
        f"epoch {position.epoch + 1:{len(str(epochs))}}/{epochs} {step / total_steps:4.0%}  loss {loss:.5f}  "
        f"lr {lr:.1e}  {pace.ms_per_step:.4g} ms/step  {pace.samples_per_second:.4g} samples/s  "
        f"{memory / 2**20:.0f} MiB  ETA {left}"
    )

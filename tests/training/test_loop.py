import dataclasses
import importlib.util
import json
import logging
import os
import re
import shutil
import signal
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pointproj.config import Config, KnnConfig
from pointproj.config.networks import AttentionConfig
from pointproj.config.schema import LoggerConfig
from pointproj.data.clouds import Sampling
from pointproj.data.dataset import PreparedData, Shape, ShapeDataset
from pointproj.geometry.meshes import query_grid
from pointproj.ops.backends import BackendUnavailable
from pointproj.runtime.devices import DeviceError
from pointproj.runtime.loggers import LoggerUnavailable
from pointproj.runtime.run_folder import RunError, RunFolder, read_json
from pointproj.training import checkpoint, execution, loop
from pointproj.training.divergence import TrainingDiverged
from pointproj.training.loop import train

GRID = 6


class Sphere:
    """Draws points of a sphere about the origin."""

    def __init__(self, radius):
        self.radius = radius

    def draw(self, count, generator):
        normals = generator.standard_normal((count, 3))
        normals = (normals / np.linalg.norm(normals, axis=1, keepdims=True)).astype(np.float32)
        return np.float32(self.radius) * normals, normals


def spheres(count, points=60, seed=0, resample=True):
    grid = torch.from_numpy(query_grid(GRID))
    radii = np.linspace(0.3, 0.9, count)
    distances = [(grid.norm(dim=1) - r).abs() for r in radii]
    of_each = enumerate(zip(radii, distances, strict=True))
    shapes = [Shape(f"sphere_{i}", ("even", "odd")[i % 2], i, Sphere(r), d) for i, (r, d) in of_each]
    return ShapeDataset(shapes, grid, samplings=[Sampling("area", points)], seed=seed, resample=resample)


def small_config():
    """A run of 12 steps in a second."""
    made = Config()
    made.backend.name, made.target.name = "torch", "udf"
    made.projector = KnnConfig(k=5, sigma=0.05, context=True, hidden_channels=8)
    made.data.name, made.data.grid, made.data.points = "furniture", GRID, 60
    made.optimizer.name, made.optimizer.lr, made.optimizer.clip = "adamw", 1e-2, 1.0
    made.optimizer.schedule, made.optimizer.warmup = "cosine", 0.1
    made.allocator.name, made.profiler.name, made.logger.name = "torch", "none", "none"
    made.device = "cpu"
    made.training.epochs, made.training.batch_size = 4, 2
    made.training.log_every, made.training.validate_every, made.training.pictures = 1, 2, 0
    return made


config = pytest.fixture(name="config")(small_config)


def prepared(*_):
    tests, validation = spheres(3, resample=False), spheres(2, resample=False)
    return PreparedData(spheres(5), tests, [("broken.off", "no faces")], validation)


@pytest.fixture(autouse=True)
def data(monkeypatch):
    monkeypatch.setattr(loop, "prepare", Mock(return_value=(made := prepared())))
    return made


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of the small config, and its metrics; tests leave it as it is."""
    run = RunFolder(tmp_path_factory.mktemp("finished"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "prepare", prepared)
        return run, train(small_config(), run)


def lines(run, split):
    rows = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["split"] == split]


def losses(run):
    return {row["step"]: row["loss"] for row in lines(run, "train")}


def stop_after(monkeypatch, count, number):
    """Send this process a signal after so many steps."""
    plain_step, taken = loop.TrainingStep.__call__, []

    def stopping_step(step, batch):
        plain_step(step, batch)
        taken.append(1)
        if len(taken) == count:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(loop.TrainingStep, "__call__", stopping_step)


def weights(run):
    return checkpoint.load(run.path / "last.pt")["model"]


def test_training_beats_what_needs_no_training_and_reports_both(config, tmp_path):
    run = RunFolder(tmp_path / "run")
    config.training.epochs, config.training.pictures = 30, 1
    metrics = train(config, run)
    assert metrics["metric"] == "mean_absolute_error"
    assert metrics["metric_value"] < 0.7 * metrics["baseline"]
    assert metrics["metric_value"] < metrics["before_training"]
    assert metrics["best"] <= metrics["validation"] < metrics["before_training"]
    assert (metrics["status"], metrics["backend"], metrics["device"], metrics["mode"]) == (
        "ok",
        "torch",
        "cpu",
        "eager",
    )
    assert metrics["left_out"] == [("broken.off", "no faces")]
    assert {name: row["meshes"] for name, row in metrics["classes"].items()} == {"even": 2, "odd": 1}
    assert read_json(run.path / "metrics.json")["metric_value"] == metrics["metric_value"]
    assert {path.name for path in (run.path / "pictures").iterdir()} == {"losses.png", "sphere_0.png"}
    assert (run.path / "best.pt").exists()


def test_the_first_thing_measured_is_the_untrained_model(finished):
    run, _ = finished
    first = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[0])
    assert (first["split"], first["step"], first["epoch"]) == ("validation", 0, 0)
    assert [row["step"] for row in lines(run, "validation")] == [0, 6, 12]
    assert sorted(losses(run)) == list(range(1, 13))


def test_test_meshes_are_looked_at_once_and_choose_nothing(config, tmp_path, data, monkeypatch):
    looked_at = []
    plain = loop.BatchLoader._batches

    def seen(self, dataset, **order):
        looked_at.append((dataset is data.test, dataset is data.validation))
        return plain(self, dataset, **order)

    monkeypatch.setattr(loop.BatchLoader, "_batches", seen)
    metrics = train(config, RunFolder(tmp_path / "run"))
    tests = [place for place, (is_test, _) in enumerate(looked_at) if is_test]
    assert tests == [len(looked_at) - 2, len(looked_at) - 1]  # of the model and of what needs no training
    assert sum(is_validation for _, is_validation in looked_at) == 1 + 3
    errors = [row["mean_absolute_error"] for row in lines(RunFolder(tmp_path / "run"), "validation")]
    assert metrics["best"] == min(errors[1:])
    assert metrics["validation"] == errors[-1] != metrics["metric_value"]


def test_without_validation_meshes_the_test_meshes_choose_and_a_warning_says_so(
    config, tmp_path, data, caplog, monkeypatch
):
    made = dataclasses.replace(data, validation=None)
    monkeypatch.setattr(loop, "prepare", lambda *_: made)
    metrics = train(config, RunFolder(tmp_path / "run"))
    assert metrics["validation"] == metrics["metric_value"]
    assert "best.pt is chosen by the test samples" in caplog.text


@pytest.mark.parametrize(("count", "number"), [(5, signal.SIGTERM), (8, signal.SIGINT)])
def test_a_stopped_run_continues_as_if_it_had_not_stopped(config, tmp_path, monkeypatch, count, number):
    whole, first, second = (RunFolder(tmp_path / "outputs" / name) for name in ("whole", "first", "second"))
    config.training.log_every = 2
    train(config, whole)
    (whole.path / "last.pt").rename(whole.path / "kept")

    with monkeypatch.context() as patch:
        stop_after(patch, count, number)
        with pytest.raises(KeyboardInterrupt):
            train(config, first)
    config.resume = "auto"
    metrics = train(config, second)

    assert losses(second) == losses(whole)  # those of the first run are taken over
    config.seed, config.resume = 1, None
    other = RunFolder(tmp_path / "other")
    train(config, other)
    assert losses(other) != losses(whole)
    assert max(losses(first), default=0) <= count
    expected = checkpoint.load(whole.path / "kept")["model"]
    assert all(torch.equal(weights(second)[name], expected[name]) for name in expected)
    assert metrics["metric_value"] == read_json(whole.path / "metrics.json")["metric_value"]
    assert metrics["before_training"] == read_json(whole.path / "metrics.json")["before_training"]


def test_a_finished_run_resumed_has_nothing_left_to_train(config, tmp_path, caplog, finished):
    (first, expected), second = finished, RunFolder(tmp_path / "second")
    config.resume = str(first.path)
    with caplog.at_level(logging.INFO):
        metrics = train(config, second)
    assert any("nothing is left to train" in record.message for record in caplog.records)
    assert any(
        f"resume    from {first.path / 'last.pt'}, in the new folder {second.path}" in m
        for m in caplog.messages
    )
    assert losses(second) == losses(first)
    assert metrics["metric_value"] == expected["metric_value"]
    assert (second.path / "best.pt").read_bytes() == (first.path / "best.pt").read_bytes()


def test_resume_auto_in_a_named_folder_leaves_other_runs_alone(config, tmp_path, finished):
    named = tmp_path / "outputs" / "named"
    shutil.copytree(finished[0].path, named.with_name("other"))
    config.resume = "auto"
    train(config, RunFolder(named, named=True))
    assert sorted(losses(RunFolder(named))) == list(range(1, 13))
    (named / "metrics.json").unlink()
    train(config, RunFolder(named, named=True))  # now it holds a run, which is continued
    assert (named / "metrics.json").exists()
    assert sorted(losses(RunFolder(named))) == list(range(1, 13))


def test_resume_auto_refuses_a_run_that_still_goes_on(config, tmp_path, finished):
    first = RunFolder(shutil.copytree(finished[0].path, tmp_path / "outputs" / "first"))
    config.resume = "auto"
    with first:
        first.claim("", continues=True)
        with pytest.raises(RunError, match=rf"first is in use by process {os.getpid()}"):
            train(config, RunFolder(tmp_path / "outputs" / "second"))


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_epochs_are_raised_on_resuming(config, tmp_path, data, caplog, schedule):
    config.optimizer.schedule, config.optimizer.warmup = schedule, 0.0
    run = RunFolder(tmp_path)
    train(config, run)
    config.training.epochs, config.resume = 6, str(tmp_path)
    metrics = train(config, run)
    assert metrics["steps"] == 18
    assert sorted(losses(run)) == list(range(1, 19))
    warned = any("training.epochs was 4 and is 6: the learning rate goes on" in m for m in caplog.messages)
    assert warned == (schedule == "cosine")


def test_training_starts_from_the_weights_of_another_run(config, tmp_path, finished, caplog):
    first, expected = finished
    config.training.weights = str(first.path)
    with caplog.at_level(logging.INFO):
        metrics = train(config, RunFolder(tmp_path / "second"))
    assert metrics["before_training"] == pytest.approx(expected["best"])
    assert any(re.search(r"best\.pt: (\d+) of \1 parts fit$", text) for text in caplog.messages)


def test_weights_that_do_not_fit_are_named_or_refused(config, tmp_path, finished, caplog):
    first, _ = finished
    config.training.weights = str(first.path / "last.pt")
    config.projector.context = not config.projector.context
    with caplog.at_level(logging.INFO):
        train(config, RunFolder(tmp_path / "second"))
    assert any(re.search(r"of \d+ parts fit; random: \S+ \(", text) for text in caplog.messages)

    content = checkpoint.load(first.path / "last.pt")
    name = next(iter(content["model"]))
    content["model"][name] = content["model"][name] * float("nan")
    checkpoint.save(tmp_path / "odd.pt", content, config)
    config.training.weights = str(tmp_path / "odd.pt")
    with pytest.raises(checkpoint.CheckpointError, match=rf"{re.escape(name)} holds NaN"):
        train(config, RunFolder(tmp_path / "third"))
    content["model"] = {"other": torch.zeros(3)}
    checkpoint.save(tmp_path / "odd.pt", content, config)
    with pytest.raises(checkpoint.CheckpointError, match="none of its 1 parts fits"):
        train(config, RunFolder(tmp_path / "fourth"))


refuses_to_prepare = Mock(side_effect=AssertionError("data was touched"))


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"resume": "nowhere.pt"}, checkpoint.CheckpointError, r"nowhere\.pt"),
        ({"device": "cuda"}, DeviceError, "device=cpu"),
        ({"logger": LoggerConfig("mlflow")}, LoggerUnavailable, r'pip install -e "\.\[mlflow\]"'),
        ({"logger": LoggerConfig("tensorboard")}, LoggerUnavailable, r'pip install -e "\.\[tensorboard\]"'),
    ],
)
def test_what_cannot_run_fails_before_data_is_read(config, tmp_path, monkeypatch, values, error, words):
    monkeypatch.setattr(loop, "prepare", refuses_to_prepare)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, value in values.items():
        setattr(config, name, value)
    with pytest.raises(error, match=words):
        train(config, RunFolder(tmp_path))


def test_an_unusable_backend_fails_before_data_is_read(config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "prepare", refuses_to_prepare)
    monkeypatch.setattr(execution, "resolve", Mock(side_effect=BackendUnavailable("not here")))
    with pytest.raises(BackendUnavailable, match="not here"):
        train(config, RunFolder(tmp_path))


def test_a_network_whose_operator_the_backend_lacks_fails_before_data_is_read(config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "prepare", refuses_to_prepare)
    config.projector, config.backend.name = AttentionConfig(), "warp"
    with pytest.raises(BackendUnavailable, match="'warp': has no attend operator; use one of native, torch"):
        train(config, RunFolder(tmp_path))


def test_a_loss_that_is_not_finite_stops_the_run_with_words(config, tmp_path):
    run = RunFolder(tmp_path)
    config.optimizer.lr, config.optimizer.clip, config.optimizer.schedule = 1e38, None, "constant"
    with pytest.raises(TrainingDiverged, match=r"optimizer\.lr \(now 1e\+38\)"):
        train(config, run)
    if (run.path / "last.pt").exists():
        assert all(tensor.isfinite().all() for tensor in weights(run).values())


@pytest.mark.parametrize(("target_name", "normals"), [("sdf", True), ("occupancy", False)])
def test_other_targets_train_and_report_their_measures(config, tmp_path, data, target_name, normals):
    for dataset in (data.train, data.test):
        for place, shape in enumerate(dataset.shapes):
            signed = dataset.query_points.norm(dim=1) - shape.source.radius
            values = signed if target_name == "sdf" else (signed < 0).float()
            dataset.shapes[place] = Shape(shape.name, shape.class_name, shape.identity, shape.source, values)
    config.target.name, config.projector.normals = target_name, normals
    config.training.epochs, config.training.validate_every, config.projector.hidden_channels = 60, 60, 32
    metrics = train(config, RunFolder(tmp_path))
    better = {"sdf": "sign_accuracy", "occupancy": "iou"}[target_name]
    assert metrics["measured"].keys() == {metrics["metric"], better}
    assert metrics["metric_value"] < 0.06  # of a cube of side 2, or of its grid points


def test_kept_neighbors_change_no_loss(config, tmp_path, monkeypatch):
    made = PreparedData(spheres(5, resample=False), spheres(3, resample=False), [])
    monkeypatch.setattr(loop, "prepare", lambda *_: made)
    runs = [RunFolder(tmp_path / name) for name in ("searched", "kept")]
    assert train(config, runs[0])["neighbors"] == "searched in each step"
    config.data.resample, config.projector.keep_neighbors, config.training.time_steps = False, True, 1
    assert train(config, runs[1])["neighbors"] == "kept"
    assert losses(runs[1]) == losses(runs[0])


def test_tensorboard_receives_metrics_and_pictures(config, tmp_path):
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    config.logger.name, config.training.pictures = "tensorboard", 1
    run = RunFolder(tmp_path)
    metrics = train(config, run)
    events = accumulators.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    logged = [event.value for event in events.Scalars("train/loss")]
    assert logged == pytest.approx(list(losses(run).values()), rel=1e-6)
    assert events.Scalars("test/mean_absolute_error")[-1].value == pytest.approx(metrics["metric_value"])
    assert set(events.Tags()["images"]) == {"losses", "sphere_0"}
    assert {"sphere_0_VERTEX", "sphere_0_COLOR"} <= {*events.Tags()["tensors"]}
    assert {"_hparams_/session_start_info", "_hparams_/experiment"} <= events.summary_metadata.keys()
    start = HParamsPluginData.FromString(
        events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    ).session_start_info
    assert start.hparams["optimizer.lr"].number_value == config.optimizer.lr
    assert start.hparams["data.points"].number_value == config.data.points


def test_wandb_offline_has_the_config_metrics_pictures_and_a_cloud(config, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    logged, given = [], {}
    init = wandb.init

    def recorded(**options):
        given.update(options)
        run = init(**options)
        log = run.log
        run.log = lambda values, **at: (logged.append(values), log(values, **at))
        return run

    monkeypatch.setattr(wandb, "init", recorded)
    config.logger.name, config.training.pictures = "wandb", 1
    metrics = train(config, RunFolder(tmp_path))
    assert (given["mode"], given["config"]["optimizer.lr"]) == ("offline", config.optimizer.lr)
    written = {key: value for values in logged for key, value in values.items()}
    assert written["test/mean_absolute_error"] == metrics["metric_value"]
    assert {"losses", "sphere_0", "sphere_0 cloud"} <= written.keys()
    (cloud,) = tmp_path.glob("wandb/offline-run-*/files/media/object3D/*.pts.json")
    assert np.array(json.loads(cloud.read_text())).shape[1] == 6
    assert (tmp_path / "pictures" / "sphere_0.glb").read_bytes()[:4] == b"glTF"


def test_forward_pass_and_step_are_timed_if_asked_for(config, tmp_path):
    config.training.time_steps = 2
    metrics = train(config, RunFolder(tmp_path))
    assert min(metrics["forward_ms"], metrics["step_ms"]) > 0
    assert metrics["steps"] == 12

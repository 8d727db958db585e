"""Steps that are not finite: they change nothing, are found, and end or do not end the run as asked."""

import json

import pytest
import torch

from pointproj.config import OptimizerConfig
from pointproj.data.dataset import PreparedData
from pointproj.runtime import tensor_file
from pointproj.runtime.run_folder import RunFolder
from pointproj.training.divergence import CHECK_EVERY, FiniteGuard, TrainingDiverged
from pointproj.training.loop import train
from pointproj.training.optimizers import build_optimizer
from tests.training.test_loop import losses, small_config, spheres, weights
from tests.training.test_step import batches, make_step, mean_loss, mean_of


@pytest.fixture
def config():
    return small_config()


def spoiled(batch, name="target", value=float("nan")):
    values = batch[name].clone()
    values.view(-1)[3] = value
    return {**batch, name: values}


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize(
    ("name", "value"), [("target", float("nan")), ("target", float("inf")), ("query_points", float("nan"))]
)
def test_a_step_that_is_not_finite_changes_nothing(device, clip, name, value, deterministic):
    """The same weights and moments, bit by bit, as without it; captured on a GPU from the fourth step on."""
    options = {"clip": clip, "compile": device == "cuda", "capturable": device == "cuda"}
    step, other = (make_step(device, **options) for _ in range(2))
    given = list(batches(8, device=device))
    for number, batch in enumerate(given):
        step(batch)
        other(batch)
        if number in (1, 5):
            step(spoiled(batch, name, value))
    status = step.take_status()
    assert status.read()[1] == [7, 2]
    assert step.take_status().read()[1] == []
    assert mean_of(status) == pytest.approx(mean_loss(other), rel=1e-6)
    for ours, theirs in zip(step.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(step.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_guard_decides_alike_compiled_or_not(compiled):
    nan, inf = float("nan"), float("inf")
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(OptimizerConfig(name="adam", lr=0.1), [parameter])
    guard = FiniteGuard(optimizer)
    guard.compiled = compiled
    for loss, gradient, norm in [(1, 1, None), (nan, 1, None), (2, inf, None), (3, 2, 6), (4, nan, nan)]:
        before, parameter.grad = parameter.detach().clone(), torch.full((3,), float(gradient))
        known = None if norm is None else torch.tensor(float(norm))
        guard(torch.tensor(float(loss)), [parameter.grad], known)
        optimizer.step()
        assert torch.equal(parameter, before) == (loss in (2, 4) or loss != loss)
    assert guard.take_status(5).read() == (4, [3, 2, 0])


def test_ages_and_losses_are_right_after_long_stretches():
    step = make_step()
    (batch,) = batches(1)
    for number in range(70):
        step(spoiled(batch) if number in (3, 7, 69) else batch)
    total, not_finite = step.take_status().read()
    assert not_finite == [62, 0]  # the one 66 steps ago is beyond what is remembered
    assert 0 < total < 67


def with_a_bad_shape(place=2, value=float("nan")):
    train_set = spheres(5)
    train_set.shapes[place].target[10] = value
    return PreparedData(train_set, spheres(3, resample=False), [])


@pytest.mark.parametrize("log_every", [1, 7])
def test_a_run_stops_at_a_batch_that_is_not_finite_and_keeps_it(config, tmp_path, monkeypatch, log_every):
    monkeypatch.setattr("pointproj.training.loop.prepare", lambda *_: with_a_bad_shape())
    config.training.log_every = log_every
    run = RunFolder(tmp_path)
    words = r"step \d: .*sphere_2.* holds NaN or infinity in target, saved in .*on_nan=skip"
    with pytest.raises(TrainingDiverged, match=words):
        train(config, run)
    (saved,) = tmp_path.glob("nonfinite_*.pt")
    kept = tensor_file.load(saved)
    assert "sphere_2" in kept["name"]
    assert kept["target"][kept["name"].index("sphere_2"), 10].isnan()
    assert not (tmp_path / "last.pt").exists()  # the first epoch did not end


def test_a_run_passes_over_such_batches_if_asked(config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("pointproj.training.loop.prepare", lambda *_: with_a_bad_shape())
    config.training.on_nan = "skip"
    config.training.epochs = 7
    run = RunFolder(tmp_path)
    metrics = train(config, run)
    warnings = [text for text in caplog.messages if "sphere_2" in text and "skipped" in text]
    assert len(warnings) == 7
    assert len(list(tmp_path.glob("nonfinite_*.pt"))) == 5
    assert metrics["status"] == "ok"
    assert len([loss for loss in losses(run).values() if loss is not None]) == 21 - 7
    assert all(tensor.isfinite().all() for tensor in weights(run).values())


def test_a_run_that_skips_every_step_ends(config, tmp_path, monkeypatch):
    data = with_a_bad_shape()
    data.train.shapes[:] = [data.train.shapes[2]]
    monkeypatch.setattr("pointproj.training.loop.prepare", lambda *_: data)
    config.training.on_nan, config.training.epochs = "skip", 10 * CHECK_EVERY
    config.training.validate_every = 1000
    with pytest.raises(TrainingDiverged, match=rf"none of the last {CHECK_EVERY} steps was finite"):
        train(config, RunFolder(tmp_path))


def test_unknown_losses_are_null_in_the_metrics_and_the_report(config, tmp_path, monkeypatch):
    data = with_a_bad_shape()
    data.train.shapes[:] = [data.train.shapes[2]]
    monkeypatch.setattr("pointproj.training.loop.prepare", lambda *_: data)
    config.training.on_nan = "skip"
    run = RunFolder(tmp_path)
    assert train(config, run)["loss"] is None
    assert set(losses(run).values()) == {None}
    assert json.loads((tmp_path / "metrics.json").read_text())["loss"] is None

"""Runs whose points are drawn on the device: resumed and divided as those of the loader are."""

import logging
import signal
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from pointproj.config import MixtureConfig
from pointproj.data.device_sampler import SamplerUnavailable
from pointproj.data.furniture import write_furniture
from pointproj.runtime.distributed import SINGLE_PROCESS
from pointproj.runtime.run_folder import RunFolder
from pointproj.training import loader, loop
from pointproj.training.loop import train
from tests.processes import run_together
from tests.training.test_loop import losses, small_config, stop_after, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("device-sampler")
    write_furniture(root / "meshes", ["dresser", "sofa"], train=3, test=1)
    return root


@pytest.fixture
def config(folder):
    return device_config(folder)


def device_config(folder):
    made = small_config()
    made.data.name, made.data.root, made.data.cache = (
        "modelnet10",
        str(folder / "meshes"),
        str(folder / "cache"),
    )
    made.data.sampler, made.data.queries, made.data.pool = "device", 40, 200
    made.augmentation.rotate, made.augmentation.noise = "any", 0.01
    return made


def test_a_stopped_run_continues_as_if_it_had_not_stopped(config, tmp_path, monkeypatch):
    whole, run = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "run")
    train(config, whole)
    with monkeypatch.context() as patch:
        stop_after(patch, 5, signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            train(config, run)
    config.resume = str(run.path)
    train(config, run)
    assert (losses(run), len(losses(whole))) == (losses(whole), 12)
    expected = weights(whole)
    assert all(torch.equal(weights(run)[name], expected[name]) for name in expected)


def test_the_loader_is_named_where_the_shapes_do_not_fit(config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(loader, "free_bytes", lambda device: 4000)
    with pytest.raises(SamplerUnavailable, match=r"data\.sampler=device.*quarter.*data\.sampler=loader"):
        train(config, RunFolder(tmp_path / "refused"))
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()
    config.data.sampler = "auto"
    data, gpu = loop.prepare(config), SimpleNamespace(type="cuda")
    with caplog.at_level(logging.INFO):
        assert loader._device_samplers(config, data, gpu, SINGLE_PROCESS) == {}
    assert "sampler   loader, with data.workers=0: the shapes take more than" in caplog.text
    assert loader._device_samplers(config, data, torch.device("cpu"), SINGLE_PROCESS) == {}


def two_processes_train(processes, folder, runs):
    config = device_config(folder)
    config.augmentation.rotate, config.augmentation.noise = "none", 0.0
    train(config, RunFolder(runs, writes=processes.is_first))


def test_two_processes_train_what_one_does_on_batches_twice_as_large(config, folder, tmp_path):
    config.augmentation.rotate, config.augmentation.noise = "none", 0.0
    config.training.batch_size = 4
    alone = RunFolder(tmp_path / "alone")
    train(config, alone)
    run_together(two_processes_train, folder, tmp_path / "together")
    together = losses(RunFolder(tmp_path / "together"))
    assert (together, len(together)) == (pytest.approx(losses(alone), rel=1e-5), 8)


@pytest.mark.parametrize("sampler", ["loader", "device"])
def test_a_network_trains_and_is_tested_on_scans(config, tmp_path, sampler):
    config.data.sampler, config.data.sampling, config.data.noise = sampler, "scan", 0.005
    run = RunFolder(tmp_path / "run")
    train(config, run)
    assert all(0 < loss < 1 for loss in losses(run).values())


@pytest.mark.parametrize(("sampler", "compiled"), [("loader", False), ("device", True)])
def test_one_network_trains_on_clouds_of_many_kinds_and_sizes(
    config, tmp_path, monkeypatch, sampler, compiled
):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    config.data.sampler = sampler
    config.data.mixture = [
        MixtureConfig("area", 16),
        MixtureConfig("scan", 24, 0.005),
        MixtureConfig("even", 33),
    ]
    config.compile = compiled
    config.training.epochs = 2
    run = RunFolder(tmp_path / "run")
    torch.compiler.reset()
    counters.clear()
    metrics = train(config, run)
    assert counters["stats"]["unique_graphs"] == int(compiled)
    assert metrics["mode"] == ("compiled" if compiled else "eager")
    assert len(losses(run)) == 6
    assert all(0 < loss < 1 for loss in losses(run).values())

"""Models of checkpoints: as they were trained; a config must fit the weights that it comes with."""

import copy
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from pointproj.inference import trained_model
from pointproj.inference.trained_model import load_trained
from pointproj.runtime import tensor_file
from pointproj.training import checkpoint
from pointproj.training.checkpoint import CheckpointError
from pointproj.training.networks import build_model
from tests.configs import config_of
from tests.processes import PROJECT

MODELS = {
    "projector": ["projector=knn", "projector.hidden_channels=8", "projector.normals=false"],
    "visibility": ["projector=visibility", "projector.hidden_channels=8"],
}


def save(path, name):
    """A checkpoint of an untrained model; returns the model."""
    config = config_of("target=occupancy", "data.points=64", *MODELS[name])
    model = build_model(config, "torch")
    checkpoint.save(path, {"model": model.state_dict()}, config)
    return model


@pytest.fixture(params=MODELS)
def saved(request, tmp_path):
    return tmp_path / "best.pt", save(tmp_path / "best.pt", request.param)


def test_the_model_comes_back_with_its_weights(saved):
    path, model = saved
    loaded = load_trained(path.parent, "cpu", "torch")
    assert loaded.config.data.points == 64
    assert all(
        torch.equal(loaded.model.state_dict()[name], value) for name, value in model.state_dict().items()
    )


def test_the_values_of_points_do_not_depend_on_how_many_are_evaluated_at_once(saved, monkeypatch):
    path, _ = saved
    generator = np.random.default_rng(0)
    cloud, query_points = (generator.uniform(-1, 1, (count, 3)).astype(np.float32) for count in (64, 100))
    field = load_trained(path, "cpu", "torch").field(cloud)
    together = field(query_points)
    monkeypatch.setattr(trained_model, "CPU_POINTS", 7)
    assert np.allclose(field(query_points), together, atol=1e-6)
    assert field(query_points[:0]).shape == (0,)


def changed(path, key, value):
    content = copy.deepcopy(tensor_file.load(path))
    *sections, name = key.split(".")
    section = content
    for part in sections:
        section = section[part]
    section[name] = value
    tensor_file.save(path, content)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("config.projector.hidden_channels", 65_528),  # 17 GB of weights in one layer
        ("config.projector.hidden_channels", 10**15),
        ("config.projector.side", 10**9),
        ("config.projector.levels", 10**12),
        ("config.data.points", 10**12),
        ("config.projector.hidden_channels", "many"),
        ("config.projector", "none"),
        ("config.projector", {}),
        ("config.unknown", 1),
        ("config.projector.name", "${oc.env:HOME}"),
        ("config", {"config": {}}),
        ("model", {}),
        ("model", "weights"),
        ("model", {"weight": torch.zeros(3)}),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused_before_memory_is_taken(saved, key, value):
    path, _ = saved
    changed(path, key, value)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"best\.pt "):
        load_trained(path, "cpu", "torch")
    assert time.monotonic() - began < 20


def test_without_a_gpu_nothing_is_said_of_its_driver(tmp_path):
    """By a process of its own: Warp says it when it is initialised."""
    lines = (
        "import sys; from pathlib import Path; import numpy as np",
        "from pointproj.inference.trained_model import load_trained",
        "points = np.random.default_rng(0).random((64, 3)).astype(np.float32)",
        "for path in map(Path, sys.argv[1:]):",
        "    load_trained(path, 'cpu', 'warp').field(points)(points[:9])",
    )
    paths = [tmp_path / f"{name}.pt" for name in MODELS]
    for path, name in zip(paths, MODELS, strict=True):
        save(path, name)
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), *paths],
        capture_output=True,
        text=True,
        cwd=PROJECT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.returncode == 0, ended.stderr
    assert "driver" not in ended.stdout + ended.stderr

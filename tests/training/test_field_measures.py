"""Errors of fields in their units, against code written apart, the baselines, and steps that learn fields."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from pointproj.data.fields.dataset import prepare_fields
from pointproj.training.baselines import baselines
from pointproj.training.checkpoint import Position
from pointproj.training.execution import choose_execution, new_step
from pointproj.training.field_measures import MEAN, NEAREST, FieldMeasures
from pointproj.training.loader import BatchLoader
from pointproj.training.networks import build_model, with_features
from tests.configs import config_of


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flow")
    where = [f"data.root={folder}/flow", f"data.cache={folder}/cache"]
    config = config_of("experiment=flow", "data.limit=3", *where)
    return config, prepare_fields(config)


def _batch(data, index=0):
    sample = data.test.whole(index)
    return {name: value[None] for name, value in sample.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("projector", ["knn", "radius", "attention", "pairs"])
def test_every_network_of_fields_takes_normals_and_parameters(data, projector):
    config = config_of(f"projector={projector}", "projector.pool=true", "target=field", "data=flow")
    statistics, batch = data[1].statistics, _batch(data[1])
    shown = with_features(batch, config.projector, statistics)
    assert shown["features"].shape[-1] == shown["query_features"].shape[-1] == 3 + 3 + 3
    model = build_model(config, "torch", statistics)
    encoding = model.encode(shown["reference_points"], shown["features"])
    decoded = model.decode(shown["query_points"], encoding, query_features=shown["query_features"])
    assert decoded.shape == (*batch["query_points"].shape[:2], 1)


@pytest.mark.parametrize("experiment", ["flow", "flow_gpu"])
def test_steps_of_the_experiments(data, experiment):
    where = [f"data.{name}={getattr(data[0].data, name)}" for name in ("root", "cache")]
    small = [
        "data.limit=3",
        "data.points=64",
        "data.queries=32",
        "training.batch_size=2",
        "optimizer.lr=3e-4",
    ]
    config = config_of(f"experiment={experiment}", *where, *small, "compile=false", "device=cpu")
    execution, prepared = choose_execution(config), prepare_fields(config)
    step = new_step(config, execution, prepared.statistics)
    loader = BatchLoader(config, prepared, execution.device, execution.processes, execution.backend)
    batches = [*itertools.islice(loader.training(Position()), 6)]
    assert loader.sampler == "device"
    assert [len(batch["target"]) for batch in batches] == [2, 1] * 3
    for batch in batches:
        step(batch)
    loss_sum, skipped = step.take_status().read()
    assert not skipped
    learned = [nn.functional.mse_loss(step.forward(each), each["target"]).item() for each in batches]
    assert sum(learned) < loss_sum


def test_errors_in_the_unit_of_the_field(data):
    statistics, batch = data[1].statistics, _batch(data[1])
    noise = torch.randn(batch["target"].shape, generator=torch.Generator().manual_seed(0))
    errors = FieldMeasures(statistics)(batch["target"] + noise, batch)
    true = (batch["target"][0].double() * statistics.std[0] + statistics.mean[0]).numpy()
    error, areas = noise[0].double().numpy() * statistics.std[0], batch["areas"][0].double().numpy()
    name = "pressure_coefficient "
    relative = np.sqrt(areas @ error**2 / (areas @ true**2))
    assert errors["relative_l2"].item() == pytest.approx(relative)
    assert errors[name + "relative_l2"].item() == pytest.approx(relative)
    assert errors[name + "mean_absolute_error"].item() == pytest.approx(areas @ abs(error) / areas.sum())
    spread = areas @ (true - areas @ true / areas.sum()) ** 2
    assert errors[name + "r2"].item() == pytest.approx(1 - areas @ error**2 / spread)
    force = np.linalg.norm((areas * error) @ batch["query_normals"][0].double().numpy())
    assert errors[name + "force_error"].item() == pytest.approx(force / (areas @ abs(true)), rel=1e-6)


def test_baselines(data):
    config, prepared = data
    predictors = baselines(config, prepared, torch.device("cpu"), "torch")
    batch = _batch(prepared)
    values = prepared.statistics.in_units(predictors[MEAN](batch)[..., None])
    torch.testing.assert_close(values, torch.full_like(values, prepared.statistics.mean[0]))
    train = prepared.train.whole(1)
    itself = {name: value[None] for name, value in train.items() if isinstance(value, torch.Tensor)}
    torch.testing.assert_close(predictors[NEAREST](itself), itself["target"])  # it is most alike

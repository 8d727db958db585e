"""The network that a config describes; one more is a module, a config class and a file of the group."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from pointproj.config import NETWORKS, Config, ProjectorConfig, TargetConfig
from pointproj.config.values import value
from pointproj.training.networks import build_model, with_features


class Constant(nn.Module):
    def __init__(self, *, size, in_channels=3, predicts, backend):
        super().__init__()
        self.told = size, in_channels, predicts, backend


@dataclass
class ConstantConfig(ProjectorConfig):
    NETWORK: ClassVar[str] = "tests.training.test_networks:Constant"
    OPERATOR: ClassVar[str] = "knn"

    name: str = value("constant", "the network")
    size: int = value(5, "how large it is")

    def arguments(self):
        return {"size": self.size}


def test_a_new_network_is_built_from_its_config_alone():
    config = Config(projector=ConstantConfig(size=9, normals=True), target=TargetConfig("sdf"))
    assert build_model(config, "torch").told == (9, 6, "signed_distance", "torch")
    config.projector.normals = False
    assert build_model(config, "torch").told == (9, 3, "signed_distance", "torch")


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("normals", [False, True])
def test_every_network_takes_batches_with_and_without_normals(name, normals):
    config = Config(projector=NETWORKS[name](normals=normals), target=TargetConfig("occupancy"))
    torch.manual_seed(0)
    points, queries = torch.rand(2, 33, 3) * 2 - 1, torch.rand(5, 3)
    batch = with_features({"reference_points": points, "normals": points}, config.projector)
    model = build_model(config, "torch")
    assert model(queries, points, features=batch.get("features")).shape == (2, 5, 1)


@pytest.mark.parametrize("normals", [False, True])
def test_what_a_network_is_shown_ends_with_the_sensors_or_zeros(normals):
    settings = NETWORKS["visibility"](normals=normals, sensors=True)
    points, sensors = torch.rand(2, 33, 3), torch.rand(2, 33, 3)
    batch = {"reference_points": points, "normals": points + 1}
    first = [points, points + 1] if normals else []
    shown = with_features({**batch, "sensors": sensors}, settings)["features"]
    assert torch.equal(shown, torch.cat([*first, sensors], dim=-1))
    shown = with_features(batch, settings)["features"]
    assert torch.equal(shown, torch.cat([*first, torch.zeros_like(points)], dim=-1))
    model = build_model(Config(projector=settings, target=TargetConfig("occupancy")), "torch")
    assert model(torch.rand(5, 3), points, features=shown).shape == (2, 5, 1)


def test_without_context_a_distance_is_a_plain_value():
    config = Config(projector=NETWORKS["knn"](context=False), target=TargetConfig("udf"))
    assert build_model(config, "torch").predicts == "value"

"""The networks as models of PhysicsNeMo: a checkpoint of its own gives the network back."""

import importlib

import pytest
import torch

from pointproj.config.networks import NETWORKS

ARGUMENTS = {"Projector": {"scales": [3, 7], "sigma": "learned", "blocks": 1, "query_channels": 2}}


@pytest.mark.parametrize("name", ["Projector", "AttentionProjector", "PairsProjector"])
def test_saved_and_loaded(name, tmp_path):
    physicsnemo = pytest.importorskip("physicsnemo", reason="extra train")
    ours = importlib.import_module("pointproj.nn.physicsnemo")
    given = {**ARGUMENTS.get(name, {}), "in_channels": 4, "out_channels": 2, "backend": "torch"}
    model = getattr(ours, name)(**given)
    model.save(str(tmp_path / "network.mdlus"))
    loaded = physicsnemo.Module.from_checkpoint(str(tmp_path / "network.mdlus"))
    assert type(loaded) is type(model) is physicsnemo.core.ModelRegistry().factory(name)
    inputs = {"query_points": torch.rand(5, 3), "reference_points": torch.rand(40, 3)}
    inputs |= {"features": torch.rand(40, 4)}
    if "query_channels" in given:
        inputs["query_features"] = torch.rand(5, 2)
    torch.testing.assert_close(loaded(**inputs), model(**inputs), rtol=0, atol=0)
    (plain,) = (of for of in type(model).__bases__ if of.__module__ != ours.__name__)
    assert f"{plain.__module__}:{name}" in {network.NETWORK for network in NETWORKS.values()}
    plain(**given).load_state_dict(model.state_dict())  # the weights fit both

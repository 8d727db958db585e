"""Networks from folders: those of the package, and those that ``export --hub`` writes, with equal results."""

import json
import sys

import pytest
import torch

from pointproj.__main__ import main
from pointproj.inference.trained_model import load_trained
from pointproj.nn.attention_projector import AttentionProjector
from pointproj.nn.pairs_projector import PairsProjector
from pointproj.nn.pretrained import WEIGHTS
from pointproj.nn.projector import Projector
from pointproj.nn.visibility import VisibilityNetwork
from pointproj.training import checkpoint
from pointproj.training.networks import build_model
from tests.configs import config_of

NETWORKS = {
    Projector: ("projector=radius", "target=udf", "projector.scales=[0.4,1.0]", "projector.sigma=learned"),
    AttentionProjector: ("projector=attention", "target=sdf"),
    PairsProjector: ("projector=pairs", "target=occupancy"),
    VisibilityNetwork: ("projector=visibility", "target=occupancy", "data.root=/somebody/somewhere"),
}


def points():
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(n, 3, generator=generator) * 2 - 1 for n in (31, 97)]


@torch.no_grad()
@pytest.mark.parametrize("network", NETWORKS)
def test_an_exported_folder_gives_equal_results(network, tmp_path):
    config = config_of("projector.hidden_channels=8", "projector.normals=false", *NETWORKS[network])
    trained = build_model(config, "torch")
    checkpoint.save(tmp_path / "best.pt", {"model": trained.state_dict(), "optimizer": {}}, config)
    (tmp_path / "metrics.json").write_text('{"measured": {"iou": 0.5}, "baseline_measured": {"iou": 0.25}}')
    folder = tmp_path / "hub"
    assert main(["export", str(tmp_path), f"hub={folder}"]) == 0
    expected = trained.eval()(*points())
    assert torch.equal(network.from_pretrained(folder, backend="torch")(*points()), expected)
    assert torch.equal(load_trained(folder, "cpu", "torch", [config.target.name]).model(*points()), expected)
    assert b"somebody" not in b"".join(file.read_bytes() for file in folder.iterdir())
    assert "| iou | 0.5 | 0.25 |" in (folder / "README.md").read_text()
    (folder / "README.md").write_text("mine")
    main(["export", str(tmp_path), f"hub={folder}"])
    assert (folder / "README.md").read_text() == "mine"
    hub = pytest.importorskip("huggingface_hub")
    mixed = type("Mixed", (hub.PyTorchModelHubMixin, network), {})
    assert torch.equal(mixed.from_pretrained(folder, strict=True, backend="torch")(*points()), expected)


@torch.no_grad()
def test_the_weights_of_the_package_are_what_the_export_writes(tmp_path):
    folder = WEIGHTS / "furniture"
    main(["export", str(folder), "--hub", str(tmp_path)])
    assert (tmp_path / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    written, packed = (checkpoint.load(each / "model.safetensors") for each in (tmp_path, folder))
    torch.testing.assert_close(written["model"], packed["model"], rtol=0, atol=0)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 110_000
    by_name = VisibilityNetwork.from_pretrained("furniture", backend="torch")
    assert not by_name.training
    sphere = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    sphere *= 0.9 / sphere.norm(dim=1, keepdim=True)
    queries = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0, 0, 1], [1, 1, 1]])
    assert (by_name(queries, sphere) > 0).flatten().tolist() == [True, True, False, False]
    loaded = load_trained(folder, "cpu", "torch").model
    assert torch.equal(by_name(queries, sphere), loaded(queries, sphere))


def test_what_is_missing_or_does_not_fit_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="no weights 'furnitur': expected furniture, or a folder"):
        VisibilityNetwork.from_pretrained("furnitur")
    with pytest.raises(ValueError, match=r"holds a VisibilityNetwork: call VisibilityNetwork\.from"):
        Projector.from_pretrained("furniture")
    for file in (WEIGHTS / "furniture").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for changed, words in (({"rounds": 1}, "Unexpected key"), ({"side": 1}, "argument 'side'")):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"(?s)model.safetensors does not fit config.json .*{words}"):
            VisibilityNetwork.from_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r'pip install "pointproj\[weights\]"'):
        VisibilityNetwork.from_pretrained("furniture")

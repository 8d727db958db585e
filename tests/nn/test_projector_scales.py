"""The Projector of several scales: learned sigma, pooled features, gated blocks, features of queries."""

import pytest
import torch

from pointproj.nn.mlp import GatedMLP
from pointproj.nn.projector import Projector

CHANNELS = {"in_channels": 5, "query_channels": 2, "hidden_channels": 8, "out_channels": 3}
SCALES = {"knn": [3, 11], "radius": [0.5, 0.9]}


def _inputs():
    generator = torch.Generator().manual_seed(0)
    drawn = {"generator": generator, "dtype": torch.float64}
    points = {
        "query_points": torch.rand(2, 13, 3, **drawn),
        "reference_points": torch.rand(2, 17, 3, **drawn),
    }
    features = {"features": torch.rand(2, 17, 5, **drawn), "query_features": torch.rand(2, 13, 2, **drawn)}
    return points | features


def _expected(model, query_points, reference_points, features, query_features):
    """The same from the whole matrix of distances."""
    distances = (query_points[:, :, None] - reference_points[:, None]).norm(dim=-1)
    hidden = model.reference_mlp(features)
    parts = []
    for scale, sigma in zip(model.scales, model.log_sigma.exp(), strict=True):
        if model.kind == "knn":
            near = torch.zeros_like(distances, dtype=torch.bool)
            near.scatter_(-1, distances.topk(scale, largest=False).indices, True)
        else:
            near = distances <= scale
        logits = torch.where(near, -distances / sigma, -torch.inf)
        parts.append(torch.where(near.any(-1, keepdim=True), logits.softmax(-1), 0.0) @ hidden)
    pooled = hidden.mean(1, keepdim=True).expand(-1, query_points.shape[1], -1)
    return model.query_mlp(torch.cat([*parts, query_features, pooled], dim=-1))


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("blocks", [0, 2])
def test_values_and_every_gradient_by_name(kind, blocks):
    torch.manual_seed(1)
    more = {"sigma": "learned", "pool": True, "blocks": blocks, "backend": "torch"}
    model = Projector(kind=kind, scales=SCALES[kind], **CHANNELS, **more).double()
    inputs = {name: tensor.requires_grad_() for name, tensor in _inputs().items()}
    named = {**inputs, **dict(model.named_parameters())}
    results = []
    for run in (model, lambda *points, **known: _expected(model, *points, **known)):
        query_points, reference_points, *known = inputs.values()
        result = run(query_points, reference_points, features=known[0], query_features=known[1])
        weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view_as(result)
        gradients = torch.autograd.grad((result * weights).sum(), [*named.values()])
        results.append({"result": result, **dict(zip(named, gradients, strict=True))})
    for name, expected in results[1].items():
        torch.testing.assert_close(results[0][name], expected, msg=lambda text, name=name: f"{name}: {text}")
    assert results[0]["log_sigma"].abs().min() > 0


@pytest.mark.parametrize("kind", SCALES)
def test_one_index_serves_encode_and_decode(kind):
    model = Projector(kind=kind, scales=SCALES[kind], **CHANNELS, context=True, backend="torch").double()
    inputs = _inputs()
    encoding = model.encode(inputs["reference_points"], inputs["features"])
    parts = [
        model.decode(points, encoding, query_features=features)
        for points, features in zip(
            *(inputs[name].split(6, dim=1) for name in ("query_points", "query_features")), strict=True
        )
    ]
    points = inputs.pop("query_points"), inputs.pop("reference_points")
    torch.testing.assert_close(torch.cat(parts, dim=1), model(*points, **inputs))


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ValueError, match=r"whole numbers k .* got scales=\(3\.5,\)"):
        Projector(kind="knn", scales=[3.5])
    with pytest.raises(ValueError, match="needs a radius"):
        Projector(kind="radius")


def test_gated_blocks_in_half_precision():
    mlp = GatedMLP(4, 8, 2, blocks=1).bfloat16()
    assert mlp(torch.ones(3, 4)).dtype == torch.bfloat16

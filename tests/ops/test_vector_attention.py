"""Grouped vector attention: values and every gradient, on every backend, against a softmax a query."""

import pytest
import torch
from torch import nn

from pointproj import vector_attend
from tests.conftest import Where
from tests.ops.test_attention import case as attention_case
from tests.ops.test_attention import lists_of
from tests.ops.test_edge_mlp import compare

pytestmark = pytest.mark.operators("vector_attend")
LAYERS = {
    "one": (nn.Sequential(nn.Linear(3, 6)), nn.Sequential(nn.Linear(6, 2))),
    "two": (
        nn.Sequential(nn.Linear(3, 9), nn.GELU(), nn.Linear(9, 6)),
        nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 2)),
    ),
}


def case(form, layers, dtype=torch.float64, device="cpu"):
    (queries, keys, values, _), neighbors = attention_case(form, 2, 3, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    points = (
        torch.rand(n, 3, generator=generator).to(device, torch.promote_types(dtype, torch.float32))
        for n in (23, 31)
    )
    named = ("queries", "keys", "values", "query_points", "reference_points")
    inputs = {n: t.requires_grad_() for n, t in zip(named, (queries, keys, values, *points), strict=True)}
    position, score = (nn.Sequential(*part).to(device, dtype) for part in LAYERS[layers])
    return inputs, neighbors, {"position_layers": position, "score_layers": score}


def by_hand(inputs, neighbors, layers):
    """One softmax a query and group."""
    results = []
    for i, pairs in enumerate(lists_of(neighbors)):
        rows = [row for _, row in pairs]
        moved = layers["position_layers"](inputs["reference_points"][rows] - inputs["query_points"][i])
        scores = layers["score_layers"](inputs["queries"][i] - inputs["keys"][rows] + moved)
        values = (inputs["values"][rows] + moved).unflatten(-1, (2, -1))
        results.append((scores.softmax(0)[..., None] * values).sum(0).flatten())
    return torch.stack(results)


@pytest.mark.parametrize("form", ["knn", "padded", "csr", "capacity"])
@pytest.mark.parametrize("name", LAYERS)
def test_values_gradients_and_second_derivatives_are_those_of_one_softmax_a_query(name, form, where: Where):
    inputs, neighbors, layers = case(form, name, device=where.device)
    got = vector_attend(**inputs, neighbors=neighbors, groups=2, **layers, backend=where.backend)
    of = inputs | {f"{n}.{p}": t for n, part in layers.items() for p, t in part.named_parameters()}
    # What adds the same to all scores of a query has no influence.
    unused = {"score_layers.0.bias", "queries"} if name == "one" else {"score_layers.2.bias"}
    grads = torch.autograd.grad(got.square().sum(), [of[n] for n in unused], retain_graph=True)
    assert all(grad.abs().max() < 1e-13 for grad in grads)
    of = {n: tensor for n, tensor in of.items() if n not in unused}
    compare(got, by_hand(inputs, neighbors, layers), of, seconds=name == "two")

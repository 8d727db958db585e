"""Edge networks over neighbour lists: values and every gradient, on every backend, against an MLP a query."""

import pytest
import torch
from torch import nn

from pointproj import NeighborList, Neighbors, edge_mlp, knn, radius_neighbors
from pointproj.nn import EdgeMLP
from tests.conftest import Where
from tests.ops.test_attention import gradients, lists_of
from tests.oracle import assert_close

pytestmark = pytest.mark.operators("edge_mlp")

SETTINGS = {
    "edge-convolution": {"widths": (7, 4)},
    "one-layer": {"widths": (5,), "reduce": "sum"},
    "integral-transform": {"widths": (9, 6, 5), "multiply_features": True, "reduce": "sum", "weighted": True},
    "kernel-times-feature": {
        "widths": (9, 5),
        "multiply_features": "only",
        "of_queries": 3,
        "weighted": True,
    },
    "grouping": {"widths": (6, 8, 4), "reduce": "max", "activation": "relu", "ends": True},
    "everything": {"widths": (33, 6, 5, 4), "with_distance": True, "of_queries": 3, "activation": "silu"},
    "largest-of-one-layer": {"widths": (4,), "reduce": "max", "of_queries": 2, "with_distance": True},
    "in-the-plane": {"widths": (4, 3), "dims": 2, "activation": "tanh", "reduce": "sum"},
}
MODULES = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


def case(
    name, form="padded", *, dtype=torch.float64, device="cpu", queries=23, references=31, seed=0, **changes
):
    """Inputs by name, the lists, the layers and the options."""
    settings = {"dims": 3, "of_queries": 0, "weighted": False, "ends": False, "activation": "gelu"}
    settings |= SETTINGS[name] | changes
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    positions = torch.float64 if dtype == torch.float64 else torch.float32
    points = [torch.rand(n, settings["dims"], generator=generator) for n in (queries, references)]
    if form == "knn":
        neighbors = Neighbors(*reversed(knn(*points, 7, backend="torch")))
    else:
        kind = {"padded": {"max_neighbors": 6}, "csr": {"capacity": None}, "capacity": {"capacity": 40}}[form]
        neighbors = radius_neighbors(*points, 0.3, backend="torch", **kind)
    neighbors = type(neighbors)(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in neighbors))
    inputs = {"features": normal(references, 5)}
    inputs |= dict(
        zip(("query_points", "reference_points"), (p.to(device, positions) for p in points), strict=True)
    )
    if settings["of_queries"]:
        inputs["query_features"] = normal(queries, settings["of_queries"])
    if settings["weighted"]:
        inputs["weights"], inputs["reference_weights"] = normal(*neighbors.indices.shape), normal(references)
    multiply, distance = settings.get("multiply_features", False), settings.get("with_distance", False)
    width = settings["dims"] + distance + settings["of_queries"] + (0 if multiply == "only" else 5)
    modules = []
    for channels in settings["widths"]:
        linear = nn.Linear(width, channels, dtype=dtype, device=device)
        with torch.no_grad():
            linear.weight.copy_(normal(channels, width) / width**0.5)
            linear.bias.copy_(normal(channels))
        modules += [linear, MODULES[settings["activation"]]()]
        width = channels
    layers = nn.Sequential(*modules if settings["ends"] else modules[:-1])
    options = {
        "reduce": settings.get("reduce", "mean"),
        "multiply_features": multiply,
        "with_distance": distance,
    }
    for tensor in inputs.values():
        tensor.requires_grad_()
    return inputs, neighbors, layers, options


def by_hand(inputs, neighbors, layers, options):
    """One MLP a query."""
    results = []
    features, points = inputs["features"], inputs["reference_points"]
    for i, pairs in enumerate(lists_of(neighbors)):
        slots, rows = [slot for slot, _ in pairs], [row for _, row in pairs]
        relative = points[rows] - inputs["query_points"][i]
        parts = [] if options["multiply_features"] == "only" else [features[rows]]
        parts.append(relative.to(features.dtype))
        if options["with_distance"]:
            parts.append(relative.norm(dim=1, keepdim=True).to(features.dtype))
        if "query_features" in inputs:
            parts.append(inputs["query_features"][i].expand(len(rows), -1))
        values = layers(torch.cat(parts, dim=1))
        if options["multiply_features"]:
            values = values * features[rows]
        weights = values.new_ones(len(rows))
        if "weights" in inputs and rows:
            weights = (
                torch.stack([inputs["weights"][slot] for slot in slots]) * inputs["reference_weights"][rows]
            )
        values = values * weights[:, None]
        if not rows:
            results.append(values.sum(0))
        elif options["reduce"] == "max":
            results.append(values.max(0).values)
        else:
            results.append(values.sum(0) / (weights.sum() if options["reduce"] == "mean" else 1))
    return torch.stack(results)


def named(inputs, layers):
    return inputs | dict(layers.named_parameters())


def compare(got, expected, of, seconds=False):
    assert_close("values", got, expected)
    made = [gradients(result, list(of.values())) for result in (got, expected)]
    for name, one, other in zip(of, *made, strict=True):
        assert_close(f"d_{name}", one, other)
    if seconds:
        totals = [sum(g.square().sum() for g in grads) for grads in made]
        made = [torch.autograd.grad(t, list(of.values()), materialize_grads=True) for t in totals]
        for name, one, other in zip(of, *made, strict=True):
            assert_close(f"dd_{name}", one, other)


@pytest.mark.parametrize("form", ["knn", "padded", "csr", "capacity"])
@pytest.mark.parametrize("name", SETTINGS)
def test_values_gradients_and_second_derivatives_are_those_of_one_mlp_a_query(name, form, where: Where):
    inputs, neighbors, layers, options = case(name, form, device=where.device)
    got = edge_mlp(**inputs, neighbors=neighbors, layers=layers, backend=where.backend, **options)
    expected = by_hand(inputs, neighbors, layers, options)
    compare(got, expected, named(inputs, layers), seconds=form in ("padded", "csr"))

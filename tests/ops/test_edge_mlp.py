"""Edge networks over neighbour lists: values and every gradient, on every backend, against an MLP a query."""

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import prune

from pointproj import NeighborList, Neighbors, edge_mlp, knn, radius_neighbors
from pointproj.nn import EdgeMLP
from tests.conftest import Where
from tests.ops.test_attention import gradients, lists_of
from tests.oracle import assert_close

pytestmark = [pytest.mark.operators("edge_mlp"), pytest.mark.usefixtures("few_pairs_at_once")]

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
    "factors": {"widths": (9, 6), "multiply_features": "given", "reduce": "sum"},
    "grouping": {"widths": (6, 8, 4), "reduce": "max", "activation": "relu", "ends": True},
    "everything": {"widths": (33, 6, 5, 4), "with_distance": True, "of_queries": 3, "activation": "silu"},
    "weighted-places": {"widths": (70, 4), "with_distance": True, "of_queries": 3, "weighted": True}
    | {"reduce": "sum"},
    "largest-of-one-layer": {"widths": (4,), "reduce": "max", "of_queries": 2, "with_distance": True},
    "in-the-plane": {"widths": (4, 3), "dims": 2, "activation": "tanh", "reduce": "sum"},
    "nowhere": {"widths": (6, 4), "nowhere": True, "of_queries": 3},
}
MODULES = {
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


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
    if settings.get("nowhere"):  # the search had points, the network has none
        inputs |= {name: inputs[name][:, :0] for name in ("query_points", "reference_points")}
        settings["dims"] = 0
    if settings["of_queries"]:
        inputs["query_features"] = normal(queries, settings["of_queries"])
    if settings["weighted"]:
        inputs["weights"], inputs["reference_weights"] = normal(*neighbors.indices.shape), normal(references)
    multiply, distance = settings.get("multiply_features", False), settings.get("with_distance", False)
    if multiply == "given":
        multiply = normal(references, settings["widths"][-1]).requires_grad_()
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
        factors = options["multiply_features"]
        parts = [] if isinstance(factors, str) else [features[rows]]
        parts.append(relative.to(features.dtype))
        if options["with_distance"]:
            parts.append(relative.norm(dim=1, keepdim=True).to(features.dtype))
        if "query_features" in inputs:
            parts.append(inputs["query_features"][i].expand(len(rows), -1))
        values = layers(torch.cat(parts, dim=1))
        if factors is not False:
            values = values * (factors if isinstance(factors, torch.Tensor) else features)[rows]
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
    return {n: t for n, t in inputs.items() if t.numel()} | dict(layers.named_parameters())


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
    given = {n: t for n, t in options.items() if isinstance(t, torch.Tensor)}
    compare(got, expected, given | named(inputs, layers), seconds=form in ("padded", "csr"))


@pytest.mark.parametrize("activation", MODULES)
def test_each_activation(activation, where: Where):
    inputs, neighbors, layers, options = case("weighted-places", activation=activation, device=where.device)
    got = edge_mlp(**inputs, neighbors=neighbors, layers=layers, backend=where.backend, **options)
    compare(got, by_hand(inputs, neighbors, layers, options), named(inputs, layers))
    pairs = [(m.weight, m.bias) for m in layers if isinstance(m, nn.Linear)]
    again = edge_mlp(
        **inputs, neighbors=neighbors, layers=pairs, activation=activation, backend="torch", **options
    )
    assert_close("values of a sequence", again, got)


def apply(inputs, neighbors, layers, options, where):
    return edge_mlp(**inputs, neighbors=neighbors, layers=layers, backend=where.backend, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["edge-convolution", "grouping", "integral-transform"])
def test_narrow_dtypes_sum_in_single_precision(name, dtype, where: Where):
    inputs, *others = case(name, "csr", dtype=dtype, device=where.device)
    got = apply(inputs, *others, where)
    others[1].double()
    expected = by_hand({n: t.double() for n, t in inputs.items()}, *others)
    others[1].to(dtype)
    assert got.dtype == dtype
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    grads = torch.autograd.grad(got.float().square().sum(), list(inputs.values()))
    assert all(g.dtype == t.dtype and g.isfinite().all() for g, t in zip(grads, inputs.values(), strict=True))


def test_positions_are_not_rounded_by_autocast(where: Where):
    changes = {"multiply_features": "only", "widths": (5,), "activation": "relu", "ends": True}
    inputs, neighbors, layers, options = case(
        "edge-convolution", dtype=torch.float32, device=where.device, **changes
    )
    expected = by_hand({n: t.double() for n, t in inputs.items()}, neighbors, layers.double(), options)
    with torch.autocast(where.device, dtype=torch.bfloat16):
        got = apply(inputs, neighbors, layers.float(), options, where)
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["not-finite query", "not-finite reference point"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_points_that_are_not_finite_reach_only_their_own_pairs(name, value, where: Where):
    inputs, neighbors, layers, options = case("edge-convolution", "padded", device=where.device)
    lists = [[row for _, row in pairs] for pairs in lists_of(neighbors)]
    query = next(i for i, rows in enumerate(lists) if rows)
    row = lists[query][0]
    reached = [i == query if name.endswith("query") else row in rows for i, rows in enumerate(lists)]
    with torch.no_grad():
        if name.endswith("query"):
            inputs["query_points"][query] = value
        else:
            inputs["reference_points"][row] = value
    got = apply(inputs, neighbors, layers, options, where)
    assert got.isnan().any(1).tolist() == reached
    others = ~torch.tensor(reached, device=where.device)
    neighbors.indices[~others] = -1  # then it has no pair
    loss = apply(inputs, neighbors, layers, options, where)[others].sum()
    of = named(inputs, layers)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, list(of.values())))


@pytest.mark.parametrize("name", ["everything", "edge-convolution"])
@pytest.mark.parametrize("far", [1e4, 1e30])
def test_far_from_the_origin_and_from_one_point_places_are_as_exact_as_points(name, far, where: Where):
    inputs, neighbors, layers, options = case(name, dtype=torch.float32, device=where.device)
    with torch.no_grad():
        for name in ("query_points", "reference_points"):
            inputs[name] += 1000.0
        inputs["reference_points"][0] = far
    neighbors.indices[neighbors.indices == 0] = -1
    expected = by_hand({n: t.double() for n, t in inputs.items()}, neighbors, layers.double(), options)
    got = apply(inputs, neighbors, layers.float(), options, where)
    torch.testing.assert_close(got.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["edge-convolution", "grouping"])
@pytest.mark.parametrize("form", ["padded", "capacity"])
def test_a_nan_reaches_only_those_that_have_it_as_neighbor(name, form, where: Where):
    inputs, neighbors, layers, options = case(name, form, of_queries=2, device=where.device)
    lists = [[row for _, row in pairs] for pairs in lists_of(neighbors)]
    without = next(i for i, rows in enumerate(lists) if not rows)
    row = next(rows for rows in lists if rows)[0]
    with torch.no_grad():
        inputs["query_features"][without] = torch.nan
        inputs["features"][row] = torch.nan
    alone = neighbors._replace(indices=neighbors.indices.masked_fill(neighbors.indices == row, -1))
    got = apply(inputs, alone, layers, options, where)
    assert got.isfinite().all()
    assert not got[without].any()
    grads = torch.autograd.grad(got.sum(), list(named(inputs, layers).values()))
    assert all(g.isfinite().all() for g in grads)
    got = apply(inputs, neighbors, layers, options, where)
    reached = torch.tensor([row in rows for rows in lists], device=where.device)
    assert got[reached].isnan().all()
    assert got[~reached].isfinite().all()


@pytest.mark.parametrize("form", [{"max_neighbors": 4}, {"capacity": None}])
def test_a_dense_batch_is_the_loop_over_clouds(form, where: Where):
    generator = torch.Generator().manual_seed(0)
    q, r, f = (torch.rand(3, n, c, generator=generator).to(where.device) for n, c in ((7, 3), (9, 3), (9, 5)))
    layers = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4)).to(where.device)
    module = EdgeMLP(layers, backend=where.backend)
    got = module(f, q, r, radius_neighbors(q, r, 0.6, backend="torch", **form))
    for i in range(3):
        own = radius_neighbors(q[i], r[i], 0.6, backend="torch", **form)
        assert_close("values", got[i], edge_mlp(f[i], q[i], r[i], own, layers, backend="torch"))


def without_pairs(queries, k, device):
    """Lists without neighbours; without k, slots that are in no list."""
    if k is None:
        return NeighborList(*(x.to(device) for x in (torch.zeros(1).long(), torch.full((5,), -1))), None)
    return Neighbors(torch.full((queries, k), -1, device=device), None)


@pytest.mark.parametrize(("queries", "references", "k"), [(0, 5, 3), (0, 5, None), (4, 0, 3), (4, 5, 0)])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_no_neighbors_give_zeros(queries, references, k, reduce, where: Where):
    inputs = [
        torch.rand(n, c, device=where.device) for n, c in ((references, 5), (queries, 3), (references, 3))
    ]
    lists = without_pairs(queries, k, where.device)
    for modules in ([nn.Linear(8, 4)], [nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4)]):
        layers = nn.Sequential(*modules).to(where.device)
        got = edge_mlp(*inputs, lists, layers, reduce=reduce, backend=where.backend)
        assert got.shape == (queries, 4)
        assert not got.any()
        assert not any(g.any() for g in torch.autograd.grad(got.sum(), list(layers.parameters())))


@pytest.mark.parametrize("name", ["edge-convolution", "grouping"])
def test_compiled_in_one_graph_and_under_transforms(name, where: Where):
    inputs, neighbors, layers, options = case(name, dtype=torch.float32, device=where.device)
    given, pairs = list(inputs.values()), [(m.weight, m.bias) for m in layers if isinstance(m, nn.Linear)]
    options |= {"activation": "relu"}

    def loss(*given):
        got = edge_mlp(*given, neighbors, pairs, backend=where.backend, **options)
        return got.square().sum()

    torch._dynamo.reset()
    expected = torch.autograd.grad(loss(*given), given)
    function = torch.compile(loss, fullgraph=True, backend="aot_eager")
    compiled = torch.autograd.grad(function(*given), given)
    transformed = torch.func.grad(loss, argnums=tuple(range(len(given))))(*given)
    for key, one, other, third in zip(inputs, compiled, expected, transformed, strict=True):
        assert_close(f"d_{key}", one, other)
        assert_close(f"d_{key} by torch.func", third, other)


def test_the_module_names_wrong_arguments():
    with pytest.raises(TypeError, match="Sequential, whose parameters are trained; got list"):
        EdgeMLP([(torch.rand(4, 8), torch.rand(4))])
    with pytest.raises(ValueError, match="reduce must be one of mean, sum, max; got 'min'"):
        EdgeMLP(nn.Sequential(nn.Linear(8, 4)), reduce="min")


class TestWrongArguments:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"layers": [(torch.rand(4, 8), None)]}, "give zeros for a layer without bias"),
            ({"layers": [(torch.rand(600, 8), torch.rand(600))]}, "1 to 512 outputs"),
            ({"layers": [(torch.rand(8, 8), torch.rand(8))] * 5}, "1 to 4 linear layers; got 5"),
            ({"layers": [(torch.rand(4, 9), torch.rand(4))]}, r"8 columns \(5 of the feature, 3 of the rel"),
            ({"layers": nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1))}, "one activation of gelu"),
            ({"layers": [(torch.rand(8, 8), torch.rand(8))] * 2, "activation": "gelo"}, "gelo"),
            ({"layers": nn.Sequential(type("Own", (nn.Linear,), {"forward": abs})(8, 4))}, "got Own"),
            ({"layers": nn.Sequential(prune.identity(nn.Linear(8, 4), "weight"))}, "made by a hook when"),
            (
                {"layers": [(UninitializedParameter(), torch.rand(4))]},
                "no shape before the layer's first call",
            ),
            ({"multiply_features": True}, "must have 5 outputs"),
            ({"multiply_features": "mean"}, "a bool, 'only' or a tensor of factors"),
            ({"multiply_features": torch.rand(30, 4)}, r"multiply_features must have shape \(31, 'out'\)"),
            ({"multiply_features": torch.rand(31, 3)}, "each channel of multiply_features; got 4"),
            ({"with_distance": "yes"}, "with_distance must be a bool; got 'yes'"),
            ({"reduce": "min"}, "reduce must be one of mean, sum, max"),
            ({"query_points": torch.rand(22, 3)}, "a list for each of 22 query points"),
            ({"features": torch.rand(9, 5), "reference_points": torch.rand(9, 3)}, "search these points"),
            ({"query_features": torch.rand(22, 3)}, "one row for each query point"),
            ({"weights": torch.rand(23)}, "one number for each pair"),
            ({"neighbors": Neighbors(torch.rand(23, 6), None)}, "int32 or int64"),
            (
                {n: torch.rand(s, 0) for n, s in (("query_points", 23), ("reference_points", 31))}
                | {"with_distance": True},
                "2 coordinates in the plane",
            ),
        ],
    )
    def test_are_named(self, change, words):
        inputs, neighbors, layers, options = case("edge-convolution", dtype=torch.float32)
        given = inputs | {"neighbors": neighbors, "layers": layers} | options | change
        with pytest.raises((TypeError, ValueError), match=words):
            edge_mlp(**given)

"""Grouped vector attention: values and every gradient, on every backend, against a softmax a query."""

import copy

import pytest
import torch
from torch import nn

from pointproj import Neighbors, radius_neighbors, vector_attend
from tests.conftest import Where
from tests.ops.test_attention import case as attention_case
from tests.ops.test_attention import lists_of
from tests.ops.test_edge_mlp import compare, without_pairs
from tests.oracle import assert_close

pytestmark = [pytest.mark.operators("vector_attend"), pytest.mark.usefixtures("few_pairs_at_once")]
LAYERS = {
    "one": (nn.Sequential(nn.Linear(3, 6)), nn.Sequential(nn.Linear(6, 2))),
    "two": (
        nn.Sequential(nn.Linear(3, 9), nn.GELU(), nn.Linear(9, 6)),
        nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 2)),
    ),
    "one-active": (nn.Sequential(nn.Linear(3, 6), nn.SiLU()), nn.Sequential(nn.Linear(6, 2), nn.Tanh())),
    "active": (
        nn.Sequential(nn.Linear(3, 9), nn.SiLU(), nn.Linear(9, 6), nn.SiLU()),
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2), nn.Tanh()),
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


def apply(inputs, neighbors, layers, where, **options):
    return vector_attend(
        **inputs, neighbors=neighbors, **{"groups": 2} | layers | options, backend=where.backend
    )


def named(inputs, layers):
    return inputs | {f"{n}.{p}": t for n, part in layers.items() for p, t in part.named_parameters()}


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
    got, of = apply(inputs, neighbors, layers, where), named(inputs, layers)
    # What adds the same to all scores of a query has no influence.
    unused = {"one": {"score_layers.0.bias", "queries"}, "two": {"score_layers.2.bias"}}.get(name, set())
    grads = [torch.autograd.grad(got.square().sum(), of[n], retain_graph=True)[0] for n in unused]
    assert all(grad.abs().max() < 1e-13 for grad in grads)
    of = {n: tensor for n, tensor in of.items() if n not in unused}
    compare(got, by_hand(inputs, neighbors, layers), of, seconds=name != "one")


def test_masked_pairs_are_no_pairs(where: Where):
    inputs, neighbors, layers = case("padded", "two", device=where.device)
    mask = (torch.arange(neighbors.indices.numel()) % 3 == 0).view(neighbors.indices.shape)
    neighbors = Neighbors(neighbors.indices.masked_fill(mask.to(where.device), -1), neighbors.distances)
    of = {n: t for n, t in named(inputs, layers).items() if n != "score_layers.2.bias"}
    compare(apply(inputs, neighbors, layers, where), by_hand(inputs, neighbors, layers), of)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LAYERS)
def test_narrow_dtypes_are_computed_in_single_precision(name, dtype, where: Where):
    inputs, neighbors, layers = case("csr", name, dtype=dtype, device=where.device)
    got = apply(inputs, neighbors, layers, where)
    exact = (
        {n: t.double() for n, t in inputs.items()},
        {n: copy.deepcopy(part).double() for n, part in layers.items()},
    )
    expected = by_hand(exact[0], neighbors, exact[1])
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
    assert got.dtype == dtype
    grads, wanted = (
        torch.autograd.grad(out.double().square().sum(), [*inputs.values()]) for out in (got, expected)
    )
    for n, one, other in zip(inputs, grads, wanted, strict=True):
        assert one.dtype == inputs[n].dtype
        close = 4 * max(tolerance, 1e-5) * other.abs().max().item() + 1e-5
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=close, msg=n)


@pytest.mark.parametrize("name", ["queries", "keys", "values", "query_points", "reference_points"])
@pytest.mark.parametrize("form", ["padded", "csr", "capacity"])
def test_a_nan_reaches_only_the_queries_that_have_it(form, name, where: Where):
    inputs, neighbors, layers = case(form, "two", device=where.device)
    lists = [[row for _, row in pairs] for pairs in lists_of(neighbors)]
    query, without = (next(i for i, rows in enumerate(lists) if bool(rows) is has) for has in (True, False))
    row, of_query = lists[query][0], name.startswith("quer")
    with torch.no_grad():
        inputs[name][[query, without] if of_query else row] = torch.nan
    got = apply(inputs, neighbors, layers, where)
    reached = [i == query if of_query else row in rows for i, rows in enumerate(lists)]
    assert got.isnan().any(1).tolist() == reached
    assert not got[without].any()
    own = neighbors.indices == row
    if of_query:  # its pairs are no pairs any more
        own = torch.tensor([slot for slot, _ in lists_of(neighbors)[query]], device=where.device)
        own = torch.zeros_like(neighbors.indices, dtype=torch.bool).index_put(
            tuple(own.T), own.new_ones(()) > 0
        )
    left = neighbors._replace(indices=neighbors.indices.masked_fill(own, -1))
    grads = torch.autograd.grad(apply(inputs, left, layers, where).sum(), [*named(inputs, layers).values()])
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("form", [{"max_neighbors": 4}, {"capacity": None}])
def test_batches_dense_and_ragged_are_the_loop_over_clouds(form, where: Where):
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 6), (9, 6), (9, 6), (7, 3), (9, 3))
    rows = [torch.rand(3, *shape, generator=generator).to(where.device) for shape in shapes]
    layers = {n: nn.Sequential(*part).to(where.device, torch.float32) for n, part in _two().items()}
    search = {"backend": "torch"} | form
    kind = {"groups": 2, "backend": where.backend} | layers
    got = vector_attend(*rows, radius_neighbors(*rows[3:], 0.6, **search), **kind)
    packed = [x.flatten(0, 1) for x in rows]
    offsets = [torch.arange(0, 3 * n + 1, n, device=where.device) for n in (7, 9)]
    lists = radius_neighbors(
        *packed[3:], 0.6, query_offsets=offsets[0], reference_offsets=offsets[1], **search
    )
    assert_close("ragged", vector_attend(*packed, lists, **kind), got.flatten(0, 1))
    for i in range(3):
        own = [x[i] for x in rows]
        assert_close("dense", got[i], vector_attend(*own, radius_neighbors(*own[3:], 0.6, **search), **kind))


def _two():
    return dict(zip(("position_layers", "score_layers"), LAYERS["two"], strict=True))


@pytest.mark.parametrize(
    ("queries", "references", "k"), [(0, 5, 3), (0, 5, None), (4, 0, 3), (4, 5, 0), (4, 5, 2)]
)
def test_no_neighbors_give_zeros(queries, references, k, where: Where):
    sizes = [(n, c) for c in (6, 3) for n in (queries, references)]
    q, r, places, points = (torch.rand(*size, device=where.device, requires_grad=True) for size in sizes)
    layers = {n: nn.Sequential(*part).to(where.device, torch.float32) for n, part in _two().items()}
    lists = without_pairs(queries, k, where.device)
    got = vector_attend(q, r, r, places, points, lists, groups=2, **layers, backend=where.backend)
    assert got.shape == (queries, 6)
    assert not got.any()
    assert not any(g.any() for g in torch.autograd.grad(got.sum(), (q, r, places, points)))


def test_compiled_in_one_graph_under_transforms_and_differentiated_twice(where: Where):
    inputs, neighbors, layers = case("padded", "two", device=where.device)
    of = named(inputs, layers)

    def loss(*given):
        tensors = dict(zip(of, given, strict=True))
        parts = {n: [(tensors[f"{n}.{i}.weight"], tensors[f"{n}.{i}.bias"]) for i in (0, 2)] for n in layers}
        rows = {n: tensors[n] for n in inputs}
        return apply(rows, neighbors, parts, where, activation="gelu").square().sum()

    given = [tensor.detach().requires_grad_() for tensor in of.values()]
    torch._dynamo.reset()
    expected = torch.autograd.grad(loss(*given), given)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*given), given)
    transformed = torch.func.grad(loss, argnums=tuple(range(len(given))))(*given)
    for name, one, other, third in zip(of, compiled, expected, transformed, strict=True):
        if name != "score_layers.2.bias":  # has no influence
            assert_close(f"d_{name}", one, other)
            assert_close(f"d_{name} by torch.func", third, other)
    of_layers = given[len(inputs) :]
    rows = given[: len(inputs)]
    options = {"fast_mode": True, "nondet_tol": 1e-12}
    assert torch.autograd.gradgradcheck(lambda *rows: loss(*rows, *of_layers), rows, **options)


class TestWrongArguments:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"groups": 4}, "multiple of 4 channels"),
            ({"groups": 0}, "groups must be at least 1; got 0"),
            ({"groups": 3}, "score_layers must lead from 6 to 3 channels"),
            ({"position_layers": nn.Linear(3, 6)}, "sequence of .weight, bias. or a torch.nn.Sequential"),
            ({"position_layers": nn.Sequential(nn.Linear(2, 6))}, "position_layers must lead from 3 to 6"),
            ({"position_layers": [(torch.rand(6, 3), None)]}, "give zeros for a layer without bias"),
            ({"position_layers": [(torch.rand(600, 3), torch.rand(600))]}, "1 to 512 outputs"),
            ({"score_layers": [(torch.rand(6, 6), torch.rand(6))] * 5}, "1 to 4 linear layers; got 5"),
            ({"score_layers": nn.Sequential(nn.Linear(6, 2), nn.Softmax(-1))}, "one activation of gelu"),
            ({"score_layers": [(torch.rand(2, 6), torch.rand(2))], "activation": "gelo"}, "gelo"),
            ({"query_points": torch.rand(22, 3)}, "a list for each of 22 query points"),
            ({"reference_points": torch.rand(9, 3)}, "one row for each reference point"),
            ({n: torch.rand(9, 6) for n in ("keys", "values")} | {"reference_points": torch.rand(9, 3)},
             "search these points"),
            ({"values": torch.rand(31, 5)}, "values must have the shape of keys"),
            ({"queries": torch.rand(23, 6).half()}, "queries must have the dtype of keys"),
            ({"neighbors": Neighbors(torch.rand(23, 6), None)}, "int32 or int64"),
            ({"neighbors": torch.zeros(23, 6)}, "neighbors must be Neighbors or NeighborList"),
            ({"backend": "cuml"}, "cuml"),
        ],
    )  # fmt: skip
    def test_are_named(self, change, words):
        inputs, neighbors, layers = case("padded", "two", dtype=torch.float32)
        given = inputs | layers | {"neighbors": neighbors, "groups": 2} | change
        with pytest.raises((TypeError, ValueError, RuntimeError), match=words):
            vector_attend(**given)

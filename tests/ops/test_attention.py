"""Attention over neighbour lists: values and every gradient, on every backend, against a softmax a query."""

import contextlib
import itertools
import math

import pytest
import torch

from pointproj import NeighborList, Neighbors, attend, knn, radius_neighbors
from tests.conftest import Where
from tests.oracle import assert_close

pytestmark = pytest.mark.operators("attend")
NAMES = ("queries", "keys", "values", "bias")


def case(form, heads=3, channels=5, *, queries=23, references=31, dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    points = torch.rand(queries, 3, generator=generator), torch.rand(references, 3, generator=generator)
    if form == "knn":
        distances, indices = knn(*points, 7, backend="torch")
        neighbors = Neighbors(indices, distances)
    elif form == "padded":
        neighbors = radius_neighbors(*points, 0.3, max_neighbors=6, backend="torch")
    else:
        neighbors = radius_neighbors(*points, 0.3, capacity=None if form == "csr" else 40, backend="torch")
    neighbors = type(neighbors)(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in neighbors))
    width = heads * channels
    tensors = normal(queries, width), normal(references, width), normal(references, width)
    return [*tensors, normal(*neighbors.indices.shape, heads)], neighbors


def lists_of(neighbors):
    """Slots and rows of each query's neighbours."""
    if isinstance(neighbors, Neighbors):
        rows = neighbors.indices.tolist()
        return [[((i, j), row) for j, row in enumerate(own) if row >= 0] for i, own in enumerate(rows)]
    splits, rows = neighbors.row_splits.tolist(), neighbors.indices.tolist()
    return [[((at,), rows[at]) for at in range(*ends)] for ends in itertools.pairwise(splits)]


def by_hand(queries, keys, values, bias, neighbors, heads, scale=None):
    """One softmax a query and head."""
    results = []
    for i, pairs in enumerate(lists_of(neighbors)):
        parts = [x.unflatten(-1, (heads, -1)) for x in (queries[i], keys, values)]
        if not pairs:
            results.append(torch.zeros_like(queries[i]))
            continue
        rows = [row for _, row in pairs]
        logits = torch.einsum("hd,khd->kh", parts[0], parts[1][rows])
        logits = logits * (scale or 1 / math.sqrt(parts[0].shape[-1]))
        if bias is not None:
            logits = logits + torch.stack([bias[slot] for slot, _ in pairs])
        results.append(torch.einsum("kh,khd->hd", logits.softmax(0), parts[2][rows]).flatten())
    return torch.stack(results)


def gradients(result, inputs, seed=9):
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result)
    return torch.autograd.grad(result, inputs, upstream, create_graph=True)


@pytest.mark.parametrize("form", ["knn", "padded", "csr", "capacity"])
def test_values_and_gradients_are_those_of_one_softmax_a_query(form, where: Where):
    for heads, channels in ((1, 1), (3, 5), (4, 16), (2, 40), (1, 130), (1, 257)):
        tensors, neighbors = case(form, heads, channels, device=where.device)
        tensors = [t.requires_grad_() for t in tensors]
        expected = by_hand(*tensors, neighbors, heads)
        got = attend(*tensors[:3], neighbors, heads=heads, bias=tensors[3], backend=where.backend)
        assert_close(f"values of {heads} heads of {channels}", got, expected)
        first, wanted = gradients(got, tensors), gradients(expected, tensors)
        for name, one, other in zip(NAMES, first, wanted, strict=True):
            assert_close(f"d_{name} of {heads} heads of {channels}", one, other)


@pytest.mark.parametrize("form", ["padded", "csr"])
@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.profiler.profile])
def test_second_derivatives(form, context, where: Where):
    tensors, neighbors = case(form, 2, 3, queries=5, references=9, device=where.device)
    tensors = [t.requires_grad_() for t in tensors]
    expected = gradients(by_hand(*tensors, neighbors, 2), tensors)
    got = gradients(attend(*tensors[:3], neighbors, heads=2, bias=tensors[3], backend=where.backend), tensors)
    totals = (sum(g.square().sum() for g in grads) for grads in (got, expected))
    with context():  # torch's dispatcher calls what a profiler sees
        seconds = [torch.autograd.grad(total, tensors) for total in totals]
    for name, one, other in zip(NAMES, *seconds, strict=True):
        assert_close(f"d_{name}", one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_dtypes_sum_in_single_precision(dtype, where: Where):
    tensors, neighbors = case("knn", 4, 16, dtype=dtype, device=where.device)
    got = attend(*tensors[:3], neighbors, heads=4, bias=tensors[3], scale=0.3, backend=where.backend)
    expected = by_hand(*(t.double() for t in tensors), neighbors, 4, scale=0.3)
    assert got.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_large_logits_do_not_overflow_and_queries_without_neighbors_are_zero(where: Where):
    tensors, neighbors = case("padded", 2, 4, dtype=torch.float32, device=where.device)
    tensors[0] *= 1e4
    neighbors.indices[3] = -1
    tensors = [t.requires_grad_() for t in tensors]
    got = attend(*tensors[:3], neighbors, heads=2, backend=where.backend)
    assert got.isfinite().all()
    assert not got[3].any()
    torch.testing.assert_close(got, by_hand(*tensors[:3], None, neighbors, 2), rtol=1e-4, atol=1e-4)
    grads = torch.autograd.grad(got.sum(), tensors[:3])
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][3].any()


def test_a_value_that_is_not_finite_reaches_only_those_that_attend_to_it(where: Where):
    tensors, neighbors = case("csr", 1, 8, device=where.device)
    tensors[2][4] = torch.inf
    got = attend(*tensors[:3], neighbors, backend=where.backend)
    reached = torch.tensor(
        [4 in [row for _, row in pairs] for pairs in lists_of(neighbors)], device=where.device
    )
    assert not got[reached].isfinite().any()
    assert got[~reached].isfinite().all()


@pytest.mark.parametrize("csr", [False, True])
def test_a_dense_batch_is_the_loop_over_clouds(csr, where: Where):
    generator = torch.Generator().manual_seed(0)
    query_points, reference_points = (
        torch.rand(3, n, 3, generator=generator).to(where.device) for n in (7, 9)
    )
    tensors = [torch.randn(3, n, 8, generator=generator).to(where.device) for n in (7, 9, 9)]
    form = {"capacity": None} if csr else {"max_neighbors": 4}
    neighbors = radius_neighbors(query_points, reference_points, 0.6, backend="torch", **form)
    got = attend(*tensors, neighbors, heads=2, backend=where.backend)
    for i in range(3):
        own = radius_neighbors(query_points[i], reference_points[i], 0.6, backend="torch", **form)
        assert_close("values", got[i], attend(*(t[i] for t in tensors), own, heads=2, backend="torch"))


@pytest.mark.parametrize("sizes", [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
def test_nothing_to_attend_to_gives_zeros(sizes, where: Where):
    queries, references, k = sizes
    rows = queries, references, references
    tensors = [torch.randn(n, 6, device=where.device, requires_grad=True) for n in rows]
    indices = torch.full((queries, k), -1, device=where.device)
    got = attend(*tensors, Neighbors(indices, indices.float()), heads=3, backend=where.backend)
    assert got.shape == (queries, 6)
    assert not got.any()
    assert not any(g.any() for g in torch.autograd.grad(got.sum(), tensors))


def test_compiled_in_one_graph_and_under_transforms(where: Where):
    tensors, neighbors = case("padded", 2, 4, dtype=torch.float32, device=where.device)
    tensors = [t.requires_grad_() for t in tensors]

    def loss(queries, keys, values, bias):
        return (
            attend(queries, keys, values, neighbors, heads=2, bias=bias, backend=where.backend).square().sum()
        )

    torch._dynamo.reset()
    expected = torch.autograd.grad(loss(*tensors), tensors)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*tensors), tensors)
    transformed = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*tensors)
    for name, one, other, third in zip(NAMES, got, expected, transformed, strict=True):
        assert_close(f"d_{name}", one, other)
        assert_close(f"d_{name} by torch.func", third, other)


def test_lists_of_points_in_any_order_and_of_other_integers(where: Where):
    tensors, neighbors = case("knn", 2, 4, device=where.device)
    order = torch.randperm(7)
    other = Neighbors(neighbors.indices[:, order].int(), neighbors.distances[:, order])
    got = attend(*tensors[:3], other, heads=2, bias=tensors[3][:, order], backend=where.backend)
    assert_close("values", got, by_hand(*tensors, neighbors, 2))


def test_row_splits_of_any_integers_and_strides(where: Where):
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(n, 6, generator=generator).to(where.device) for n in (5, 9, 9))
    splits = torch.tensor([0, 2, 2, 5, 6, 9])
    rows = torch.arange(9).flip(0).to(where.device)
    expected = None
    for made in (
        splits,
        splits.int(),
        splits.repeat_interleave(2)[::2],
        splits.int().repeat_interleave(2)[::2],
    ):
        lists = NeighborList(made.to(where.device), rows, torch.zeros(9, device=where.device))
        got = attend(queries, keys, values, lists, heads=2, backend=where.backend)
        expected = got if expected is None else expected
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"neighbors": torch.zeros(23, 7).long()}, "Neighbors or NeighborList"),
        ({"heads": 4}, "multiple of 4 channels"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"queries": torch.rand(5, 6)}, "queries must have 23 rows of 6 channels"),
        ({"values": torch.rand(30, 6)}, r"shape of keys, \(31, 6\)"),
        ({"bias": torch.rand(23, 7)}, r"bias must have shape \(23, 7, 2\)"),
        ({"scale": math.nan}, "finite number"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    (queries, keys, values, _), neighbors = case("knn", 2, 3, dtype=torch.float32)
    given = {"queries": queries, "keys": keys, "values": values, "neighbors": neighbors, "heads": 2} | change
    with pytest.raises(TypeError if "neighbors" in change else ValueError, match=words):
        attend(**given)


def test_a_captured_step_and_a_deterministic_one(on_gpu):
    tensors, neighbors = case("csr", 4, 16, dtype=torch.float32, device="cuda", queries=500, references=400)
    tensors = [t.requires_grad_() for t in tensors]

    def step():
        result = attend(*tensors[:3], neighbors, heads=4, bias=tensors[3], backend=on_gpu.backend)
        return torch.autograd.grad(result.square().sum(), tensors)

    expected = step()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = step(), step()
    finally:
        torch.use_deterministic_algorithms(False)
    for name, one, other, a, b in zip(NAMES, captured, expected, first, second, strict=True):
        assert_close(f"d_{name}", one, other)
        assert_close(f"d_{name}, deterministic", a, other)
        assert torch.equal(a, b), name

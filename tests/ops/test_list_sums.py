"""Aggregation over neighbour lists: kernels as in the specification, and weights of any origin."""

import pytest
import torch
from torch import Tensor

from pointproj import NeighborList, Neighbors, aggregate, knn, radius_neighbors
from pointproj.benchmark.cases import Problem
from pointproj.ops.backends.torch.weighted_sums import PairSums
from pointproj.ops.specification import reference
from pointproj.ops.specification.reference import KERNELS, Weighting
from tests.conftest import Where
from tests.ops.cases import by_id
from tests.oracle import assert_close

pytestmark = pytest.mark.operators("aggregate")
FORMS = {"padded": {"max_neighbors": 40}, "csr": {"capacity": 1500}}
forms = pytest.mark.parametrize("form", FORMS)
NAMES = ("query_points", "reference_points", "features", "sigma", "reference_weights")


def _leaves(problem: Problem) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    sigma = problem.query_points.new_tensor(0.13)
    weights = torch.rand(problem.features.shape[:-1], generator=generator).to(problem.features)
    return tuple(t.clone().requires_grad_() for t in (*problem[:3], sigma, weights))


def _derivatives(value: Tensor, leaves: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The value, every gradient and second gradient by name."""
    grad = torch.linspace(-1, 2, value.numel()).to(value).view_as(value)
    options = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(value, leaves, grad, create_graph=True, **options)
    scalar = sum((g * torch.linspace(-2, 1, g.numel()).to(g).view_as(g)).sum() for g in first)
    second = torch.autograd.grad(scalar, leaves, **options)
    named = {"aggregated": value} | {f"d_{n}": g for n, g in zip(NAMES, first, strict=True)}
    return named | {f"dd_{n}": g for n, g in zip(NAMES, second, strict=True)}


@forms
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_are_the_specification(kernel: str, reduce: str, form: str, where: Where):
    leaves = _leaves(by_id("fp64").problem(where.device))
    query, points, features, sigma, weights = leaves
    weighting = Weighting(kernel, reduce, 1.5, 0.2, 0.5)
    expected = reference.radius_aggregate(query, points, features, 0.5, sigma, weighting, weights)
    expected = _derivatives(expected, leaves)
    neighbors = radius_neighbors(query, points, 0.5, backend="torch", **FORMS[form])
    got = aggregate(
        features, neighbors, kernel=kernel, sigma=sigma, power=1.5, eps=0.2, reduce=reduce,
        reference_weights=weights, backend=where.backend,
    )  # fmt: skip
    for name, value in _derivatives(got, leaves).items():
        assert_close(name, value, expected[name])


@forms
@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weighs", [False, True])
def test_weights_without_gradients(weighs: bool, kernel: str, reduce: str, form: str, where: Where):
    """Also of references without a weight, and slots whose row is any that does not exist."""
    query, points, features, sigma, weights = (
        leaf.detach() for leaf in _leaves(by_id("fp64").problem(where.device))
    )
    features.requires_grad_()
    weights[::3] = 0.0
    own = torch.stack([-weights, weights], 1)[:, 0] if weighs else None
    weighting = Weighting(kernel, reduce, 1.5, 0.2, 0.5)
    expected = reference.radius_aggregate(query, points, features, 0.5, sigma, weighting, own)
    found = radius_neighbors(query, points, 0.5, backend="torch", **FORMS[form])
    found = found._replace(indices=torch.where(found.indices < 0, 1000, found.indices))
    options = {"kernel": kernel, "sigma": sigma, "power": 1.5, "eps": 0.2, "reduce": reduce}
    got = aggregate(features, found, reference_weights=own, backend=where.backend, **options)
    assert_close("aggregated", got, expected)
    first = [torch.autograd.grad(v.square().sum(), features, create_graph=True)[0] for v in (got, expected)]
    second = [torch.autograd.grad(v.square().sum(), features)[0] for v in first]
    assert_close("d_features", *first)
    assert_close("dd_features", *second)


def test_an_empty_batch_keeps_its_shape():
    points, features = torch.zeros(0, 4, 3), torch.zeros(0, 4, 2)
    neighbors = radius_neighbors(torch.zeros(0, 5, 3), points, 0.5, max_neighbors=3)
    assert aggregate(features, neighbors, sigma=0.1).shape == (0, 5, 2)


@forms
@pytest.mark.parametrize("channels", [None, 1, 3])
@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
def test_weights_of_a_network(reduce: str, channels: int | None, form: str, where: Where):
    problem = by_id("fp64").problem(where.device)
    query, points, features = (t.clone().requires_grad_() for t in problem[:3])
    assert features.shape[1] == 3
    neighbors = radius_neighbors(query, points, 0.5, displacements=True, backend="torch", **FORMS[form])
    layer = torch.linspace(-1, 2, 3 * (channels or 1)).to(query).view(3, -1).requires_grad_()
    weights = (neighbors.displacements @ layer).tanh() + 1.5
    given = weights if channels else weights.squeeze(-1)
    got = aggregate(features, neighbors, weights=given, reduce=reduce, backend=where.backend)
    delta = query[:, None] - points
    within = reference.within(query, points, query.new_tensor(0.5))[..., None]
    dense = torch.where(within, (delta @ layer).tanh() + 1.5, 0.0)
    terms = dense * features
    if reduce == "max":
        expected = torch.where(within, terms, -torch.inf).amax(1)
        expected = torch.where(within.any(1), expected, 0.0)
    else:
        expected = terms.sum(1)
        if reduce == "mean":
            expected = expected / torch.where(within.any(1), dense.sum(1), 1.0)
    assert_close("aggregated", got, expected)
    leaves = query, points, features, layer
    grads = (torch.autograd.grad(v.square().sum(), leaves, materialize_grads=True) for v in (got, expected))
    for name, mine, theirs in zip((*NAMES[:3], "layer"), *grads, strict=True):
        assert_close(f"d_{name}", mine, theirs)


@forms
def test_values_that_are_not_finite_stay_where_they_are(form: str, on_cpu: Where):
    problem = by_id("plain").problem()
    features = problem.features.clone()
    features[0] = torch.nan
    neighbors = radius_neighbors(*problem[:2], 0.3, backend="torch", **FORMS[form])
    got = aggregate(features, neighbors, backend=on_cpu.backend)
    has_it = reference.within(*problem[:2], torch.tensor(0.3))[:, 0]
    assert got[has_it].isnan().all()
    assert got[~has_it].isfinite().all()


@forms
def test_few_pairs_in_many_slots(where: Where, form: str):
    """Indices of 32 bits, on every device, as sums over a matrix of all pairs have it."""
    given = _leaves(by_id("fp64").problem())
    leaves = tuple(leaf.detach().to(where.device).requires_grad_() for leaf in given)
    query, points, features, _, weights = leaves
    found = radius_neighbors(query, points, 0.5, backend="torch", **FORMS[form])
    found = found._replace(indices=found.indices.int())
    got = aggregate(
        features, found, kernel="inverse_distance", eps=0.2, reference_weights=weights, backend=where.backend
    )
    apart = reference.length(query[:, None] - points)
    matrix = torch.where(apart <= 0.5, apart.clamp(min=0.2) ** -2.0, 0.0) * weights
    total = matrix.sum(1, keepdim=True)
    expected = torch.where(total != 0, matrix @ features / torch.where(total != 0, total, 1.0), 0.0)
    wanted = _derivatives(expected, leaves)
    for name, value in _derivatives(got, leaves).items():
        assert_close(name, value, wanted[name])


@forms
@pytest.mark.parametrize("through", [0, 1], ids=["features", "weights"])
def test_second_derivatives_through_one_gradient(through: int, form: str, where: Where):
    problem = by_id("fp64").problem(where.device)
    found = radius_neighbors(*problem[:2], 0.5, backend="torch", **FORMS[form])
    made = []
    for backend in (where.backend, "torch"):
        leaves = [t.clone().requires_grad_() for t in (problem.features, found.distances.cos().nan_to_num())]
        sums = aggregate(leaves[0], found, weights=leaves[1], reduce="sum", backend=backend)
        (first,) = torch.autograd.grad(sums.sin().sum(), leaves[through], create_graph=True)
        made.append(torch.autograd.grad(first.square().sum(), leaves))
    for name, got, expected in zip(("features", "weights"), *made, strict=True):
        assert_close(f"dd_{name}", got, expected)


@forms
def test_sums_of_references(form: str):
    """Also with slots that are left over."""
    problem = by_id("fp64").problem()
    found = radius_neighbors(*problem[:2], 0.5, backend="torch", **FORMS[form])
    count = len(problem.reference_points)
    rows = torch.where(found.indices >= 0, found.indices, count)
    weights = torch.where(found.indices >= 0, found.distances, 0.0)
    lists = PairSums(rows, None if form == "padded" else found.row_splits)
    upstream = torch.linspace(-1, 2, lists.queries * 3).view(-1, 3).double()
    if form == "padded":
        queries = torch.arange(lists.queries)[:, None].expand(rows.shape)
    else:
        queries = found.query_indices.clamp(min=0)
    terms = (weights[..., None] * upstream[queries]).flatten(0, -2)
    expected = terms.new_zeros(count + 1, 3).index_add(0, rows.flatten(), terms)[:count]
    assert expected.abs().sum() > 0
    assert_close("sums", lists.of_references(upstream, weights, count), expected)


@forms
def test_compiled_equals_eager(form: str, on_cpu: Where):
    torch._dynamo.reset()
    problem = by_id("odd-sizes").problem()
    features = problem.features.clone().requires_grad_()

    def loss(features: Tensor, query: Tensor) -> Tensor:
        points = problem.reference_points
        neighbors = radius_neighbors(query, points, 0.4, displacements=True, backend="torch", **FORMS[form])
        weights = neighbors.displacements.square().sum(-1, keepdim=True).sin()
        smooth = aggregate(features, neighbors, kernel="compact", backend=on_cpu.backend)
        given = {"weights": weights, "reduce": "sum", "backend": on_cpu.backend}
        return (aggregate(features, neighbors, **given) + smooth).square().sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        query = problem.query_points.clone().requires_grad_()
        value = function(features, query)
        results.append((value, *torch.autograd.grad(value, (features, query))))
    for name, got, expected in zip(("loss", "d_features", "d_query_points"), *results, strict=True):
        assert_close(name, got, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": torch.ones(9, 5)}, r"weights must have shape \(9, 4\).*got \(9, 5\)"),
        ({"kernel": "cubic"}, "kernel must be one of exponential, .*; got 'cubic'"),
        ({"reduce": "median"}, "reduce must be one of mean, sum, max; got 'median'"),
        ({"kernel": "compact"}, 'kernel="compact" ends at the radius of the list'),
        ({"reference_weights": torch.ones(3)}, r"reference_weights must have shape \(20,\)"),
        ({"neighbors": torch.zeros(9, 4)}, "neighbors must be Neighbors or NeighborList"),
        ({"features": torch.ones(2, 20, 3)}, "in as many clouds as features"),
    ],
)
def test_refusals(options: dict, message: str):
    distances, rows = knn(torch.rand(9, 3), torch.rand(20, 3), 4, backend="torch")
    arguments = {"features": torch.ones(20, 3), "neighbors": Neighbors(rows, distances)}
    with pytest.raises((ValueError, TypeError), match=message):
        aggregate(**(arguments | options))


def test_slots_without_queries():
    none, points = torch.rand(0, 3), torch.rand(5, 3)
    found = radius_neighbors(none, points, torch.rand(0), capacity=4, backend="torch")
    assert aggregate(points, found, kernel="compact").shape == (0, 3)


def test_a_list_is_a_sparse_matrix():
    """Rows ascend, as torch's own sparse matrices demand."""
    problem = by_id("plain").problem()
    found = radius_neighbors(*problem[:2], 0.4, capacity=None, backend="torch")
    assert isinstance(found, NeighborList)
    size = len(problem.query_points), len(problem.reference_points)
    with torch.sparse.check_sparse_tensor_invariants():
        matrix = torch.sparse_csr_tensor(found.row_splits, found.indices, (-found.distances).exp(), size)
    expected = aggregate(problem.features, found, sigma=1.0, reduce="sum")
    assert_close("aggregated", matrix @ problem.features, expected)

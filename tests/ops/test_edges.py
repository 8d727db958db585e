"""What the contract says where rounding, order, or a mask decide: the same on every backend."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, func

import pointproj
from pointproj.benchmark.cases import Problem
from pointproj.ops.specification.rounding import largest_square_within, largest_squares_within, rounded_root
from tests.conftest import Where
from tests.ops.cases import by_id
from tests.oracle import assert_close, run

positions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
operators = pytest.mark.parametrize("operator", ["knn", "radius"])


def _cloud(
    dtype: torch.dtype, device: str, queries: int = 400, references: int = 2000
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.rand(n, 3, generator=generator, dtype=torch.float64) for n in (queries, references))
    return tuple(points.to(device, dtype) for points in made)


def _numbers(dtype: torch.dtype) -> Tensor:
    """Of every size that the dtype holds, and those at its ends."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.finfo(dtype)
    lowest, highest = np.log(limits.tiny), np.log(limits.max)
    exponents = torch.rand(20_000, generator=generator, dtype=torch.float64) * (highest - lowest) + lowest
    ends = 0.0, 1.0, 4.0, limits.tiny, limits.tiny * limits.eps, limits.max, 1 - limits.eps / 2
    return torch.cat(
        [exponents.exp(), torch.rand(20_000, generator=generator), torch.tensor(ends, dtype=torch.float64)]
    ).to(dtype)


@positions
def test_roots_are_rounded_correctly(dtype: torch.dtype):
    squares = torch.cat([_numbers(dtype), torch.tensor([torch.inf, torch.nan], dtype=dtype)])
    np.testing.assert_array_equal(rounded_root(squares).numpy(), np.sqrt(squares.numpy()))


@positions
def test_the_largest_square_within_a_radius(dtype: torch.dtype):
    radii = _numbers(dtype)
    squares = largest_squares_within(radii).numpy()
    with np.errstate(over="ignore"):
        assert (np.sqrt(squares) <= radii.numpy()).all()
        assert (np.sqrt(np.nextafter(squares, squares.dtype.type(np.inf))) > radii.numpy()).all()
    normal = (radii >= torch.finfo(dtype).tiny).numpy()
    of_numbers = [largest_square_within(radius, dtype) for radius in radii[normal][::100].tolist()]
    np.testing.assert_array_equal(of_numbers, squares[normal][::100])
    assert (largest_squares_within(torch.tensor([-1.0, torch.nan], dtype=dtype)) == -1).all()


@positions
@pytest.mark.parametrize("place", [0, 3])
def test_a_radius_taken_from_a_distance_includes_its_point(place: int, dtype: torch.dtype, where: Where):
    """Before the comparison was of squares, one distance in ten was lost."""
    query, points = _cloud(dtype, where.device)
    distances, rows = pointproj.knn(query, points, 4, backend=where.backend)
    squares = (query[:, None] - points[rows]).square()
    expected = np.sqrt((squares[..., 0] + squares[..., 1] + squares[..., 2]).cpu().numpy())
    np.testing.assert_array_equal(distances.cpu().numpy(), expected)
    for radius in distances[::40, place].tolist():
        within = distances <= radius
        _, found = pointproj.knn(query, points, 4, max_radius=radius, backend=where.backend)
        assert torch.equal(found, torch.where(within, rows, -1))
    where.skip_unless("radius", "lists")
    radii = distances[:, place].contiguous()
    for radius in (radii, *radii[::100].tolist()):
        padded = pointproj.radius_neighbors(query, points, radius, max_neighbors=4, backend=where.backend)
        limit = radius[:, None] if isinstance(radius, Tensor) else radius
        assert torch.equal(padded.indices, torch.where(distances <= limit, rows, -1))
        assert torch.equal(padded.distances, torch.where(distances <= limit, distances, torch.inf))
        listed = pointproj.radius_neighbors(query, points, radius, capacity=None, backend=where.backend)
        assert torch.equal(listed.row_splits.diff().clamp(max=5), padded.counts)
    ones = torch.ones(len(points), 1, dtype=dtype, device=where.device)
    options = {"kernel": "uniform", "reduce": "sum", "backend": where.backend}
    for at, radius in enumerate(radii[:20].tolist()):
        count = pointproj.radius_aggregate(query[at : at + 1], points, ones, radius, **options)
        assert count.item() == place + 1


@operators
def test_a_compact_kernel_ends_at_the_last_bit(operator: str, where: Where):
    """At the radius the weight is 0; there torch's own root on a CPU is off by a bit."""
    query, point = _cloud(torch.float32, where.device, 2000, 1)
    squared = pointproj.ops.specification.reference.squared_distances(query, point)[:, 0]
    at_end = rounded_root(squared)
    row = (squared.cpu().sqrt() != at_end.cpu()).int().argmax()  # any row where all roots are right
    features = torch.ones(1, 3, device=where.device)
    for radius, expected in ((at_end[row], 0.0), (torch.nextafter(at_end[row], at_end.new_tensor(9.0)), 1.0)):
        problem = Problem(query[row, None], point, features)
        own = {"max_radius": radius.item()} if operator == "knn" else {}
        neighborhood = 1 if operator == "knn" else radius.item()
        got = run(operator, problem, neighborhood, 0.1, kernel="compact", backend=where.backend, **own)
        assert got.unique().tolist() == [expected]


@positions
def test_distances_in_a_box_are_rounded_correctly(dtype: torch.dtype, where: Where):
    """Also where they get gradients, in reverse and forward mode."""
    query, points = _cloud(dtype, where.device)
    box = (1.0, 1.0, 1.0)
    expected, _ = pointproj.knn(query, points, 4, box=box, backend=where.backend)
    _, rows = pointproj.knn(query, points, 4, box=box, backend=where.backend)
    delta = query[:, None] - points[rows]
    squares = (delta - delta.round()).square()
    rounded = np.sqrt((squares[..., 0] + squares[..., 1] + squares[..., 2]).cpu().numpy())
    np.testing.assert_array_equal(expected.cpu().numpy(), rounded)
    with_grad, _ = pointproj.knn(query.clone().requires_grad_(), points, 4, box=box, backend=where.backend)
    assert torch.equal(with_grad, expected)
    value, along = func.jvp(
        lambda q: pointproj.knn(q, points, 4, box=box, backend=where.backend)[0], (query,), (query,)
    )
    assert torch.equal(value, expected)
    units = (delta - delta.round()) / expected[..., None]
    torch.testing.assert_close(along, (units * query[:, None]).sum(-1), rtol=1e-4, atol=1e-5)


def _aggregated(
    operator: str, points: tuple[Tensor, Tensor], features: Tensor, where: Where, **options
) -> Tensor:
    """Of two neighbours, or of all within a radius that includes both."""
    if operator == "knn":
        return pointproj.knn_aggregate(*points, features, 2, backend=where.backend, **options)
    return pointproj.radius_aggregate(*points, features, 1.0, backend=where.backend, **options)


def _pair(where: Where, distances: tuple[float, float] = (0.1, 0.5)) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """A query and two points at these distances, and their features."""
    points = torch.tensor([[distances[0], 0, 0], [0, distances[1], 0]], device=where.device)
    features = torch.tensor([[3.0, -1.0, 0.5], [2.0, 7.0, 1.0]], device=where.device)
    return (torch.zeros(1, 3, device=where.device), points), features


@operators
@pytest.mark.parametrize("kernel", ["exponential", "gaussian", "inverse_distance"])
@pytest.mark.parametrize("unused", [3.0, torch.nan], ids=["number", "nan"])
def test_a_weight_of_zero_has_no_influence(unused: float, kernel: str, operator: str, where: Where):
    """The other is 100 sigma farther: relative to the nearest, its weight would vanish."""
    points, features = _pair(where)
    features[0, 0] = unused
    weights = torch.tensor([0.0, 2.0], device=where.device)
    leaves = [t.requires_grad_() for t in (*points, features, weights)]
    options = {"kernel": kernel, "reference_weights": weights, "sigma": 0.003, "power": 60.0}
    aggregated = _aggregated(operator, points, features, where, **options)
    assert torch.equal(aggregated[0], features[1])
    for gradient in torch.autograd.grad(aggregated.sum(), leaves):
        assert gradient.isfinite().all()
    neighbors = pointproj.radius_neighbors(*points, 1.0, max_neighbors=2, backend="torch")
    over_list = pointproj.aggregate(features, neighbors, **options)
    assert torch.equal(over_list[0], features[1])


@operators
def test_gradient_of_a_weight_that_is_zero(operator: str, where: Where):
    points, features = _pair(where, (0.1, 0.3))
    weights = torch.tensor([0.0, 2.0], device=where.device, requires_grad=True)
    aggregated = _aggregated(operator, points, features, where, sigma=0.1, reference_weights=weights)
    (by_weight,) = torch.autograd.grad(aggregated[0, 0], weights)
    expected = torch.tensor([np.exp(2.0) / 2 * (3.0 - 2.0), 0.0], dtype=torch.float32)
    torch.testing.assert_close(by_weight.cpu(), expected, rtol=1e-5, atol=1e-5)


@operators
def test_weights_that_cancel_and_negative_ones(operator: str, where: Where):
    points, features = _pair(where, (0.25, 0.25))
    for weights, expected in (
        ([-1.0, 1.0], [0.0] * 3),
        ([-1.0, 2.0], [1.0, 15.0, 1.5]),
        ([0.0, 0.0], [0.0] * 3),
    ):
        given = torch.tensor(weights, device=where.device)
        aggregated = _aggregated(operator, points, features, where, reference_weights=given)
        torch.testing.assert_close(aggregated[0].cpu(), torch.tensor(expected))


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("order", ["reversed", "holes-first"])
def test_neighbors_in_any_order(order: str, weighted: bool, where: Where):
    """Farthest first, weights relative to the first were inf."""
    query, points = _cloud(torch.float32, where.device)
    rows = pointproj.knn(query, points, 40, backend=where.backend)[1]
    if order == "holes-first":
        rows = torch.where(torch.arange(40, device=where.device) % 3 == 1, -1, rows)
    generator = torch.Generator().manual_seed(1)
    leaves = [
        points.clone().requires_grad_(),
        torch.randn(len(points), 3, generator=generator).to(where.device).requires_grad_(),
        torch.tensor(1e-3, device=where.device, requires_grad=True),
    ]
    weights = (torch.rand(len(points), generator=generator) - 0.3).clamp(min=0).to(where.device)

    def derivatives(rows: Tensor) -> tuple[Tensor, ...]:
        aggregated = pointproj.knn_aggregate(
            query, leaves[0], leaves[1], 40, sigma=leaves[2], neighbor_indices=rows, backend=where.backend,
            reference_weights=weights if weighted else None,
        )  # fmt: skip
        return aggregated, *torch.autograd.grad(aggregated.square().sum(), leaves)

    expected = derivatives(rows)
    for got, value in zip(derivatives(rows.flip(1)), expected, strict=True):
        assert got.isfinite().all()
        assert_close(order, got, value)


@operators
@pytest.mark.parametrize("kernel", ["exponential", "gaussian"])
@pytest.mark.parametrize("scale", [1e-14, 1e-10, 1e10, 1e14])
def test_gradient_of_sigma_of_any_size(scale: float, kernel: str, operator: str, where: Where):
    """Coordinates and sigma of this size: the gradient is that of size 1, divided by it."""
    query, points = _cloud(torch.float32, where.device)
    points, features = points[:50], points[:50]
    made = []
    for size in (1.0, scale):
        sigma = torch.tensor(0.2 * size, device=where.device, requires_grad=True)
        given = query * size, points * size, features
        neighborhood = 4 if operator == "knn" else 0.5 * size
        aggregated = run(operator, Problem(*given), neighborhood, sigma, kernel=kernel, backend=where.backend)
        (by_sigma,) = torch.autograd.grad(aggregated.sum(), sigma)
        made.append(by_sigma * size)
    torch.testing.assert_close(made[1], made[0], rtol=2e-3, atol=0.0)


def _in_inference_mode(call: Callable[[], Tensor]) -> None:
    with torch.inference_mode():
        call()


def _in_a_transform(call: Callable[[], Tensor]) -> None:
    func.grad(lambda x: call().sum() * x)(torch.ones(()))


def _exported(call: Callable[[], Tensor]) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return call() + x

    torch.export.export(Module(), (torch.zeros(()),), strict=False)


MODES = {
    "inference": _in_inference_mode,
    "transform": _in_a_transform,
    "export": _exported,
}


@operators
@pytest.mark.parametrize("radius", [None, 0.4], ids=["knn-index", "radius-index"])
@pytest.mark.parametrize("mode", MODES)
def test_an_index_remembers_no_mode(mode: str, radius: float | None, operator: str, on_cpu: Where):
    problem = by_id("plain").problem("cpu")
    features = problem.features.clone().requires_grad_()
    index = pointproj.build_index(problem.reference_points, radius=radius, backend=on_cpu.backend)
    tables = dict(index.tables)

    def call() -> Tensor:
        given = problem._replace(features=features)
        return run(operator, given, 4 if operator == "knn" else 0.4, 0.1, index=index)

    expected = torch.autograd.grad(call().sum(), features)[0]
    MODES[mode](call)
    assert index.tables == tables
    assert torch.equal(torch.autograd.grad(call().sum(), features)[0], expected)


def test_an_index_built_in_inference_mode_serves_training(where: Where):
    problem = by_id("plain").problem(where.device)
    features = problem.features.clone().requires_grad_()
    with torch.inference_mode():
        index = pointproj.build_index(problem.reference_points, backend=where.backend)
    aggregated = pointproj.knn_aggregate(*problem[:2], features, 4, index=index)
    aggregated.sum().backward()
    assert features.grad.isfinite().all()


@pytest.mark.parametrize("weighted", [(), (1,), (3,)], ids=["one", "column", "channels"])
@pytest.mark.parametrize("lists", ["no-pairs", "no-capacity", "no-queries", "padded-without-queries"])
@pytest.mark.operators("radius", "lists")
def test_sums_over_lists_without_slots(lists: str, weighted: tuple[int, ...], where: Where):
    query, points = _cloud(torch.float32, where.device)
    query = query[:0] if "queries" in lists else query[:9]
    capacity = {"no-pairs": None, "no-capacity": 0, "no-queries": None}
    form = {"max_neighbors": 5} if lists not in capacity else {"capacity": capacity[lists]}
    radius = 1e-6 if lists == "no-pairs" else 0.5
    neighbors = pointproj.radius_neighbors(query, points, radius, backend=where.backend, **form)
    assert not neighbors.indices.numel()
    weights = torch.ones(*neighbors.indices.shape, *weighted, device=where.device, requires_grad=True)
    for reduce in ("mean", "sum", "max"):
        aggregated = pointproj.aggregate(points, neighbors, weights=weights, reduce=reduce)
        assert torch.equal(aggregated, torch.zeros(len(query), 3, device=where.device))
        aggregated.sum().backward()


def test_a_batch_of_no_clouds(where: Where):
    query, points, features = (
        torch.rand(0, n, 3, device=where.device, requires_grad=True) for n in (5, 7, 7)
    )
    index = pointproj.build_index(points, backend=where.backend)
    for known in (None, index):
        distances, rows = pointproj.knn(query, points, 2, index=known, backend=where.backend)
        assert distances.shape == rows.shape == (0, 5, 2)
        aggregated = pointproj.knn_aggregate(query, points, features, 2, index=known, backend=where.backend)
        assert aggregated.shape == (0, 5, 3)
        aggregated.sum().backward()
    where.skip_unless("radius")
    aggregated = pointproj.radius_aggregate(query, points, features, 0.3, backend=where.backend)
    assert aggregated.shape == (0, 5, 3)
    where.skip_unless("lists")
    for form, shape in (
        ({"max_neighbors": 3}, (0, 5, 3)),
        ({"capacity": 4}, (4,)),
        ({"capacity": None}, (0,)),
    ):
        neighbors = pointproj.radius_neighbors(query, points, 0.3, backend=where.backend, **form)
        assert neighbors.indices.shape == shape
        assert pointproj.aggregate(features, neighbors).shape[0] == 0


def _packed_at_odd_places(tensor: Tensor) -> Tensor:
    """The same values where no address is a multiple of 16 bytes."""
    place = tensor.new_empty(tensor.numel() + 1)
    place[1:] = tensor.flatten()
    return place[1:].view(tensor.shape)


@operators
@pytest.mark.parametrize("indexed", [False, True], ids=["", "index"])
@pytest.mark.parametrize("name", ["plain", "channels-33", "fp64"])
def test_saved_tensors_may_come_back_at_any_address(name: str, indexed: bool, operator: str, where: Where):
    """Of a hook that packs several into one: a GPU reads tables 16 bytes at a time."""
    problem = by_id(name).problem(where.device)
    leaves = [t.clone().requires_grad_() for t in problem[:3]]
    options = {"backend": where.backend}
    if indexed:
        radius = 0.4 if operator == "radius" else None
        options["index"] = pointproj.build_index(problem.reference_points, radius=radius, **options)

    def gradients() -> tuple[Tensor, ...]:
        aggregated = run(operator, Problem(*leaves), 4 if operator == "knn" else 0.4, 0.1, **options)
        return torch.autograd.grad(aggregated.square().sum(), leaves)

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, _packed_at_odd_places):
        got = gradients()
    for of, gradient, value in zip(("queries", "points", "features"), got, expected, strict=True):
        assert_close(of, gradient, value)

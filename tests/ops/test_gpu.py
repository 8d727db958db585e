"""What only a GPU can get wrong: waiting for the host, graph capture, streams, other devices, atomics."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import warp as wp
from torch import Tensor

import pointproj
from pointproj.benchmark.cases import Case, Problem, clustered
from pointproj.ops.bridge.warp_op import ADJOINT, Launch, warp_op
from tests.conftest import Where
from tests.ops.cases import by_id, itself, uniform
from tests.ops.test_warp_checks import sum_of_near
from tests.oracle import INPUTS, Probe, assert_close, derivatives, probe, run

operators = pytest.mark.parametrize("operator", ["knn", "radius"])
SHAPES = pytest.mark.parametrize("name", ["odd-sizes", "dense", "ragged", "bf16", "fp64"])
LONG = 200_000_000  # clock cycles: a tenth of a second, in which a kernel on another stream would overtake


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise when torch makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@operators
@SHAPES
def test_nothing_waits_for_the_device(operator: str, name: str, waitless: Where):
    case = by_id(name)
    problem, at = _on_gpu(case)
    function = _call(operator, case, waitless)
    warm = derivatives(function, problem, at)
    with waiting_is_an_error():
        got = derivatives(function, problem, at)
        by_number = function(problem, case.sigma)
    for what in warm:
        assert_close(what, got[what], warm[what])
    assert_close("aggregated", by_number, warm["aggregated"])


@SHAPES
def test_neither_search_nor_index_waits(name: str, waitless: Where):
    case = by_id(name)
    problem, _ = _on_gpu(case)

    def function() -> tuple[Tensor, Tensor]:
        index = pointproj.build_index(
            problem.reference_points, backend=waitless.backend, reference_offsets=problem.reference_offsets
        )
        return pointproj.knn(*problem[:2], case.k, index=index, **problem.offsets)

    warm = function()
    with waiting_is_an_error():
        got = function()
    assert torch.equal(got[1], warm[1])


@operators
def test_compiled_code_does_not_wait(operator: str, waitless: Where):
    case = by_id("odd-sizes")
    problem, at = _on_gpu(case)
    torch._dynamo.reset()
    compiled = torch.compile(_call(operator, case, waitless), fullgraph=True)
    leaves = [t.clone().requires_grad_() for t in (*problem[:3], at.sigma)]
    problem = problem._replace(**dict(zip(INPUTS[:3], leaves[:3], strict=True)))

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(compiled(problem, leaves[3]), leaves, at.grad)

    warm = step()
    with waiting_is_an_error():
        got = step()
    for what, one, two in zip(INPUTS, got, warm, strict=True):
        assert_close(f"d_{what}", one, two)


@operators
@SHAPES
def test_captured_graph_replays_with_other_inputs(operator: str, name: str, waitless: Where):
    """Forward, backward and second backward in one graph; then other points, features and offsets."""
    case = by_id(name)
    problem, at = _on_gpu(case)
    function = _call(operator, case, waitless)
    replay, captured = _capture(lambda: derivatives(function, problem, at))
    for other in _others(case):
        for static, new in zip(problem, other, strict=True):
            if static is not None:
                static.copy_(new)
        replay()
        for what, expected in derivatives(function, other, at).items():
            assert_close(what, captured[what], expected)


@operators
@pytest.mark.parametrize("loss", ["eikonal", "force-matching"])
def test_captured_step_through_a_gradient(operator: str, loss: str, waitless: Where):
    """The gradient by positions is part of the loss, and the whole step is one graph."""
    case = by_id("odd-sizes")
    problem, at = _on_gpu(case)
    function = _call(operator, case, waitless)

    def step() -> dict[str, Tensor]:
        leaves = [t.clone().requires_grad_() for t in (*problem[:3], at.sigma)]
        values = function(problem._replace(**dict(zip(INPUTS[:3], leaves[:3], strict=True))), leaves[3])
        positions = leaves[: 1 if loss == "eikonal" else 2]
        slopes = torch.autograd.grad(values.sum(), positions, create_graph=True)
        if loss == "eikonal":
            total = ((slopes[0].square().sum(1) + 1e-6).sqrt() - 1).square().mean()
        else:
            total = values.sum(1).square().mean() + sum((s - 0.1).square().mean() for s in slopes)
        gradients = torch.autograd.grad(total, leaves)
        return {"loss": total.detach(), **dict(zip(INPUTS, gradients, strict=True))}

    replay, captured = _capture(step)
    for static, new in zip(problem[:3], case.problem("cuda", seed=9), strict=False):
        static.copy_(new)
    replay()
    for what, expected in step().items():
        assert_close(what, captured[what], expected)


@operators
def test_captured_graph_with_an_index(operator: str, waitless: Where):
    case = by_id("odd-sizes")
    problem, at = _on_gpu(case)
    index = pointproj.build_index(problem.reference_points, backend=waitless.backend)

    def function(p: Problem, sigma: Tensor) -> Tensor:
        return run(operator, p, case.neighborhood(operator), sigma, index=index)

    replay, captured = _capture(lambda: derivatives(function, problem, at))
    problem.query_points.mul_(-0.7)
    problem.features.sin_()
    replay()
    for what, expected in derivatives(function, problem, at).items():
        assert_close(what, captured[what], expected)


@operators
def test_compiled_step_in_a_captured_graph(operator: str, waitless: Where):
    case = by_id("odd-sizes")
    problem, at = _on_gpu(case)
    torch._dynamo.reset()
    function = _call(operator, case, waitless)
    compiled = torch.compile(function, fullgraph=True)

    def step(with_function: Callable) -> dict[str, Tensor]:
        leaves = [t.clone().requires_grad_() for t in (*problem[:3], at.sigma)]
        inputs = problem._replace(**dict(zip(INPUTS[:3], leaves[:3], strict=True)))
        aggregated = with_function(inputs, leaves[3])
        return dict(zip(INPUTS, torch.autograd.grad(aggregated, leaves, at.grad), strict=True))

    replay, captured = _capture(lambda: step(compiled))
    for static, new in zip(problem[:3], case.problem("cuda", seed=9), strict=False):
        static.copy_(new)
    replay()
    for what, expected in step(function).items():
        assert_close(f"d_{what}", captured[what], expected)


@operators
@SHAPES
def test_busy_side_stream(operator: str, name: str, on_gpu: Where):
    """The inputs are written on the stream only after a long kernel: work elsewhere would read zeros."""
    case = by_id(name)
    ready, at = _on_gpu(case)
    function = _call(operator, case, on_gpu)
    expected = derivatives(function, ready, at)
    late = ready._replace(**{n: torch.zeros_like(getattr(ready, n)) for n in INPUTS[:3]})
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        for buffer, value in zip(late[:3], ready[:3], strict=True):
            buffer.copy_(value)
        got = derivatives(function, late, at)
    stream.synchronize()
    for what in expected:
        assert_close(what, got[what], expected[what])


@operators
def test_two_streams_at_once(operator: str, on_gpu: Where):
    """Calls that overlap share no scratch memory."""
    case = Case("", uniform(2000, 5000), radius=0.2, channels=25)
    function = _call(operator, case, on_gpu)
    problems = [_on_gpu(case, seed) for seed in range(4)]
    expected = [derivatives(function, *p) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    got = []
    for _ in range(3):
        got.clear()
        for stream, p in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                got.append(derivatives(function, *p))
        torch.cuda.synchronize()
    for number, (one, two) in enumerate(zip(got, expected, strict=True)):
        for what in two:
            assert_close(f"{what} on stream {number}", one[what], two[what])


@pytest.mark.gpu
def test_a_hash_grid_of_warp_for_each_of_two_streams():
    """A user's operator over ``wp.HashGrid``: forward and backward on two streams that overlap."""
    grids: dict[int, wp.HashGrid] = {}

    @warp_op(
        "pointproj_tests::near_on_stream",
        outputs=lambda x: {"z": (x.shape[:1], x.dtype)},
        differentiable=["x"],
        backward=ADJOINT,
    )
    def near(launch: Launch, x: Tensor, *, z: Tensor) -> None:
        stream = torch.cuda.current_stream()
        with wp.ScopedStream(wp.stream_from_torch(stream)):
            if stream.cuda_stream not in grids:
                grids[stream.cuda_stream] = wp.HashGrid(16, 16, 16, device=f"cuda:{x.device.index}")
            grid = grids[stream.cuda_stream]
            grid.build(wp.from_torch(x, dtype=wp.vec3), 0.5)
        z.zero_()
        launch(sum_of_near, len(x), grid, x, z)

    clouds = [(torch.rand(3000, 3, device="cuda") * size).requires_grad_() for size in (2.0, 4.0)]
    close = [((x[:, None] - x).norm(dim=2) <= 0.5).float().detach() for x in clouds]
    streams = [torch.cuda.Stream() for _ in clouds]
    torch.cuda.synchronize()
    for _ in range(3):
        made = []
        for stream, x in zip(streams, clouds, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG // 10)
                z = near(x)
                made.append((z, torch.autograd.grad(z.sum(), x)[0]))
        torch.cuda.synchronize()
        for (z, d_x), x, near_ones in zip(made, clouds, close, strict=True):
            torch.testing.assert_close(z, near_ones @ x[:, 0], rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(d_x[:, 0], near_ones.sum(0), rtol=1e-4, atol=1e-3)


@operators
@pytest.mark.parametrize("cloud", ["uniform", "clustered"])
def test_deterministic_with_many_collisions(operator: str, cloud: str, on_gpu: Where, deterministic: None):
    points = uniform(20_000, 3000) if cloud == "uniform" else itself(clustered(6000))
    radius = 0.2 if cloud == "uniform" else 5e-4
    case = Case("", points, k=8, radius=radius, channels=25)
    problem, at = _on_gpu(case)
    function = _call(operator, case, on_gpu)
    first = derivatives(function, problem, at)
    for _ in range(4):
        for what, again in derivatives(function, problem, at).items():
            assert torch.equal(again, first[what]), what


@operators
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_that_is_not_current(operator: str, on_gpu: Where):
    case = by_id("ragged")
    function = _call(operator, case, on_gpu)
    expected = derivatives(function, *_on_gpu(case))
    problem = case.problem("cuda:1")
    got = derivatives(function, problem, probe(problem, case.sigma))
    for what in expected:
        assert got[what].device == torch.device("cuda:1")
        assert_close(what, got[what], expected[what])


def _call(operator: str, case: Case, where: Where) -> Callable[[Problem, Tensor], Tensor]:
    return lambda p, sigma: run(operator, p, case.neighborhood(operator), sigma, backend=where.backend)


def _on_gpu(case: Case, seed: int = 0) -> tuple[Problem, Probe]:
    problem = case.problem("cuda", seed)
    return problem, probe(problem, case.sigma)


def _others(case: Case) -> Iterator[Problem]:
    """Inputs of the case's shapes: other points, crowded points, far points, a point that is not finite."""
    yield case.problem("cuda", seed=5)
    crowded = case.problem("cuda", seed=6)
    crowded.reference_points[..., 1:, :] *= 0.03
    yield crowded
    far = case.problem("cuda", seed=7)
    far.query_points.add_(3.0)
    far.reference_points.mul_(5.0)
    yield far
    broken = case.problem("cuda", seed=8)
    broken.reference_points[..., 0, :] = torch.nan
    if broken.query_offsets is not None:
        for offsets in broken[3:]:
            offsets[1:-1] = offsets[-1] // 2  # two clouds share the points, all others are empty
    yield broken


def _capture(function: Callable[[], dict[str, Tensor]]) -> tuple[Callable[[], None], dict[str, Tensor]]:
    """Replays of the function, and the tensors that each replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()

    def replay() -> None:
        for result in results.values():
            result.fill_(torch.nan)
        graph.replay()

    return replay, results


def test_many_queries_in_and_beside_a_cluster(on_gpu: Where):
    """More queries than share warps; those beside the cluster search longest."""
    points = clustered(2**18 + 77)(torch.Generator().manual_seed(4)).float().cuda()
    rows = pointproj.knn(points, points, 8, backend=on_gpu.backend)[1]
    from_centre = (points - points.median(0).values).norm(dim=1)
    checked = torch.cat([torch.arange(0, len(points), 997, device="cuda"), from_centre.argsort()[-500:]])
    beside = ((from_centre > 2e-3) & (from_centre < 0.1)).nonzero()[:500, 0]
    checked = torch.cat([checked, beside])
    expected = pointproj.knn(points[checked], points, 8, backend="torch")[1]
    assert torch.equal(rows[checked], expected)


def test_gradient_of_features_alone_or_with_those_of_points(on_gpu: Where):
    """By atomics, or gathered: a backend may take another way where nothing else wants a gradient."""
    case = by_id("odd-sizes")
    problem, _ = _on_gpu(case)

    def gradient(*wanted: bool) -> Tensor:
        inputs = [t.detach().requires_grad_(w) for t, w in zip(problem[:3], (*wanted, True), strict=True)]
        values = pointproj.knn_aggregate(*inputs, case.k, sigma=case.sigma, backend=on_gpu.backend)
        return torch.autograd.grad(values.square().sum(), inputs[2])[0]

    assert_close("features", gradient(False, False), gradient(True, True))


@pytest.mark.operators("radius")
def test_features_larger_than_the_cache_and_few_queries(on_gpu: Where):
    """A backend may leave such features as they are instead of sorting them, and divide space otherwise."""
    g = torch.Generator("cuda").manual_seed(0)
    points = torch.rand(2**19 + 77, 3, generator=g, device="cuda")
    features = torch.randn(len(points), 32, generator=g, device="cuda")
    query = torch.rand(1001, 3, generator=g, device="cuda")

    def call(backend: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = features.to(dtype).requires_grad_()
        inputs = query.to(dtype), points.to(dtype), leaf, 0.0239
        values = pointproj.radius_aggregate(*inputs, sigma=0.01, backend=backend)
        return values.detach(), torch.autograd.grad(values.square().sum(), leaf)[0]

    got, expected = call(on_gpu.backend, torch.float32), call("torch", torch.float64)
    plain = call("torch", torch.float32)
    for name, *three in zip(("aggregated", "d_features"), got, expected, plain, strict=True):
        assert_close(name, *three)

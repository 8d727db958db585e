"""Operators whose work on the host is recorded in the second call, and replayed from the third on."""

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warp as wp
from torch import Tensor

import pointproj
from pointproj.ops.bridge import warp_launch
from pointproj.ops.bridge.replay import MOST_BYTES, MOST_PLANS, Plan, Recording, Replayable
from pointproj.ops.bridge.warp_launch import Launch, Made
from pointproj.ops.cases import by_id
from tests.conftest import Where
from tests.oracle import assert_close

CPU = torch.device("cpu")


@wp.kernel
def double(source: wp.array(dtype=wp.float32), into: wp.array(dtype=wp.float32)):
    into[wp.tid()] = 2.0 * source[wp.tid()]


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _four_times(x: Tensor, others: list[Tensor], number: float) -> tuple[Tensor, Tensor | None, Tensor]:
    """Launches by way of memory that is not returned, then operators of torch."""
    launch, memory, made = Launch(CPU), torch.empty(3, len(x)), torch.empty_like(x)
    launch(double, len(x), x, memory[2])
    launch(double, len(x), memory[2], made)
    total = made.new_zeros(x.shape)
    total[1:].copy_(made[1:])
    return made, None, total.sum()


@pytest.fixture
def replayable() -> Replayable:
    return Replayable(_four_times)


def _plans(replayable: Replayable) -> list[Any]:
    return list(replayable.of_thread.plans.values())


def test_each_call_has_values_of_its_own(replayable: Replayable):
    inputs = [_random(8, seed=seed) for seed in range(5)]
    results = [replayable(x, [_random(2)], 1.0) for x in inputs]
    assert [type(plan) for plan in _plans(replayable)] == [Plan]
    for x, (made, none, total) in zip(inputs, results, strict=True):
        assert torch.equal(made, 4 * x)
        assert none is None
        assert_close("total", total, 4 * x[1:].sum())


def test_shapes_numbers_and_shared_memory_have_plans_of_their_own(replayable: Replayable):
    x = _random(8)
    calls = (x, [], 1.0), (x, [], 2.0), (x[:4], [], 1.0), (x, [x], 1.0), (x, [_random(8)], 1.0)
    for args in calls * 3:
        assert torch.equal(replayable(*args)[0], 4 * args[0])
    assert [type(plan) for plan in _plans(replayable)] == [Plan] * len(calls)


@pytest.mark.parametrize(
    "args",
    [
        pytest.param((_random(8, 2)[:, 0], [], 1.0), id="not contiguous"),
        pytest.param((_random(8)[1:], [], 1.0), id="not aligned"),
        pytest.param((_random(8), [_random(3, 3).t()], 1.0), id="in a list"),
    ],
)
def test_tensors_laid_out_otherwise_are_not_replayed(args: tuple, replayable: Replayable):
    for _ in range(4):
        assert torch.equal(replayable(*args)[0], 4 * args[0])
    assert not _plans(replayable)


def test_overlapping_arguments_are_not_recorded(replayable: Replayable):
    x = _random(8)
    for _ in range(4):
        assert torch.equal(replayable(x, [x[4:]], 1.0)[0], 4 * x)
    assert _plans(replayable) == ["not repeatable"]


def _through_large_memory(x: Tensor) -> tuple[Tensor]:
    memory, made = torch.empty(MOST_BYTES // 4 + 1), torch.empty_like(x)
    Launch(CPU)(double, len(x), x, memory)
    Launch(CPU)(double, len(x), memory, made)
    return (made,)


CONSTANT = torch.ones(8)


def _from_a_constant(_: Tensor) -> tuple[Tensor]:
    made = torch.empty(8)
    Launch(CPU)(double, 8, CONSTANT, made)
    return (made,)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: (x.sin(),), id="another operator"),
        pytest.param(lambda x: (torch.full((2,), x[0].item()),), id="a value"),
        pytest.param(lambda x: (x,), id="not new"),
        pytest.param(lambda x: (torch.zeros(8).copy_(CONSTANT),), id="a constant"),
        pytest.param(_from_a_constant, id="a constant in a launch"),
        pytest.param(_through_large_memory, id="much memory"),
    ],
)
def test_what_cannot_be_repeated_is_done_anew(function: Callable[[Tensor], tuple]):
    replayable = Replayable(function)
    for seed in range(4):
        x = _random(8, seed=seed)
        assert torch.equal(replayable(x)[0], function(x)[0])
    assert _plans(replayable) == ["not repeatable"]


def test_plans_are_few(replayable: Replayable):
    x = _random(8)
    for number in range(3 * MOST_PLANS):
        replayable(x, [], float(number))
    assert len(_plans(replayable)) <= MOST_PLANS


def test_threads_do_not_share_plans(replayable: Replayable):
    wrong = []

    def work(seed: int) -> None:
        x = _random(20_000, seed=seed)
        wrong.extend(seed for _ in range(50) if not torch.equal(replayable(x, [], 1.0)[0], 4 * x))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_kernels_on_a_gpu_get_the_addresses_of_the_call(monkeypatch: pytest.MonkeyPatch):
    """Warp takes a pointer to each argument there, the first to the bounds."""
    launch, x, y = Launch(CPU), _random(8), torch.empty(8)
    launch(double, 8, x, y)
    made = Made(next(r for r in launch._recorded.values() if r.command.kernel is double))
    made.command = SimpleNamespace(
        device=SimpleNamespace(context=11, is_cpu=False),
        hooks=SimpleNamespace(forward_smem_bytes=12),
        **{"max_blocks": 0, "block_dim": 64, "grid_stride": False, "cluster_dim": 1},
    )
    made.function, launched = 13, []

    def launch_kernel(*args: Any) -> int:
        launched.append((*args[:8], *(ctypes.c_int64.from_address(a).value for a in args[8][1:]), *args[9:]))
        return 0

    core = SimpleNamespace(wp_cuda_launch_kernel=launch_kernel)
    monkeypatch.setattr(warp_launch.context, "runtime", SimpleNamespace(core=core))
    assert made.pointers == [x.data_ptr(), y.data_ptr()]
    made.again([made], [[(0, 16), (-1, 32)]])(None, [1024, 0, 4096], 99)
    assert launched == [(11, 13, 8, 0, 64, 0, 1, 12, 1024 + 16, 4096 + 32, 99, None)]


def _compiled_by_triton(signature: dict[str, str], **other: Any) -> SimpleNamespace:
    extra = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size")
    about = {"num_warps": 2, "shared": 12, "num_ctas": 1, "target": SimpleNamespace(backend="cuda")}
    metadata = SimpleNamespace(**(about | dict.fromkeys(extra, 0) | other))
    return SimpleNamespace(
        function=13, name="kernel", metadata=metadata, src=SimpleNamespace(signature=signature)
    )


def test_kernels_of_triton_get_the_addresses_of_the_call(monkeypatch: pytest.MonkeyPatch):
    """The driver takes a pointer to each parameter, and to two more that are 0."""
    launch = pytest.importorskip("pointproj.ops.backends.triton.launch")
    launched = []

    def launch_kernel(*args: Any) -> int:
        launched.append((*args[:9], *(ctypes.c_int64.from_address(a or 0).value for a in args[9]), args[10]))
        return 0 if len(launched) < 3 else 700

    monkeypatch.setattr(launch, "_launch_kernel", lambda: launch_kernel)
    compiled = _compiled_by_triton({"x": "*fp32", "n": "i32", "N": "constexpr", "none": "*i32", "m": "i64"})
    made = [launch._made(compiled, (5, 6, 1), [4096, n, 7, 0, -3]) for n in (8, 9)]
    assert [m.pointers for m in made] == [[4096, 0], [4096, 0]]
    made.insert(1, launch._made(compiled, (0, 6, 1), [4096, 7, 7, 0, -3]))  # for no points: not launched
    run = launch.Made.again(made, [[(0, 16), None], [(0, 0), None], [(-1, 32), None]])
    run(None, [1024, 0, 8192], 99)
    fixed = 13, 5, 6, 1, 64, 1, 1, 12, 99
    assert launched == [(*fixed, 1040, 8, 0, -3, 0, 0, None), (*fixed, 8224, 9, 0, -3, 0, 0, None)]
    with pytest.raises(RuntimeError, match="kernel was not launched: CUDA error 700"):
        run(None, [1024, 0, 8192], 99)


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("i32", {"num_ctas": 2}),
        ("i32", {"global_scratch_size": 128}),
        ("i32", {"launch_pdl": True}),
        ("fp32", {}),
    ],
)
def test_what_triton_does_besides_a_launch_is_not_replayed(kind: str, other: dict[str, Any]):
    launch = pytest.importorskip("pointproj.ops.backends.triton.launch")
    assert launch._made(_compiled_by_triton({"n": kind}, **other), (1, 1, 1), [2]) is None


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("operator", ["knn", "radius"])
def test_operators_in_later_calls(operator: str, itself: bool, where: Where):
    """The neighbours of other points, with other features, in the fourth call."""
    where.skip_unless(operator)
    aggregate = pointproj.knn_aggregate if operator == "knn" else pointproj.radius_aggregate
    for seed in range(4):
        p = by_id("plain").problem(seed=seed, device=where.device)
        results = []
        for backend in (where.backend, "torch"):
            leaves = [t.detach().clone().requires_grad_() for t in p[:3]]
            query = leaves[1] if itself else leaves[0]
            value = aggregate(query, *leaves[1:], 5 if operator == "knn" else 0.4, backend=backend)
            results.append((value, *torch.autograd.grad(value.sum(), leaves[1:])))
        names = ("aggregated", "d_reference_points", "d_features")
        for name, got, expected in zip(names, *results, strict=True):
            assert_close(name, got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "warp"])
@pytest.mark.parametrize("operator", ["knn", "radius"])
def test_later_calls_on_other_streams_and_in_a_graph(operator: str, backend: str):
    """Of two sizes in turn, then captured and replayed with other values, and then eager again."""
    aggregate = pointproj.knn_aggregate if operator == "knn" else pointproj.radius_aggregate
    near = 5 if operator == "knn" else 0.4

    def results(given: list[Tensor], backend: str) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in given]
        value = aggregate(*leaves, near, backend=backend)
        return value, *torch.autograd.grad(value.square().sum(), leaves)

    def check(given: list[Tensor], got: tuple[Tensor, ...]) -> None:
        names = ("aggregated", "d_query_points", "d_reference_points", "d_features")
        for name, one, expected in zip(names, got, results(given, "torch"), strict=True):
            assert_close(name, one, expected)

    def problem(queries: int, points: int, seed: int) -> list[Tensor]:
        sizes = (queries, 3), (points, 3), (points, 7)
        return [_random(*size, seed=seed + i).cuda() for i, size in enumerate(sizes)]

    side = torch.cuda.Stream()
    for seed in range(5):
        for sizes in ((33, 129), (65, 257)):
            given = problem(*sizes, seed)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                got = results(given, backend)
            torch.cuda.current_stream().wait_stream(side)
            check(given, got)
            check(given, results(given, backend))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(given, backend)
    for seed in (7, 8):
        for tensor, value in zip(given, problem(65, 257, seed), strict=True):
            tensor.copy_(value)
        graph.replay()
        check(given, captured)
    check(given, results(given, backend))


def test_recordings_in_several_threads_leave_no_mode_behind():
    """torch.compile runs nothing compiled where it believes that a mode is on."""
    from torch.utils import _python_dispatch

    second_entered, first_left = threading.Event(), threading.Event()

    def second() -> None:
        with Recording([]):
            second_entered.set()
            first_left.wait(10)

    with Recording([]):
        thread = threading.Thread(target=second)
        thread.start()
        second_entered.wait(10)
    first_left.set()
    thread.join()
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    assert not _python_dispatch.is_in_any_mode_without_ignore_compile_internals()

"""The memory that Warp's kernels take their parameters from: as Warp itself would fill it."""

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
import warp as wp
from torch import Tensor

from pointproj.ops.bridge.warp_launch import Launch, _Recorded

floats = wp.array(dtype=wp.float32)


class Inner(NamedTuple):
    flag: bool
    numbers: Tensor


class Outer(NamedTuple):
    count: int
    inner: Inner
    factor: float
    table: Tensor


@wp.struct
class InnerStruct:
    flag: bool
    numbers: wp.array(dtype=wp.int64)


@wp.struct
class OuterStruct:
    count: int
    inner: InnerStruct
    factor: wp.float64
    table: wp.array2d(dtype=wp.float32)


@wp.kernel
def takes_everything(
    small: wp.int8,
    points: wp.array(dtype=wp.vec3d),
    flag: bool,
    matrices: wp.array2d(dtype=wp.mat22),
    outer: OuterStruct,
    direction: wp.vec3,
    large: wp.uint64,
    cube: wp.array3d(dtype=wp.float16),
    absent: wp.array(dtype=float),
    ratio: float,
): ...


@wp.kernel
def fill(value: float, out: floats):
    out[wp.tid()] = value


class CopyFields(NamedTuple):
    table: Tensor


@wp.struct
class CopyStruct:
    table: floats


@wp.kernel
def copy(table: floats, fields: CopyStruct, out: floats):
    i = wp.tid()
    out[i] = table[i] + fields.table[i]


def _struct(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_parameters_are_where_warp_puts_them():
    wp.init()
    points, matrices = torch.rand(7, 3, dtype=torch.float64), torch.rand(4, 5, 2, 2)[::2]
    numbers, table = torch.arange(5), torch.rand(6, 8)[1:, ::2]
    cube = torch.rand(2, 3, 4).half().permute(2, 0, 1)
    outer = Outer(-3, Inner(True, numbers), 1e-9, table)
    values = -5, points, True, matrices, outer, wp.vec3(1.0, 2.0, 3.0), 2**63, cube, None, 0.1
    arrays = {
        "points": wp.from_torch(points, dtype=wp.vec3d),
        "matrices": wp.from_torch(matrices, dtype=wp.mat22),
        "numbers": wp.from_torch(numbers),
        "table": wp.from_torch(table),
        "cube": wp.from_torch(cube),
    }
    inner = _struct(InnerStruct, flag=True, numbers=arrays["numbers"])
    struct = _struct(OuterStruct, count=-3, inner=inner, factor=1e-9, table=arrays["table"])
    given = list(values)
    given[1], given[3], given[4], given[7] = arrays["points"], arrays["matrices"], struct, arrays["cube"]
    expected = wp.launch(takes_everything, 1, inputs=given, device="cpu", record_cmd=True).params[1:]

    recorded = _Recorded(takes_everything, 1, None, adjoint=False)
    recorded.launch(1, values, {}, None)
    names = [a.label for a in takes_everything.adj.args]
    for name, written, param in zip(names, recorded.parameters, expected, strict=True):
        assert bytes(written) == bytes(param), name


def test_arguments_that_do_not_fit():
    launch = Launch(torch.device("cpu"))
    for wrong in (torch.rand(3, dtype=torch.float64), torch.rand(3, 1), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(TypeError, match="cannot be a torch"):
            launch(fill, 3, 1.0, wrong)
    with pytest.raises(ValueError, match="shorter"):
        launch(fill, 3, 1.0)


def test_sizes_change_and_nothing_is_launched_for_none():
    launch, out = Launch(torch.device("cpu")), torch.zeros(200)
    for count in (*range(200), 3, 0, 150):
        out.zero_()
        launch(fill, count, float(count), out)
        assert out.tolist() == [float(count)] * count + [0.0] * (200 - count)


def test_a_view_of_negated_numbers_is_what_torch_says_it_is():
    z = torch.complex(torch.rand(5), torch.rand(5))
    assert z.conj().imag.is_neg()
    out, table = torch.empty(5), z.conj().imag
    Launch(torch.device("cpu"))(copy, 5, table, CopyFields(table), out)
    assert torch.equal(out, -2 * z.imag)


def test_a_signal_handler_may_launch_what_it_interrupts():
    device, count = torch.device("cpu"), 2_000
    outer, handled, wrong = torch.empty(count), [], []

    def handler(*_: Any) -> None:  # one may interrupt another
        handled.append(True)
        number, inner = -float(len(handled)), torch.empty(count)
        Launch(device)(fill, count, number, inner)
        wrong.extend([number] if not bool((inner == number).all()) else [])

    Launch(device)(fill, count, 0.0, outer)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for number in range(3_000):
            signal.setitimer(signal.ITIMER_REAL, (1 + number % 50) * 1e-6)
            Launch(device)(fill, count, float(number), outer)
            wrong.extend([number] if not bool((outer == number).all()) else [])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled
    assert not wrong


def test_threads_do_not_share_parameters():
    """While a kernel runs, other threads launch it with arguments of their own."""
    made = [torch.zeros(20_000) for _ in range(4)]

    def work(value: int) -> list[bool]:
        right = []
        for _ in range(50):
            made[value].zero_()
            Launch(torch.device("cpu"))(fill, 20_000, float(value + 1), made[value])
            right.append(bool((made[value] == value + 1).all()))
        return right

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [[True] * 50] * 4

"""The memory that Warp's kernels take their parameters from: as Warp itself would fill it."""

import threading
from typing import Any, NamedTuple

import pytest
import torch
import warp as wp
from torch import Tensor

from pointproj.ops.bridge.scratch import Scratch
from pointproj.ops.bridge.warp_launch import Launch, layout_of

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
def takes_a_table(table: wp.array2d(dtype=wp.int32)): ...


@wp.kernel
def fill(value: float, out: floats):
    out[wp.tid()] = value


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

    layout = layout_of(takes_everything)
    packed = layout.packed.pack(*layout.flat(values, {}))
    names = [a.label for a in takes_everything.adj.args]
    for name, offset, param in zip(names, layout.offsets, expected, strict=True):
        assert packed[offset:][: len(bytes(param))] == bytes(param), name


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


def test_arrays_of_one_allocation_are_taken_like_tensors():
    specs = ((3,), torch.int64), ((5, 2), torch.int32), ((7,), torch.float32), ((0, 4), torch.float64)
    together, wide, table, row, none = Scratch(specs[:2], specs[2:]).allocate(torch.device("cpu"))
    together.tensor().zero_()
    assert not wide.tensor().any()
    assert not table.tensor().any()
    Launch(torch.device("cpu"))(fill, 7, 2.5, row)
    assert row.tensor().tolist() == [2.5] * 7
    assert [part.tensor().shape for part in (wide, table, row, none)] == [shape for shape, _ in specs]
    assert not together.tensor().any()  # nobody wrote outside of its own array
    layout = layout_of(takes_a_table)
    assert layout.flat([table], {}) == layout.flat([table.tensor()], {})
    with pytest.raises(TypeError, match="int32"):
        Launch(torch.device("cpu"))(fill, 1, 1.0, table)


def test_threads_do_not_share_parameters():
    """While a kernel runs, other threads launch it with arguments of their own."""
    made = [torch.zeros(20_000) for _ in range(4)]
    errors = []

    def work(value: int) -> None:
        for _ in range(50):
            made[value].zero_()
            Launch(torch.device("cpu"))(fill, 20_000, float(value + 1), made[value])
            if not bool((made[value] == value + 1).all()):
                errors.append(value)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors

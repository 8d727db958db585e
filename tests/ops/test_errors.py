"""Wrong arguments are refused before any work; the message says what was expected, got, and to be done."""

import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pointproj
from pointproj.nn.projector import Projector
from pointproj.ops import registry

QUERY, POINTS, FEATURES = torch.rand(6, 3), torch.rand(9, 3), torch.rand(9, 4)
BATCH = {
    "query_points": torch.rand(2, 6, 3),
    "reference_points": torch.rand(2, 9, 3),
    "features": torch.rand(2, 9, 4),
}


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


RAGGED = {"query_offsets": offsets(0, 2, 6), "reference_offsets": offsets(0, 5, 9)}

OF_POINTS = [  # changed arguments, error, what the message says
    ({"query_points": [[0.0] * 3]}, TypeError, "query_points must be a torch.Tensor; got list"),
    ({"reference_points": torch.rand(9, 2)}, ValueError, r"shape \(n, 3\) .*; got \(9, 2\)"),
    ({"query_points": torch.rand(3)}, ValueError, r"shape \(n, 3\) .*; got \(3,\)"),
    ({"query_points": torch.rand(1, 2, 6, 3)}, ValueError, r"got \(1, 2, 6, 3\)"),
    ({"query_points": QUERY.half()}, TypeError, r"float32 or float64; got torch.float16: call .float\(\)"),
    ({"reference_points": torch.ones(9, 3).int()}, TypeError, "got torch.int32"),
    ({"query_points": QUERY.double()}, TypeError, "one dtype; got torch.float64 and torch.float32"),
    ({"query_points": torch.rand(2, 6, 3)}, ValueError, "must both be .*: expand the one that is shared"),
    ({**BATCH, "query_points": torch.rand(3, 6, 3)}, ValueError, "equally many clouds; got 3 and 2"),
    ({"query_offsets": offsets(0, 6)}, ValueError, "reference_offsets is missing"),
    ({"reference_offsets": offsets(0, 9)}, ValueError, "query_offsets is missing"),
    ({**BATCH, **RAGGED}, ValueError, r"offsets go with packed points \(n, 3\); got \(2, 6, 3\)"),
    ({**RAGGED, "query_offsets": [0, 2, 6]}, TypeError, "int32 or int64 tensor; got list"),
    ({**RAGGED, "query_offsets": torch.tensor([0.0, 2, 6])}, TypeError, "got torch.float32"),
    ({**RAGGED, "query_offsets": offsets(0)}, ValueError, r"\(clouds \+ 1,\); got \(1,\)"),
    ({**RAGGED, "query_offsets": offsets(0, 6)}, ValueError, "equally many clouds; got 1 and 2"),
    ({**RAGGED, "query_offsets": offsets(0, 7, 6)}, ValueError, r"rise from 0 to .* 6; got \[0, 7, 6\]"),
    ({**RAGGED, "query_offsets": offsets(1, 2, 6)}, ValueError, "rise from 0 to the number of points, 6"),
    ({**RAGGED, "reference_offsets": offsets(0, 5, 8)}, ValueError, "rise from 0 to the number of points, 9"),
    ({"query_points": QUERY.to("meta")}, ValueError, "must be on one device; .* cpu.* meta"),
    ({"backend": "fortran"}, ValueError, "backend must be 'auto' or one of .*torch.*; got 'fortran'"),
]
OF_FEATURES = [  # and sigma
    ({"features": [1.0]}, TypeError, "features must be a torch.Tensor; got list"),
    ({"features": torch.rand(8, 4)}, ValueError, r"\(9, 'channels'\), one row for each .*; got \(8, 4\)"),
    ({"features": torch.rand(9)}, ValueError, r"got \(9,\)"),
    ({**BATCH, "features": FEATURES}, ValueError, r"\(2, 9, 'channels'\).*got \(9, 4\)"),
    ({"features": torch.rand(9, 0)}, ValueError, r"at least one channel; got shape \(9, 0\)"),
    ({"features": FEATURES.long()}, TypeError, "float16, bfloat16, float32 or float64; got torch.int64"),
    ({"features": FEATURES.cfloat()}, TypeError, "got torch.complex64"),
    ({"sigma": 0.0}, ValueError, "sigma must be positive and finite; got 0"),
    ({"sigma": -0.1}, ValueError, "sigma must be positive and finite; got -0.1"),
    ({"sigma": float("nan")}, ValueError, "sigma must be positive and finite; got nan"),
    ({"sigma": float("inf")}, ValueError, "sigma must be positive and finite; got inf"),
    ({"sigma": "0.1"}, TypeError, "sigma must be a number or a tensor of one element; got str"),
    ({"sigma": True}, TypeError, "sigma must be a number .*; got bool"),
    ({"sigma": torch.ones(6)}, ValueError, r"one element; got torch.float32 of shape \(6,\)"),
    ({"sigma": torch.tensor(1)}, ValueError, "floating-point tensor .*got torch.int64"),
    ({"features": FEATURES.to("meta")}, ValueError, "features is on meta, others on cpu"),
    ({"sigma": torch.tensor(0.1, device="meta")}, ValueError, "sigma is on meta"),
]
OF_KNN = [
    ({"k": 10}, ValueError, "k = 10 neighbours were asked for, but there are 9 points"),
    ({"k": 0}, ValueError, "k must be at least 1; got 0"),
    ({"k": -3}, ValueError, "k must be at least 1; got -3"),
    ({"k": 3.0}, TypeError, "k must be an int; got float"),
    ({"k": True}, TypeError, "k must be an int; got bool"),
    ({"k": None}, TypeError, "k must be an int; got NoneType"),
    ({**BATCH, "k": 10}, ValueError, "k = 10 neighbours were asked for, but there are 9 points"),
]
OF_RADIUS = [
    ({"radius": 0.0}, ValueError, "radius must be positive and finite; got 0"),
    ({"radius": -1.0}, ValueError, "radius must be positive and finite; got -1"),
    ({"radius": float("nan")}, ValueError, "radius must be positive and finite; got nan"),
    ({"radius": float("inf")}, ValueError, "radius must be positive and finite; got inf"),
    ({"radius": torch.tensor(0.1)}, TypeError, "radius must be a number; got Tensor: it has no gradient"),
    ({"radius": "0.1"}, TypeError, "radius must be a number; got str"),
]
AGGREGATES = [*OF_POINTS, *OF_FEATURES]
REFUSALS = [
    *((pointproj.knn_aggregate, {"features": FEATURES, "k": 3}, *row) for row in AGGREGATES + OF_KNN),
    *(
        (pointproj.radius_aggregate, {"features": FEATURES, "radius": 0.3}, *row)
        for row in AGGREGATES + OF_RADIUS
    ),
    *((pointproj.knn, {"k": 3}, *row) for row in OF_POINTS + OF_KNN),
]


def _name(value: Any) -> str:
    return "-".join(value) if isinstance(value, dict) else getattr(value, "__name__", value)


@pytest.mark.parametrize(("function", "given", "changes", "error", "message"), REFUSALS, ids=_name)
def test_refuses(function: Callable, given: dict, changes: dict, error: type[Exception], message: str):
    changes = {name: value for name, value in changes.items() if name in given or name != "features"}
    with pytest.raises(error, match=message):
        function(**{"query_points": QUERY, "reference_points": POINTS} | given | changes)


@pytest.mark.parametrize(("changes", "error", "message"), OF_RADIUS, ids=_name)
def test_build_index_refuses_a_radius(changes: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        pointproj.build_index(POINTS, **changes)


@pytest.mark.parametrize("index_dtype", [torch.int16, torch.float32, int])
def test_knn_refuses_other_index_dtypes(index_dtype: object):
    with pytest.raises(ValueError, match=r"must be torch.int32 or torch.int64; got .*(int16|float32|int)"):
        pointproj.knn(QUERY, QUERY, 2, index_dtype=index_dtype)


def test_build_index_refuses_points():
    with pytest.raises(ValueError, match=r"reference_points must have shape .*; got \(9, 4\)"):
        pointproj.build_index(FEATURES)
    with pytest.raises(ValueError, match=r"reference_offsets must rise .*; got \[0, 3\]"):
        pointproj.build_index(POINTS, reference_offsets=offsets(0, 3))


def test_messages_name_build_indexs_own_arguments_only():
    with pytest.raises(TypeError) as raised:
        pointproj.build_index(POINTS.half())
    assert "query" not in str(raised.value)


def test_backend_that_cannot_run_here_fails_by_name_only(backend_without_package: str):
    """Asked for by name: the reason and the remedy. Not asked for: passed over, with a word in the log."""
    with pytest.raises(
        pointproj.BackendUnavailable, match="backend 'imaginary': the package unobtainium is missing"
    ):
        pointproj.knn_aggregate(QUERY, POINTS, FEATURES, 3, backend=backend_without_package)
    assert pointproj.backends()["imaginary"] == registry.load("imaginary").unavailable()
    chosen, why = registry.resolve("auto", "cpu", "knn")
    assert chosen != "imaginary"
    assert "imaginary: the package unobtainium is missing" in why


def test_operator_that_a_backend_lacks(backend_without_package: str):
    with pytest.raises(pointproj.BackendUnavailable, match=r"has no radius operator; use one of .*torch"):
        pointproj.radius_aggregate(QUERY, POINTS, FEATURES, 0.3, backend=backend_without_package)


OTHERS = {
    "aggregate": lambda name: pointproj.aggregate(
        FEATURES, pointproj.Neighbors(*reversed(pointproj.knn(QUERY, POINTS, 2))), backend=name
    ),
    "attend": lambda name: pointproj.attend(
        QUERY, POINTS, POINTS, pointproj.Neighbors(*reversed(pointproj.knn(QUERY, POINTS, 2))), backend=name
    ),
    "farthest_points": lambda name: pointproj.farthest_points(POINTS, 2, backend=name),
    "edge_mlp": lambda name: pointproj.edge_mlp(
        FEATURES, QUERY, POINTS, pointproj.Neighbors(*reversed(pointproj.knn(QUERY, POINTS, 2))),
        [(torch.ones(2, FEATURES.shape[1] + 3), torch.ones(2))], backend=name,
    ),
    "vector_attend": lambda name: pointproj.vector_attend(
        QUERY, POINTS, POINTS, QUERY, POINTS,
        pointproj.Neighbors(*reversed(pointproj.knn(QUERY, POINTS, 2))), groups=1, backend=name,
        position_layers=[(torch.ones(3, 3), torch.ones(3))], score_layers=[(torch.ones(1, 3), torch.ones(1))],
    ),
}  # fmt: skip


def in_lists(operator: str, neighbors: Any) -> torch.Tensor:
    """One of the operators over ready lists."""
    weight, bias = torch.ones(3, 3), torch.ones(3)
    of_vectors = {"position_layers": [(weight, bias)], "score_layers": [(weight[:1], bias[:1])], "groups": 1}
    call = {
        "aggregate": lambda: pointproj.aggregate(POINTS, neighbors),
        "attend": lambda: pointproj.attend(QUERY, POINTS, POINTS, neighbors),
        "edge_mlp": lambda: pointproj.edge_mlp(POINTS[:, :0], QUERY, POINTS, neighbors, [(weight, bias)]),
        "vector_attend": lambda: pointproj.vector_attend(
            QUERY, POINTS, POINTS, QUERY, POINTS, neighbors, **of_vectors
        ),
    }
    return call[operator]()


@pytest.mark.parametrize("operator", ["aggregate", "attend", "edge_mlp", "vector_attend"])
def test_refuses_lists(operator: str):
    rows = torch.arange(12).view(6, 2) % 9
    padded = pointproj.Neighbors(rows, rows.double())
    listed = pointproj.NeighborList(torch.arange(0, 13, 2), rows.flatten(), rows.flatten().double())
    wrong = [
        (padded._replace(indices=rows.double()), "indices must be an int32 or int64 tensor; got torch.float"),
        (padded._replace(indices=rows.flatten()), r"shape \('queries', 'k'\), .*; got \(12,\)"),
        (padded._replace(indices=rows[None]), r"as many clouds as .* \(9, .\); got \(1, 6, 2\)"),
        (listed._replace(indices=rows), r"of a NeighborList must have shape \(pairs,\); got \(6, 2\)"),
        (listed._replace(row_splits=None), "row_splits must be an int32 or int64 tensor; got NoneType"),
        (listed._replace(row_splits=listed.row_splits[:0]), r"shape \(queries \+ 1,\), .*; got \(0,\)"),
        (listed._replace(row_splits=listed.row_splits * 2), "rise from 0 to at most 12, .*; got 0 to 24"),
        (listed._replace(row_splits=listed.row_splits.flip(0)), "got 12 to 0"),
        (listed._replace(row_splits=listed.row_splits + 1), "got 1 to 13"),
    ]
    if operator in ("edge_mlp", "vector_attend"):
        wrong.append((padded._replace(indices=rows + 1), "from 0 to 8, or -1 for none; got 9: search these"))
        wrong.append((padded._replace(indices=rows - 2), "got -2"))
    for neighbors, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            in_lists(operator, neighbors)


@pytest.mark.parametrize("operator", ["aggregate", "attend", "edge_mlp", "vector_attend"])
def test_lists_without_known_values(operator: str):
    """Of a transform, and of fake tensors: shapes alone are checked."""
    rows = torch.arange(24).view(2, 6, 2) % 9
    given = [pointproj.Neighbors(own, own.float()) for own in rows]
    mapped = torch.func.vmap(lambda rows: in_lists(operator, pointproj.Neighbors(rows, rows.float())))(rows)
    assert torch.equal(mapped, torch.stack([in_lists(operator, own) for own in given]))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = in_lists(operator, pointproj.Neighbors(*map(mode.from_tensor, given[0][:2])))
    assert fake.shape == mapped[0].shape


@pytest.mark.parametrize("operator", OTHERS)
def test_a_backend_without_an_operator_is_refused_and_auto_takes_one_that_has_it(operator: str):
    able = [name for name in registry.names() if operator in registry.load(name).OPERATORS]
    for name in {*registry.names()} - {*able}:
        reason = f"'{name}': has no {operator} operator; use one of {', '.join(able)}"
        with pytest.raises(pointproj.BackendUnavailable, match=reason):
            OTHERS[operator](name)
    assert registry.resolve("auto", "cpu", operator)[0] in able
    assert torch.equal(
        OTHERS[operator]("auto"), OTHERS[operator](registry.resolve("auto", "cpu", operator)[0])
    )


def test_farthest_points_of_many_coordinates_are_for_torch():
    with pytest.raises(ValueError, match=r"3 coordinates .*: backend='native' is for points of 2 or 3"):
        pointproj.farthest_points(torch.rand(9, 5), 3, backend="native")


def test_device_that_a_backend_lacks(backend_without_package: str):
    with pytest.raises(pointproj.BackendUnavailable, match="does not run on cuda; it runs on cpu"):
        registry.resolve("imaginary", "cuda", "knn")


def test_driver_older_than_what_warp_is_built_for(monkeypatch: pytest.MonkeyPatch):
    """Its packages for CUDA 13 see no GPU behind a driver for CUDA 12."""
    wp = pytest.importorskip("warp")
    monkeypatch.setattr(wp, "is_cuda_available", lambda: False)
    monkeypatch.setattr(wp, "get_cuda_toolkit_version", lambda: (13, 4))
    monkeypatch.setattr(wp, "get_cuda_driver_version", lambda: (12, 4))
    monkeypatch.setattr(registry, "_fastest_first", lambda device_type: ["warp", "torch"])
    registry.resolve.cache_clear()
    reason = r"for CUDA 13, .* for CUDA 12.4; .* warp-lang==1.17"
    with pytest.raises(pointproj.BackendUnavailable, match=reason):
        registry.resolve("warp", "cuda", "knn")
    name, why = registry.resolve("auto", "cuda", "knn")
    assert name == "torch"
    assert "warp: the installed warp-lang is built for CUDA 13" in why
    assert registry.resolve("warp", "cpu", "knn")[0] == "warp"
    registry.resolve.cache_clear()


def test_backends_says_what_is_usable():
    usable = pointproj.backends()
    assert usable["torch"] is None
    assert set(usable) == set(registry.names())
    assert all(reason is None or len(reason) > 10 for reason in usable.values())


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, pointproj; print([m for m in ('torch', 'warp', 'numpy') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"


def test_unknown_public_name():
    with pytest.raises(AttributeError, match="module 'pointproj' has no attribute 'knn_project'"):
        pointproj.knn_project  # noqa: B018


@pytest.fixture
def backend_without_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A registered backend whose package is missing, kNN and CPU only."""
    module = types.ModuleType("pointproj.ops.backends.imaginary")
    module.OPERATORS = frozenset({"knn"})
    module.RANK = {"cpu": 1000}
    module.unavailable = lambda: (
        "the package unobtainium is missing; install it with: pip install unobtainium"
    )
    names = (*registry.names(), "imaginary")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(registry, "names", lambda: names)
    registry.resolve.cache_clear()
    yield "imaginary"
    registry.resolve.cache_clear()


def test_wrong_neighbors_are_refused():
    points = torch.rand(20, 3)

    def aggregate(rows):
        return pointproj.knn_aggregate(points, points, points, 3, backend="torch", neighbor_indices=rows)

    rows = pointproj.knn(points, points, 3, backend="torch")[1]
    with pytest.raises(TypeError, match=r"int32 or int64 tensor, as pointproj.knn gives; got torch.float32"):
        aggregate(rows.float())
    with pytest.raises(TypeError, match="got list"):
        aggregate(rows.tolist())
    with pytest.raises(ValueError, match=r"shape \(20, 3\), k = 3 for each query point; got \(20, 2\)"):
        aggregate(rows[:, :2])
    with pytest.raises(ValueError, match="from 0 to 19, or -1 for none; got 27: search these points again"):
        aggregate(rows.clone().fill_(27))
    with pytest.raises(ValueError, match="got -5"):
        aggregate(rows.clone().fill_(-5))
    with pytest.raises(ValueError, match="neighbor_indices are for kind='knn'"):
        Projector(kind="radius", radius=0.1)(points, points, neighbor_indices=rows)

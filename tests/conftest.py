"""What all tests share: the backends and devices they run on, and why some are skipped."""

import importlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from pointproj.ops.backends import BackendUnavailable
from pointproj.ops.registry import load, names, resolve

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products on a GPU
# The compiler takes the instructions that the processor names, without compiling programs that try them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # As many processes as cores: one thread each, also of what they start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


# Files of which Triton runs the first case of each test and operator on a CPU. There torch computes under its
# operators' names, so that only these can be wrong: how they are registered, differentiated and traced.
OF_REGISTERED = ("operators", "gradients", "transforms", "compile", "nearest", "neighbor_lists")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's kernels themselves, on a CPU
if INTERPRETED:  # a search takes milliseconds for each row of cells
    importlib.import_module("pointproj.ops.backends.triton.cell_list").LEAST_SIDE = 4


class Where(NamedTuple):
    """A backend on a device."""

    backend: str
    device: str

    def skip_unless(self, *operators: str) -> None:
        """Skip, with the backend's own reason, unless it can run these operators here."""
        for operator in operators:
            try:
                resolve(self.backend, self.device, operator)
            except BackendUnavailable as reason:
                pytest.skip(str(reason))


def _on(*devices: str) -> list:
    """Every backend on those of the devices that it runs on; without a GPU, "cuda" only where it is alone."""
    devices = devices[:1] if not torch.cuda.is_available() else devices
    return [
        pytest.param(Where(name, device), id=f"{name}-{device}", marks=[pytest.mark.gpu] * (device == "cuda"))
        for device in devices
        for name in names()
        if device in load(name).RANK
    ]


def _operators(item: pytest.Item) -> set[str]:
    """What the backend of a test must have: its mark ``operators``, and its parameter of that name."""
    marked = {name for mark in item.iter_markers("operators") for name in mark.args}
    given = getattr(item, "callspec", None) and item.callspec.params.get("operator")
    of_lists = {"lists"} & {*item.fixturenames}  # the fixture has the operator's name
    return marked | of_lists | ({given} if isinstance(given, str) else set()) or {"knn"}


@pytest.fixture(params=_on("cpu", "cuda"))
def where(request: pytest.FixtureRequest) -> Where:
    """Every backend on every device that can run the operators of the test."""
    request.param.skip_unless(*_operators(request.node))
    return request.param


@pytest.fixture(params=_on("cpu"))
def on_cpu(request: pytest.FixtureRequest) -> Where:
    """The same on the CPU only."""
    request.param.skip_unless(*_operators(request.node))
    return request.param


@pytest.fixture(params=_on("cuda"))
def on_gpu(request: pytest.FixtureRequest) -> Where:
    """The same on a GPU only."""
    request.param.skip_unless(*_operators(request.node))
    return request.param


@pytest.fixture
def waitless(request: pytest.FixtureRequest, on_gpu: Where) -> Where:
    """Every backend, on a GPU; one that says it waits for the device must fail, which is what it says."""
    reason = load(on_gpu.backend).WAITS
    if reason:
        request.applymarker(pytest.mark.xfail(reason=f"{on_gpu.backend}: {reason}", strict=True))
    return on_gpu


@pytest.fixture(params=["cpu", *[pytest.param("cuda", marks=pytest.mark.gpu)] * torch.cuda.is_available()])
def device(request: pytest.FixtureRequest) -> str:
    """Of tests that name their backend."""
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out operators that a backend lacks, and most of what Triton gives to torch on a CPU.

    Of several processes none shall begin a long test when the others have nothing left: those come first.
    """
    seen = set()
    items[:] = [item for item in items if _is_run(item, seen)]
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _is_run(item: pytest.Item, seen: set[tuple]) -> bool:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    where = next((value for value in given.values() if isinstance(value, Where)), None)
    if where is None:
        return True
    operators = _operators(item)
    if not operators <= load(where.backend).OPERATORS:
        return False
    if where != ("triton", "cpu") or INTERPRETED:
        return True
    case = item.parent, item.originalname, *sorted(operators)
    is_first = case not in seen and item.path.stem.removeprefix("test_") in OF_REGISTERED
    seen.add(case)
    return is_first


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch.use_deterministic_algorithms(True) for one test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")

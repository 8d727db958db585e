"""What all tests share: the backends and devices they run on, and why some are skipped."""

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from pointproj.ops.backends import BackendUnavailable
from pointproj.ops.registry import load, names, resolve

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for deterministic matrix products on a GPU
if "PYTEST_XDIST_WORKER" in os.environ:
    # As many processes as cores: one thread each, also of what they start.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


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


def _on(device: str) -> list:
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return [pytest.param(Where(name, device), id=f"{name}-{device}", marks=marks) for name in names()]


@pytest.fixture(params=_on("cpu") + _on("cuda"))
def where(request: pytest.FixtureRequest) -> Where:
    """Every backend on every device."""
    return request.param


@pytest.fixture(params=_on("cpu"))
def on_cpu(request: pytest.FixtureRequest) -> Where:
    """Every backend, on the CPU only."""
    return request.param


@pytest.fixture(params=_on("cuda"))
def on_gpu(request: pytest.FixtureRequest) -> Where:
    """Every backend, on a GPU only."""
    return request.param


@pytest.fixture
def waitless(request: pytest.FixtureRequest, on_gpu: Where) -> Where:
    """Every backend, on a GPU; one that says it waits for the device must fail, which is what it says."""
    reason = load(on_gpu.backend).WAITS
    if reason:
        request.applymarker(pytest.mark.xfail(reason=f"{on_gpu.backend}: {reason}", strict=True))
    return on_gpu


@pytest.fixture
def deterministic() -> Iterator[None]:
    """torch.use_deterministic_algorithms(True) for one test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU here")

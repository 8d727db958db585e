"""What is particular to the triton backend; the contract is tested with that of all others."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.torch_version import TorchVersion

import pointproj
from pointproj.benchmark.cases import Case
from pointproj.ops.registry import load, names
from tests.ops.cases import uniform
from tests.oracle import run

ROOT = Path(__file__).parents[2]
# What the interpreter takes seconds for: clouds of test_operators, kernels of test_weightings, and two files.
CLOUDS = "one-query or no-query or lattice-fp64 or ragged-with"
LATTICE = "knn-gaussian or radius-inverse_distance or radius-compact"
KERNELS = f"vanish and gaussian or lattice and ({LATTICE})"
PAIRS = "one_mlp_a_query and (grouping-padded or edge-convolution-csr) or one_softmax_a_query and two-csr"
OF_BACKEND = f"test_operators and gradients and ({CLOUDS}) or test_weightings and ({KERNELS}) or {PAIRS}"
CHOSEN = f"test_triton_kernels or test_narrow_mlp or triton-cpu and ({OF_BACKEND})"
OF_OPS = ("operators", "weightings", "triton_kernels", "edge_mlp", "vector_attention")
FILES = (*(f"tests/ops/test_{name}.py" for name in OF_OPS), "tests/nn/test_narrow_mlp.py")

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


def test_a_missing_package_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in load("triton").unavailable()


def test_on_a_cpu_every_other_backend_comes_first():
    ranks = {name: load(name).RANK["cpu"] for name in names() if "cpu" in load(name).RANK}
    assert min(ranks, key=ranks.get) == "triton"


@needs_triton
@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 13), reason="this torch wraps no kernels that are interpreted"
)
@pytest.mark.slow
def test_kernels_by_the_interpreter():
    """The kernels themselves, on CPU tensors."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "-m", "not gpu", "-p", "no:cacheprovider", "-k", CHOSEN]
    command = [sys.executable, "-m", "pytest", *options, *FILES]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", ended.stdout)[1]) > 30


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("operator", ["knn", "radius"])
def test_the_compiler_sees_the_kernels(operator: str):
    """Forward and backward are traced into: the graphs hold kernels, not opaque operators."""
    problem = Case("", uniform(60, 100), channels=8).problem("cuda")
    features = problem.features.clone().requires_grad_()
    seen: set[str] = set()

    def keep(graph: torch.fx.GraphModule, _: object) -> object:
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda p: run(operator, p, 4 if operator == "knn" else 0.4, 0.1, backend="triton"),
        fullgraph=True,
        backend=backend,
    )
    compiled(problem._replace(features=features)).sum().backward()
    assert any("triton_kernel_wrapper" in name for name in seen)
    assert not any("pointproj" in name for name in seen)


@needs_triton
@pytest.mark.gpu
def test_lists_of_more_than_a_search_holds():
    points = torch.rand(5000, 3, device="cuda")
    expected = pointproj.knn(points, points, 150, backend="torch")
    distances, rows = pointproj.knn(points, points, 150, backend="triton")
    assert torch.equal(rows, expected[1])
    assert torch.equal(distances, expected[0])

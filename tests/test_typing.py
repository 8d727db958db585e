"""What a caller's type checker makes of the public names."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pointproj

CALLER = """
from typing import assert_type

import torch
from pointproj import (
    BackendUnavailable,
    NeighborList,
    Neighbors,
    Projector,
    aggregate,
    backends,
    build_index,
    knn,
    knn_aggregate,
    radius_aggregate,
    radius_neighbors,
)
from torch import Tensor


def use(query: Tensor, points: Tensor, features: Tensor) -> Tensor:
    index = build_index(points, radius=0.2)
    distances, rows = knn(query, points, 7, index=index, index_dtype=torch.int32)
    assert_type(distances, Tensor)
    assert_type(rows, Tensor)
    near = knn_aggregate(query, points, features, 7, sigma=torch.tensor(0.1), backend="native")
    assert_type(near, Tensor)
    assert_type(radius_aggregate(query, points, features, 0.2, sigma=0.1), Tensor)
    assert_type(backends(), dict[str, str | None])
    found = radius_neighbors(query, points, 0.2, max_neighbors=32)
    assert isinstance(found, Neighbors | NeighborList)
    projector: torch.nn.Module = Projector(kind="knn", k=7, sigma=0.1, in_channels=3, out_channels=1)
    projector.eval()
    return aggregate(features, found)


def backend() -> str:
    try:
        return "native" if backends()["native"] is None else "auto"
    except BackendUnavailable as reason:
        return str(reason)


knn(1, 2, "three")  # an error for every argument
"""


# An installed package is not checked itself; what lies in MYPYPATH is, unless mypy is told to be silent.
# Parts of torch that no signature here names take most of the time.
UNNAMED = "_dynamo _inductor _functorch _export _refs _decomp _prims _higher_order_ops _subclasses _library"
UNNAMED += (
    " export fx distributed ao onnx testing optim utils.data func quantization package profiler jit nested"
)
SETTINGS = f"""
[mypy]
follow_imports = silent
[mypy-{",".join(f"torch.{part}.*" for part in UNNAMED.split())},sympy.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_a_callers_code_passes_mypy_strict(tmp_path: Path):
    if shutil.which("mypy", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("mypy is not installed: pip install mypy")
    (tmp_path / "caller.py").write_text(CALLER, encoding="utf-8")
    (tmp_path / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir=/dev/null", "caller.py"]
    environment = {"MYPYPATH": str(Path(pointproj.__file__).parents[1]), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    *errors, last = done.stdout.splitlines()
    wrong = CALLER.splitlines().index('knn(1, 2, "three")  # an error for every argument') + 1
    assert [error.split(" ")[0] for error in errors] == [f"caller.py:{wrong}:"] * 3, done.stdout + done.stderr
    assert last.startswith("Found 3 errors in 1 file")

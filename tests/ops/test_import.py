"""The library is light: importing it loads torch and numpy, and nothing of the application."""

import subprocess
import sys

import pytest

HEAVY = (
    "hydra",
    "omegaconf",
    "trimesh",
    "scipy",
    "matplotlib",
    "rich",
    "physicsnemo",
    "neuralop",
    "sklearn",
    "torch_cluster",
    "torch_geometric",
    "manifold3d",
    "warp",
    "triton",
    "cuml",
    "torch._dynamo",
    "torch._inductor",
)
APPLICATION = tuple(
    f"pointproj.{package}"
    for package in ("config", "geometry", "runtime", "data", "viz", "training", "inference", "benchmark")
)
CODE = """
import sys
import torch
before = set(sys.modules)
{statement}
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize(
    "statement",
    [
        "from pointproj import BackendUnavailable, backends, build_index, knn, radius_aggregate",
        "from pointproj import Projector",
        "from pointproj import Projector; Projector(kind='radius', radius=0.1, context=True)",
        "from pointproj.compat import pointnet2, pyg_lib, pytorch3d, scipy, sklearn, torch_geometric",
    ],
    ids=["operators", "projector", "a-projector", "drop-ins"],
)
def test_modules_that_an_import_loads(statement: str):
    code = CODE.format(statement=statement)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ran.stdout.split()
    assert "pointproj.ops" in loaded
    unwanted = [m for m in loaded for name in HEAVY + APPLICATION if m == name or m.startswith(f"{name}.")]
    assert not unwanted


@pytest.mark.parametrize(
    ("package", "statement"),
    [
        (
            "warp",
            """
from pointproj import knn_aggregate
for _ in range(3):
    features = torch.rand(9, 2, requires_grad=True)
    knn_aggregate(torch.rand(5, 3), torch.rand(9, 3), features, 3, backend="warp").sum().backward()
""",
        ),
        (
            "triton",
            """
from pointproj.nn.narrow_mlp import narrow_mlp
for _ in range(3):
    layers = [torch.rand(shape, requires_grad=True) for shape in ((4, 3), (4,), (4, 4), (4,), (2, 4), (2,))]
    narrow_mlp(torch.rand(5, 3), *layers).sum().backward()
""",
        ),
    ],
    ids=["warp", "narrow-mlp"],
)
def test_eager_calls_do_without_the_compiler(package: str, statement: str):
    pytest.importorskip(package)
    code = CODE.format(statement=statement)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ran.stdout.split()
    assert package in loaded
    assert "torch._dynamo" not in loaded

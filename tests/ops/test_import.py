"""The library is light: importing it loads torch and numpy, and nothing of the application."""

import importlib.util
import subprocess
import sys

HEAVY = (
    "hydra", "omegaconf", "trimesh", "scipy", "matplotlib", "rich", "physicsnemo", "neuralop", "sklearn",
    "torch_cluster", "torch_geometric", "manifold3d", "warp", "triton", "cuml", "torch._dynamo",
    "torch._inductor",
)  # fmt: skip
APPLICATION = tuple(
    f"pointproj.{package}"
    for package in ("config", "geometry", "runtime", "data", "viz", "training", "inference", "benchmark")
)
LIGHT = (
    "from pointproj import BackendUnavailable, backends, build_index, knn, radius_aggregate",
    "from pointproj import Projector",
    "Projector(kind='radius', radius=0.1, context=True)",
    "from pointproj.compat import pointnet2, pyg_lib, pytorch3d, scipy, sklearn, torch_geometric",
)
CALLS = {  # that do without the compiler
    "warp": """
from pointproj import knn_aggregate
for _ in range(3):
    features = torch.rand(9, 2, requires_grad=True)
    knn_aggregate(torch.rand(5, 3), torch.rand(9, 3), features, 3, backend="warp").sum().backward()
""",
    "triton": """
from pointproj.nn.narrow_mlp import narrow_mlp
for _ in range(3):
    layers = [torch.rand(shape, requires_grad=True) for shape in ((4, 3), (4,), (4, 4), (4,), (2, 4), (2,))]
    narrow_mlp(torch.rand(5, 3), *layers).sum().backward()
""",
}


def _loaded(*statements: str) -> list[list[str]]:
    """Modules that have been loaded, beside torch's, after each of the statements in one process."""
    shown = "print(*sorted(set(sys.modules) - before))"
    shown_after = (f"{statement}\n{shown}" for statement in statements)
    code = "\n".join(("import sys, torch", "before = set(sys.modules)", *shown_after))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [line.split() for line in ran.stdout.splitlines()]


def test_imports_load_nothing_heavy_and_eager_calls_no_compiler():
    packages = [name for name in CALLS if importlib.util.find_spec(name)]
    loaded = _loaded(*LIGHT, *(CALLS[name] for name in packages))
    for statement, modules in zip(LIGHT, loaded, strict=False):
        assert "pointproj" in modules
        unwanted = [m for m in modules for n in HEAVY + APPLICATION if m == n or m.startswith(f"{n}.")]
        assert not unwanted, statement
    for package, modules in zip(packages, loaded[len(LIGHT) :], strict=True):
        assert package in modules
        assert "torch._dynamo" not in modules, package

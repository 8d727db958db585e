"""What torch.compile has left on disk before an update of the package is not run after it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import pointproj
from pointproj.ops.bridge.torch_op import torch_op

# A table whose size is nobody's but ours, made in compiled code without anything that has to be built.
CALL = """
import sys
import torch
from torch._dynamo.utils import counters
from pointproj.ops.bridge.torch_op import torch_op

size = int(sys.argv[1])

def make(points: torch.Tensor) -> tuple[torch.Tensor]:
    return (points.new_zeros(size),)

table = torch_op("example::table", make, lambda points: (((size,), points.dtype),))
for _ in range(2):
    torch._dynamo.reset()
    made = torch.compile(table, fullgraph=True)(torch.zeros(2))
print(len(made), counters["aot_autograd"]["autograd_cache_hit"], torch.compiler.config.cache_key_tag)
"""


def test_another_version_finds_nothing(tmp_path: Path):
    package = tmp_path / "pointproj"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(pointproj.__file__).parent / "ops", package / "ops", ignore=ignored)
    (package / "__init__.py").touch()
    size, hits, *before = _compiled(tmp_path, 24)
    assert (size, hits) == ("24", "1")
    with open(package / "ops" / "clouds.py", "a") as source:
        source.write("# another version\n")
    size, hits, *after = _compiled(tmp_path, 30)
    assert (size, hits) == ("30", "1")
    assert before[0] == after[0] == "theirs"  # a key that somebody else has set remains
    assert before[1].startswith("pointproj-")
    assert after[1] != before[1]


def test_a_key_that_is_set_after_the_import_has_ours_with_the_next_operator():
    with torch.compiler.config.patch(cache_key_tag="theirs"):
        torch_op("example::late", _same, lambda points: ((points.shape, points.dtype),))
        theirs, ours = torch.compiler.config.cache_key_tag.split()
    assert theirs == "theirs"
    assert ours.startswith("pointproj-")


def _same(points: torch.Tensor) -> tuple[torch.Tensor]:
    return (points.clone(),)


def _compiled(folder: Path, size: int) -> list[str]:
    """Size and how often it was found on disk when compiled twice; then the words of the key."""
    places = {"PYTHONPATH": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    switches = {"TORCH_COMPILE_CACHE_KEY_TAG": "theirs", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", CALL, str(size)],
        env={**os.environ, **places, **switches},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split()

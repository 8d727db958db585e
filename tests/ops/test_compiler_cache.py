"""What torch.compile has left on disk before an update of the package is not run after it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

import pointproj
from pointproj.ops.bridge.torch_op import torch_op

# A table whose size is nobody's but ours, made in compiled code without anything that has to be built, by two
# processes. Between them the package is updated.
CALLS = """
import os
import torch
import torch._inductor.compile_fx
from torch._dynamo.utils import counters

def compiled(size):
    from pointproj.ops.bridge.torch_op import torch_op

    def make(points: torch.Tensor) -> tuple[torch.Tensor]:
        return (points.new_zeros(size),)

    table = torch_op("example::table", make, lambda points: (((size,), points.dtype),))
    for _ in range(2):
        torch._dynamo.reset()
        made = torch.compile(table, fullgraph=True)(torch.zeros(2))
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    print(len(made), hits, torch.compiler.config.cache_key_tag, flush=True)

for size in (24, 30):
    if os.fork() == 0:
        compiled(size)
        os._exit(0)
    assert os.wait()[1] == 0
    with open("pointproj/ops/index.py", "a") as source:
        source.write("# another version\\n")
"""


def test_another_version_finds_nothing(tmp_path: Path):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(pointproj.__file__).parent / "ops", tmp_path / "pointproj" / "ops", ignore=ignored)
    (tmp_path / "pointproj" / "__init__.py").touch()
    places = {"PYTHONPATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    switches = {"TORCH_COMPILE_CACHE_KEY_TAG": "theirs", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command, environment = [sys.executable, "-c", CALLS], {**os.environ, **places, **switches}
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (size, hits, *before), (other, found, *after) = (line.split() for line in run.stdout.splitlines())
    assert (size, hits) == ("24", "1")
    assert (other, found) == ("30", "1")
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

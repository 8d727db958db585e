"""The scripts of examples/ run as they are; each asserts itself that it worked."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))
SLOW = ("train_on_your_meshes", "reconstruct_your_scan")  # they start further processes, and train


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(file, id=file.stem, marks=[pytest.mark.slow] if file.stem in SLOW else [])
        for file in EXAMPLES
    ],
)
def test_example_runs(example: Path, tmp_path: Path):
    assert len(example.read_text(encoding="utf-8").splitlines()) < 60
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_there_are_six():
    assert len(EXAMPLES) == 6

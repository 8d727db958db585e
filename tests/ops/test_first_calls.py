"""The first calls of an operator may be anybody's: of several threads, in any mode, under any transform."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pointproj.ops.registry import load, names


@pytest.mark.slow
def test_first_calls_in_any_circumstance_and_training_after_them(device: str, tmp_path: Path):
    """Warp's cache is empty at first. On a CPU Triton has torch's operators under other names."""
    able = [name for name in names() if device in load(name).RANK and load(name).unavailable() is None]
    able = [name for name in able if (name, device) != ("triton", "cpu")]
    if not able:
        pytest.skip(f"no backend for {device}")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ops.first_calls", device, *able],
        env={**os.environ, "OMP_NUM_THREADS": "1", "WARP_CACHE_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr

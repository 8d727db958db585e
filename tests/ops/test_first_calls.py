"""The first calls of an operator may be anybody's: of several threads, in any mode, under any transform."""

import os
import subprocess
import sys

from tests.conftest import Where


def test_first_calls_in_any_circumstance_and_training_after_them(where: Where):
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.ops.first_calls", *where],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr

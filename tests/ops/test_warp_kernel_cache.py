"""Where Warp's kernels go: a process without a home that it can write to, as in a container."""

import os
import subprocess
import sys
from pathlib import Path

NOWHERE = "/proc/nowhere"  # which nobody can make, not even root

CALL = """
import logging, os, torch, warp
warp.config.optimization_level = 0
logging.basicConfig(format="%(message)s")
import pointproj
from pointproj.ops.registry import resolve
print(pointproj.backends()["warp"])
if pointproj.backends()["warp"] is None:
    points = torch.rand(20, 3)
    print(pointproj.knn(points, points, 1, backend="warp")[1][:, 0].equal(torch.arange(20)))
    print(os.environ["WARP_CACHE_PATH"], os.listdir(os.environ["WARP_CACHE_PATH"]) != [])
else:
    try:
        pointproj.knn(torch.rand(5, 3), torch.rand(5, 3), 1, backend="warp")
    except pointproj.BackendUnavailable as error:
        print(error)
    print(resolve("auto", "cpu", "knn"))
"""


def _run(**variables: str) -> tuple[list[str], str]:
    known = {k: v for k, v in os.environ.items() if k not in ("WARP_CACHE_PATH", "XDG_CACHE_HOME")}
    run = subprocess.run(
        [sys.executable, "-c", CALL], env=known | variables, capture_output=True, text=True, check=True
    )
    return run.stdout.splitlines(), run.stderr


def test_without_a_home_kernels_go_to_a_temporary_folder(tmp_path: Path):
    (reason, found, folder), said = _run(HOME=NOWHERE, TMPDIR=str(tmp_path))
    assert (reason, found) == ("None", "True")
    assert folder.startswith(f"{tmp_path}/pointproj-warp-")
    assert folder.endswith(" True")
    assert said.count("name a folder in WARP_CACHE_PATH to keep them") == 1
    assert not list(tmp_path.glob("pointproj-warp-*"))  # it is removed in the end


def test_a_folder_that_was_named_is_not_replaced():
    (reason, refused, chosen), _ = _run(WARP_CACHE_PATH=NOWHERE)
    assert reason == f"WARP_CACHE_PATH names {NOWHERE}, which cannot be written: name a folder there that can"
    assert reason in refused
    assert "warp" not in chosen.split("'")[1]

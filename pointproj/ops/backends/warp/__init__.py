"""NVIDIA Warp kernels over a cell list, on CPU and CUDA."""

import atexit
import functools
import importlib.util
import logging
import os
import shutil
import tempfile

log = logging.getLogger(__name__)

OPERATORS = frozenset({"knn", "radius", "lists"})
RANK = {"cpu": 10, "cuda": 10}
FUNCTIONS = "operators"
CACHE = "WARP_CACHE_PATH"  # folder of compiled kernels; Warp reads it when it is imported


def unavailable() -> str | None:
    if importlib.util.find_spec("warp") is None:
        return "the package warp-lang is missing; install it with: pip install warp-lang"
    return _cache_obstacle()


def unavailable_on(device_type: str) -> str | None:
    """Why Warp finds no GPU: a build for CUDA 13 does not run with a driver for CUDA 12."""
    if device_type != "cuda":
        return None
    from pointproj.ops.bridge.warp_op import wp  # that module sets its log level

    built, driver = wp.get_cuda_toolkit_version(), wp.get_cuda_driver_version()
    if wp.is_cuda_available() or built is None or driver is None:
        return None
    return (
        f"the installed warp-lang is built for CUDA {built[0]}, and this driver is for CUDA "
        f"{driver[0]}.{driver[1]}; update the driver, or install the last version for CUDA 12 with: "
        "pip install warp-lang==1.17.0"
    )


@functools.cache
def _cache_obstacle() -> str | None:
    """Why compiled kernels cannot be written, or None; without a home folder they go to a temporary one.

    Call this before Warp is imported.
    """
    given = os.environ.get(CACHE)
    home = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "warp")
    if _can_be_written(given or home):
        return None
    if given:
        return f"{CACHE} names {given}, which cannot be written: name a folder there that can"
    try:
        folder = tempfile.mkdtemp(prefix="pointproj-warp-")
    except OSError as error:
        return f"its compiled kernels can be written nowhere ({error}): name a folder in {CACHE}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[CACHE] = folder  # for helper processes, too
    said = "Warp cannot write to %s: each process compiles its kernels anew; name a folder in %s to keep them"
    log.warning(said, home, CACHE)
    return None


def _can_be_written(folder: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)

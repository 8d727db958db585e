"""NVIDIA Warp kernels over a cell list, on CPU and CUDA."""

import importlib.util

from pointproj.ops.backends.warp import kernel_cache

OPERATORS = frozenset({"knn", "radius"})
RANK = {"cpu": 10, "cuda": 10}
FUNCTIONS = "operators"


def unavailable() -> str | None:
    if importlib.util.find_spec("warp") is None:
        return "the package warp-lang is missing; install it with: pip install warp-lang"
    return kernel_cache.obstacle()


def unavailable_on(device_type: str) -> str | None:
    """A build of Warp for CUDA 13 sees no GPU behind a driver for CUDA 12."""
    if device_type != "cuda":
        return None
    from pointproj.ops.bridge.warp_op import wp  # which has silenced it

    built, driver = wp.get_cuda_toolkit_version(), wp.get_cuda_driver_version()
    if wp.is_cuda_available() or built is None or driver is None:
        return None
    return (
        f"the installed warp-lang is built for CUDA {built[0]}, and this driver is for CUDA "
        f"{driver[0]}.{driver[1]}; update the driver, or install the last version for CUDA 12 with: "
        "pip install warp-lang==1.17.0"
    )

"""Warp for the geometry: quiet initialisation, and meshes that Warp's kernels search."""

import os
import tempfile
from functools import cache

import numpy as np
import warp as wp
from jaxtyping import Float

from pointproj.geometry.meshes import Mesh

wp.config.log_level = max(wp.config.log_level, wp.LOG_WARNING)  # standard output is for results

BOX_MARGIN = 1e-5

NO_DRIVER = b"Could not find or load the NVIDIA CUDA driver"


def on_device(device: str) -> wp.ScopedDevice:
    """Return the context in which Warp allocates and launches on ``"cpu"``, ``"cuda"`` or ``"cuda:1"``."""
    _initialize()
    return wp.ScopedDevice(device)


def usable_device(device: str) -> str:
    """Return ``device`` if Warp can use it, otherwise ``"cpu"``."""
    _initialize()
    return device if wp.is_cuda_available() else "cpu"


def search_mesh(mesh: Mesh) -> wp.Mesh:
    """Copy a mesh to the current device for Warp's mesh queries; each face gets its own three vertices."""
    corners = mesh.vertices[mesh.faces]
    return wp.Mesh(
        points=wp.array(corners.reshape(-1, 3).astype(np.float32), dtype=wp.vec3),
        indices=wp.array(np.arange(3 * len(corners), dtype=np.int32), dtype=wp.int32),
    )


def box_tree(corners: Float[np.ndarray, "F 3 3"]) -> wp.Bvh:
    """Build a tree of the bounding boxes of faces on the current device; coordinates are at most 1.

    The boxes are wider than the faces by more than the error of single precision.
    """
    return wp.Bvh(
        lowers=wp.array((corners.min(axis=1) - BOX_MARGIN).astype(np.float32), dtype=wp.vec3),
        uppers=wp.array((corners.max(axis=1) + BOX_MARGIN).astype(np.float32), dtype=wp.vec3),
    )


@cache
def _initialize() -> None:
    """Initialise Warp, and suppress its warning on a machine without a GPU.

    Otherwise every helper process would print the warning between the lines of the progress bar. Warp writes
    it from C++, so standard error is redirected during the call; all other lines are written afterwards.
    """
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            wp.init()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            captured.seek(0)
            for line in captured:
                if NO_DRIVER not in line:
                    os.write(2, line)

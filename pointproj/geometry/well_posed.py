"""Whether the label of a mesh is well posed: whether another definition of inside agrees with visibility.

The other definition is a flood fill of a lattice from outside, along links between nodes that no face
crosses; faces are widened as for visibility. The fill enters every slit that a row of nodes lies in. So it
shows where the label depends on a slit: there the fills of two lattices differ, or both differ from
visibility.
"""

import numpy as np
import warp as wp
from jaxtyping import Bool

from pointproj.geometry.interior import widened
from pointproj.geometry.meshes import SMALLEST_AREA, Mesh, face_areas
from pointproj.geometry.metrics import intersection_over_union
from pointproj.geometry.warp_meshes import on_device, search_mesh

wp.set_module_options({"enable_backward": False})

WELL_POSED = 0.95
"""Least IoU of visibility with both fills."""

FLOOD_SIDES = (117, 233)
"""The lattices have at least so many nodes a side; the query grid is a part of each."""

_BEYOND = wp.constant(1e-5)
"""Links are longer by this at both ends, so that none starts on a face and misses it (query cube units)."""


def label_agreement(mesh: Mesh, grid_inside: Bool[np.ndarray, " g"], *, device: str = "cpu") -> float:
    """Compare labels of the query grid, from visibility, with flood fills of two lattices.

    The mesh is normalised. Returns the lower IoU; a mesh with at least :data:`WELL_POSED` is well posed.
    """
    side = round(len(grid_inside) ** (1 / 3))
    agreements = []
    for least in FLOOD_SIDES:
        refinement = -(-(least - 1) // (side - 1))
        nodes = unflooded(mesh, refinement * (side - 1) + 1, device=device)
        on_grid = nodes[::refinement, ::refinement, ::refinement].reshape(-1)
        agreements.append(intersection_over_union(on_grid, grid_inside))
    return min(agreements)


def unflooded(mesh: Mesh, side: int, *, device: str = "cpu") -> Bool[np.ndarray, "side side side"]:
    """Return which nodes of a lattice over the query cube a flood fill from its corner does not enter.

    The fill does not enter nodes on a face of the normalised mesh.
    """
    corners = widened(mesh.vertices[mesh.faces[face_areas(mesh) > SMALLEST_AREA]])
    with on_device(device):
        rows = np.arange(3 * len(corners)).reshape(-1, 3)
        faces = search_mesh(Mesh(corners.reshape(-1, 3), rows, mesh.name))
        links = wp.empty((side,) * 3, dtype=wp.uint8)
        wp.launch(_link_kernel, dim=links.shape, inputs=[faces.id], outputs=[links])
        flooded, changed = wp.zeros((side,) * 3, dtype=wp.uint8), wp.ones(1, dtype=wp.int32)
        while changed.numpy()[0]:
            changed.zero_()
            for axis in range(3):
                wp.launch(_sweep_kernel, dim=(side, side), inputs=[links, axis], outputs=[flooded, changed])
        return flooded.numpy() == 0


@wp.func
def _unit(axis: int) -> wp.vec3:
    return wp.vec3(float(axis == 0), float(axis == 1), float(axis == 2))


@wp.kernel
def _link_kernel(faces: wp.uint64, links: wp.array3d(dtype=wp.uint8)):
    """One thread a node: set a bit for each axis along which the fill can go to the next node."""
    x, y, z = wp.tid()
    spacing = 2.0 / float(links.shape[0] - 1)
    node = spacing * wp.vec3(float(x), float(y), float(z)) - wp.vec3(1.0, 1.0, 1.0)
    free = int(0)  # noqa: UP018, RUF046  a variable to Warp, where a literal is a constant
    for axis in range(3):
        start = node - _BEYOND * _unit(axis)
        if not wp.mesh_query_ray_anyhit(faces, start, _unit(axis), spacing + 2.0 * _BEYOND):
            free = free | (1 << axis)
    links[x, y, z] = wp.uint8(free)


@wp.kernel
def _sweep_kernel(
    links: wp.array3d(dtype=wp.uint8),
    axis: int,
    flooded: wp.array3d(dtype=wp.uint8),
    changed: wp.array(dtype=wp.int32),
):
    """Extend the fill along a line of nodes, in both directions; ``changed`` is set if nodes were added."""
    first, second = wp.tid()
    side = links.shape[0]
    bit = wp.uint8(1 << axis)
    if first == 0 and second == 0:
        flooded[0, 0, 0] = wp.uint8(1)
    for way in range(2):
        came = wp.uint8(0)
        for step in range(side):
            at = step
            if way == 1:
                at = side - 1 - step
            x = wp.where(axis == 0, at, first)
            y = wp.where(axis == 1, at, wp.where(axis == 0, first, second))
            z = wp.where(axis == 2, at, second)
            own = flooded[x, y, z]
            if way == 1 and (links[x, y, z] & bit) == wp.uint8(0):
                came = wp.uint8(0)
            if own == wp.uint8(0) and came == wp.uint8(1):
                flooded[x, y, z] = wp.uint8(1)
                own = wp.uint8(1)
                changed[0] = 1
            came = own
            if way == 0 and (links[x, y, z] & bit) == wp.uint8(0):
                came = wp.uint8(0)

"""Which directions lead out of a mesh, for many points at once on one thread of a CPU.

For each direction, the mesh is projected onto the plane across it. The plane is divided into cells, and each
cell lists the faces that project onto it. A point looks up its cell; mostly, the face that hides it is the
one that hid the previous point there. A face is tested as in :mod:`pointproj.geometry.visibility`, so the
counts are the same. For the points of a training mesh, this takes a fraction of the time that rays through a
tree take.
"""

import numpy as np
import warp as wp
from jaxtyping import Float, Int

from pointproj.geometry.visibility import hidden_space, is_hidden
from pointproj.geometry.warp_meshes import on_device

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

SIDE = 24
"""Cells a side. From 24 to 32 cells, the time is about the same."""

CAPACITY = 1 << 22
"""Entries in the lists of all cells; for a mesh that needs more, the tree is used."""

_PADDING = wp.constant(wp.float64(1e-5))
"""Faces are widened by this in the plane (query cube units), which is more than the margin in their test."""


def count_escapes_by_cells(
    corners: Float[np.ndarray, "F 3 3"],
    points: Float[np.ndarray, "Q 3"],
    directions: Float[np.ndarray, "D 3"],
    escaped: Int[np.ndarray, " Q"],
    most: int,
) -> Int[np.ndarray, " Q"] | None:
    """Count like :func:`pointproj.geometry.visibility.count_escapes`, with the same arguments.

    It is faster if large faces come last. Returns None if the lists would need more than :data:`CAPACITY`
    entries.
    """
    with on_device("cpu"):
        counts, entries = wp.array(escaped, dtype=wp.int32), wp.zeros(1, dtype=wp.int32)
        vectors = (wp.array(values, dtype=wp.vec3d) for values in (corners, points.astype(float)))
        wp.launch(
            _count_kernel,
            dim=1,
            inputs=[wp.array(_frames(directions), dtype=wp.mat33d), *vectors, most],
            outputs=[
                wp.empty(len(corners), dtype=wp.mat44d),
                wp.empty((SIDE, SIDE), dtype=wp.int32),
                wp.empty((SIDE, SIDE), dtype=wp.float64),
                wp.empty(CAPACITY, dtype=wp.vec2i),
                wp.array(np.arange(len(points), dtype=np.int32)),
                entries,
                counts,
            ],
        )
        return None if entries.numpy()[0] > CAPACITY else counts.numpy()


def _frames(directions: Float[np.ndarray, "D 3"]) -> Float[np.ndarray, "D 3 3"]:
    """Return for each direction a matrix: its rows are two axes across the direction, and the direction."""
    helper = np.where(np.abs(directions[:, 2:]) > 0.9, [[1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]])
    first = np.cross(directions, helper)
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    return np.stack([first, np.cross(directions, first), directions], axis=1)


@wp.func
def _cell(place: wp.float64, low: wp.float64, width: wp.float64, cells: int) -> int:
    """Return the column or row of a place in the plane."""
    return wp.min(int((place - low) / width), cells - 1)


@wp.kernel
def _count_kernel(
    frames: wp.array(dtype=wp.mat33d),
    corners: wp.array2d(dtype=wp.vec3d),
    points: wp.array(dtype=wp.vec3d),
    most: int,
    spaces: wp.array(dtype=wp.mat44d),
    heads: wp.array2d(dtype=wp.int32),
    tops: wp.array2d(dtype=wp.float64),
    links: wp.array(dtype=wp.vec2i),
    remaining: wp.array(dtype=wp.int32),
    entries: wp.array(dtype=wp.int32),
    escaped: wp.array(dtype=wp.int32),
):
    """Count for one direction after the other, each with the points that are left, in one thread.

    ``heads`` holds the first entry of each cell's list, or -1. ``links`` holds a face and the next entry.
    ``tops`` holds the greatest height of the faces over each cell.
    """
    count, side = points.shape[0], heads.shape[0]
    for number in range(frames.shape[0]):
        frame = frames[number]
        low = frame * corners[0, 0]
        high = low
        for face in range(corners.shape[0]):
            for corner in range(3):
                place = frame * corners[face, corner]
                low = wp.min(low, place)
                high = wp.max(high, place)
        low -= wp.vec3d(_PADDING)
        high += wp.vec3d(_PADDING)
        width = (high - low) / wp.float64(side)
        for row in range(side):
            for column in range(side):
                heads[row, column] = -1
                tops[row, column] = low[2]
        found = int(0)  # noqa: UP018, RUF046  a variable to Warp, where a literal is a constant
        for face in range(corners.shape[0]):
            a, b, c = corners[face, 0], corners[face, 1], corners[face, 2]
            spaces[face] = hidden_space(a, b, c, frame[2])
            begin = wp.min(frame * a, wp.min(frame * b, frame * c)) - wp.vec3d(_PADDING)
            end = wp.max(frame * a, wp.max(frame * b, frame * c)) + wp.vec3d(_PADDING)
            first, last = _cell(begin[0], low[0], width[0], side), _cell(end[0], low[0], width[0], side)
            for row in range(
                _cell(begin[1], low[1], width[1], side), _cell(end[1], low[1], width[1], side) + 1
            ):
                for column in range(first, last + 1):
                    tops[row, column] = wp.max(tops[row, column], end[2])
                    if found < links.shape[0]:
                        links[found] = wp.vec2i(face, heads[row, column])
                        heads[row, column] = found
                    found += 1
        entries[0] = wp.max(entries[0], found)
        if found > links.shape[0]:
            break
        kept = int(0)  # noqa: UP018, RUF046
        for j in range(count):
            i = remaining[j]
            point = points[i]
            place = frame * point
            escapes = int(1)  # noqa: UP018, RUF046
            if place[0] >= low[0] and place[1] >= low[1] and place[0] <= high[0] and place[1] <= high[1]:
                row = _cell(place[1], low[1], width[1], side)
                column = _cell(place[0], low[0], width[0], side)
                if place[2] <= tops[row, column]:
                    before = int(-1)  # noqa: UP018, RUF046
                    entry = heads[row, column]
                    while entry >= 0:
                        link = links[entry]
                        if is_hidden(spaces[link[0]], point):
                            escapes = 0
                            if before >= 0:  # the face moves to the front of the list
                                links[before] = wp.vec2i(links[before][0], link[1])
                                links[entry] = wp.vec2i(link[0], heads[row, column])
                                heads[row, column] = entry
                            break
                        before = entry
                        entry = link[1]
            escaped[i] = escaped[i] + escapes
            if escaped[i] <= most:
                remaining[kept] = i
                kept += 1
        count = kept

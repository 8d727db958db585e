"""Which directions lead out of a mesh, for many points at once on one thread of a CPU.

Along one direction a mesh is flat: the plane across it is divided into cells, each with a list of the faces
over it. A point looks up its cell, and the face that hides it is mostly the one that hid the last point
there. Four planes in single precision decide nearly all: those through the edges of a face, and its own. A
point within their error is left to :func:`~pointproj.geometry.visibility.is_hidden`, in double precision; of
training meshes these are one test in a thousand.

For the points of a training mesh that takes a sixth of the time of following rays through a tree.
"""

import numpy as np
import warp as wp
from jaxtyping import Float, Int

from pointproj.geometry.visibility import hidden_space, is_hidden
from pointproj.geometry.warp_meshes import on_device

wp.set_module_options({"enable_backward": False, "fuse_fp": False})

SIDE = 24
"""Cells a side. Between 24 and 32 they take about the same time."""

CAPACITY = 1 << 22
"""Places in the lists of all cells together; a mesh that needs more is left to the tree."""

# PADDING is of faces in the plane, and the least error of a plane, against the rounding of single precision.
_CONSTANTS = f"constexpr int SIDE = {SIDE}; constexpr float PADDING = 1e-5f;"

# The plane across a direction begins at (left, bottom), and has (across, along) cells to a unit.
_FLATTEN = (
    _CONSTANTS
    + """
    const float* axes = frame.data[0];
    float low[3] = {1e9f, 1e9f, 1e9f}, high[3] = {-1e9f, -1e9f, -1e9f};
    for (int i = 0; i < 3 * faces; ++i) {
        const float* from = corners.data + 3 * i;
        for (int axis = 0; axis < 3; ++axis) {
            const float* a = axes + 3 * axis;
            const float x = a[0] * from[0] + a[1] * from[1] + a[2] * from[2];
            flat.data[3 * i + axis] = x;
            low[axis] = x < low[axis] ? x : low[axis];
            high[axis] = x > high[axis] ? x : high[axis];
        }
    }
    plane.data[0] = low[0] - PADDING;
    plane.data[1] = low[1] - PADDING;
    plane.data[2] = SIDE / (high[0] - low[0] + 4 * PADDING);
    plane.data[3] = SIDE / (high[1] - low[1] + 4 * PADDING);
"""
)

# Of each face four planes, one to a column: (x, y, 1, error). Corners are off by up to 3e-7 in the plane, so
# an edge leans by that over its length. A face without area there, or an edge without length, is NaN: unsure.
_MAKE_TESTS = (
    _CONSTANTS
    + """
    const float cells = 4 / plane.data[2] + 4 / plane.data[3];
    for (int face = 0; face < faces; ++face) {
        const float* at = flat.data + 9 * face;
        float* test = tests.data + 16 * face;
        double ab[3], ac[3];
        for (int axis = 0; axis < 3; ++axis) {
            ab[axis] = (double)at[3 + axis] - at[axis];
            ac[axis] = (double)at[6 + axis] - at[axis];
        }
        const double area = ab[0] * ac[1] - ab[1] * ac[0];
        const double rise_x = (ab[2] * ac[1] - ac[2] * ab[1]) / area;
        const double rise_y = (ac[2] * ab[0] - ab[2] * ac[0]) / area;
        const float side = area < 0 ? -1.0f : 1.0f;
        float lengths[3], extent = cells;
        for (int edge = 0; edge < 3; ++edge) {
            const float* start = at + 3 * edge;
            const float* end = at + 3 * ((edge + 1) % 3);
            const float dx = end[0] - start[0], dy = end[1] - start[1];
            lengths[edge] = ::fabsf(dx) + ::fabsf(dy);
            extent += lengths[edge];
            test[edge] = -side * dy / lengths[edge];
            test[4 + edge] = side * dx / lengths[edge];
            test[8 + edge] = (float)-((double)test[edge] * start[0] + (double)test[4 + edge] * start[1]);
        }
        for (int edge = 0; edge < 3; ++edge) test[12 + edge] = PADDING + 2e-6f * extent / lengths[edge];
        test[3] = (float)rise_x;
        test[7] = (float)rise_y;
        test[11] = (float)(at[2] - rise_x * at[0] - rise_y * at[1]);
        test[15] = PADDING * (1 + ::fabsf(test[3]) + ::fabsf(test[7]));
    }
"""
)

# ``heads`` is the first place of a cell's list, or -1; ``links`` are pairs of a face and the next place;
# ``tops`` is how high the faces over a cell reach.
_LIST_FACES = (
    _CONSTANTS
    + """
    const float left = plane.data[0], bottom = plane.data[1], across = plane.data[2], along = plane.data[3];
    for (int cell = 0; cell < SIDE * SIDE; ++cell) heads.data[cell] = -1, tops.data[cell] = -1e9f;
    int entries = 0;
    for (int face = 0; face < faces; ++face) {
        const float* at = flat.data + 9 * face;
        float low[3], high[3];
        for (int axis = 0; axis < 3; ++axis) {
            low[axis] = wp::min(at[axis], wp::min(at[3 + axis], at[6 + axis]));
            high[axis] = wp::max(at[axis], wp::max(at[3 + axis], at[6 + axis]));
        }
        const float top = high[2] + PADDING;
        const int first_row = wp::max((int)((low[1] - PADDING - bottom) * along), 0);
        const int last_row = wp::min((int)((high[1] + PADDING - bottom) * along), SIDE - 1);
        int first = wp::max((int)((low[0] - PADDING - left) * across), 0);
        int last = wp::min((int)((high[0] + PADDING - left) * across), SIDE - 1);
        const bool is_large = last_row > first_row + 1 && last > first + 1;
        for (int row = first_row; row <= last_row; ++row) {
            if (is_large) {  // the cells of this row that lie between its edges
                const float below = bottom + row / along - PADDING;
                const float above = bottom + (row + 1) / along + PADDING;
                float from = 1e9f, to = -1e9f;
                for (int edge = 0; edge < 3; ++edge) {
                    const float* start = at + 3 * edge;
                    const float* end = at + 3 * ((edge + 1) % 3);
                    const float rise = end[1] - start[1];
                    if (wp::min(start[1], end[1]) > above || wp::max(start[1], end[1]) < below) continue;
                    float x = start[0], other = end[0];
                    if (rise != 0) {
                        const float slope = (end[0] - start[0]) / rise;
                        x = start[0] + (wp::min(wp::max(start[1], below), above) - start[1]) * slope;
                        other = start[0] + (wp::min(wp::max(end[1], below), above) - start[1]) * slope;
                    }
                    from = wp::min(from, wp::min(x, other));
                    to = wp::max(to, wp::max(x, other));
                }
                first = wp::max((int)((from - PADDING - left) * across), 0);
                last = wp::min((int)((to + PADDING - left) * across), SIDE - 1);
            }
            for (int cell = row * SIDE + first; cell <= row * SIDE + last; ++cell, ++entries) {
                tops.data[cell] = wp::max(tops.data[cell], top);
                if (entries >= capacity) continue;
                links.data[2 * entries] = face;
                links.data[2 * entries + 1] = heads.data[cell];
                heads.data[cell] = entries;
            }
        }
    }
    return entries;
"""
)

# Points in groups, so that a processor works on several at once until it comes to the lists. ``state`` is
# where to go on: the point, how many are kept, and if a test was unsure its place and the one before it in
# the list, and the answer (0 or 1) that was found since. Returns the point whose test is unsure, or count.
_COUNT_POINTS = (
    _CONSTANTS
    + """
    constexpr int GROUP = 64;
    typedef float Four __attribute__((vector_size(16), aligned(4)));
    typedef int Flags __attribute__((vector_size(16)));
    const float* axes = frame.data[0];
    const float left = plane.data[0], bottom = plane.data[1], across = plane.data[2], along = plane.data[3];
    int* next = links.data;
    int begin = state.data[0], kept = state.data[1], entry = state.data[2], before = state.data[3];
    int answer = entry >= 0 ? state.data[4] : -1;
    float xs[GROUP], ys[GROUP], zs[GROUP];
    int cells[GROUP];
    for (; begin < count; begin += GROUP) {
        const int group = count - begin < GROUP ? count - begin : GROUP;
        for (int j = 0; j < group; ++j) {
            const float* p = points.data + 3 * remaining.data[begin + j];
            xs[j] = axes[0] * p[0] + axes[1] * p[1] + axes[2] * p[2];
            ys[j] = axes[3] * p[0] + axes[4] * p[1] + axes[5] * p[2];
            zs[j] = axes[6] * p[0] + axes[7] * p[1] + axes[8] * p[2];
            const float column = (xs[j] - left) * across, row = (ys[j] - bottom) * along;
            const bool within = (column >= 0) & (column < SIDE) & (row >= 0) & (row < SIDE);
            cells[j] = within ? (int)row * SIDE + (int)column : -1;
        }
        for (int j = 0; j < group; ++j) {
            const int i = remaining.data[begin + j], cell = cells[j];
            int escapes = 1;
            if (cell >= 0 && zs[j] <= tops.data[cell]) {
                const Four x = {xs[j], xs[j], xs[j], xs[j]}, y = {ys[j], ys[j], ys[j], ys[j]};
                const Four z = {0, 0, 0, zs[j]};
                if (answer < 0) entry = heads.data[cell], before = -1;
                while (entry >= 0) {
                    int hidden = answer;
                    answer = -1;
                    if (hidden < 0) {
                        const Four* test = (const Four*)(tests.data + 16 * next[2 * entry]);
                        const Four above = test[0] * x + test[1] * y + test[2] - z;
                        const Flags outside = above < -test[3], inside = above > test[3];
                        if (outside[0] | outside[1] | outside[2] | outside[3]) {
                            hidden = 0;
                        } else if (inside[0] & inside[1] & inside[2] & inside[3]) {
                            hidden = 1;
                        } else {
                            state.data[0] = begin + j, state.data[1] = kept;
                            state.data[2] = entry, state.data[3] = before;
                            return begin + j;
                        }
                    }
                    if (hidden) {  // its face moves to the front of the list
                        if (before >= 0) {
                            next[2 * before + 1] = next[2 * entry + 1];
                            next[2 * entry + 1] = heads.data[cell];
                            heads.data[cell] = entry;
                        }
                        escapes = 0;
                        break;
                    }
                    before = entry;
                    entry = next[2 * entry + 1];
                }
            }
            const int total = escaped.data[i] + escapes;
            escaped.data[i] = total;
            remaining.data[kept] = i;
            kept += total <= most;
        }
    }
    state.data[1] = kept;
    return count;
"""
)


def count_escapes_by_cells(
    corners: Float[np.ndarray, "F 3 3"],
    points: Float[np.ndarray, "Q 3"],
    directions: Float[np.ndarray, "D 3"],
    escaped: Int[np.ndarray, " Q"],
    most: int,
) -> Int[np.ndarray, " Q"] | None:
    """Count in how many directions a point sees no face, as one function of ``visibility`` does too.

    Parameters
    ----------
    corners : float64 array, shape (F, 3, 3)
        Of faces with area; the large ones had better come last. Coordinates up to 1.
    points : float32 array, shape (Q, 3)
        Those that are near each other in the array had better be near each other in space.
    directions : float64 array, shape (D, 3)
    escaped : int32 array, shape (Q,)
        Counted before.
    most : int
        From one more on, a point's other directions are not tested.

    Returns
    -------
    int32 array, shape (Q,), or None
        Up to ``most + 1``, what was counted before included; None if the lists would have more than
        :data:`CAPACITY` places.
    """
    count, cells = len(corners), SIDE * SIDE
    with on_device("cpu"):
        counts = wp.array(escaped, dtype=wp.int32)
        entries = wp.zeros(1, dtype=wp.int32)
        wp.launch(
            _count_kernel,
            dim=1,
            inputs=[
                wp.array(_frames(directions), dtype=wp.mat33),
                wp.array(directions, dtype=wp.vec3d),
                wp.array(corners, dtype=wp.vec3d),
                wp.array(corners.astype(np.float32).ravel(), dtype=wp.float32),
                wp.array(points.ravel(), dtype=wp.float32),
                most,
                CAPACITY,
            ],
            outputs=[
                wp.empty(9 * count, dtype=wp.float32),
                wp.empty(16 * count, dtype=wp.float32),
                wp.empty(4, dtype=wp.float32),
                wp.empty(cells, dtype=wp.int32),
                wp.empty(cells, dtype=wp.float32),
                wp.empty(2 * CAPACITY, dtype=wp.int32),
                wp.empty(5, dtype=wp.int32),
                entries,
                wp.array(np.arange(len(points), dtype=np.int32)),
                counts,
            ],
        )
        return None if entries.numpy()[0] > CAPACITY else counts.numpy()


def _frames(directions: Float[np.ndarray, "D 3"]) -> Float[np.ndarray, "D 3 3"]:
    """Two axes across each direction, and the direction itself, as rows."""
    helper = np.where(np.abs(directions[:, 2:]) > 0.9, [[1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0]])
    first = np.cross(directions, helper)
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    return np.stack([first, np.cross(directions, first), directions], axis=1).astype(np.float32)


_Floats = wp.array(dtype=wp.float32)
_Ints = wp.array(dtype=wp.int32)


@wp.func_native(_FLATTEN)
def _flatten(frame: wp.mat33, corners: _Floats, faces: int, flat: _Floats, plane: _Floats): ...


@wp.func_native(_MAKE_TESTS)
def _make_tests(flat: _Floats, plane: _Floats, faces: int, tests: _Floats): ...


@wp.func_native(_LIST_FACES)
def _list_faces(
    flat: _Floats, plane: _Floats, faces: int, capacity: int, heads: _Ints, tops: _Floats, links: _Ints
) -> int: ...


@wp.func_native(_COUNT_POINTS)
def _count_points(
    frame: wp.mat33,
    points: _Floats,
    count: int,
    most: int,
    tests: _Floats,
    plane: _Floats,
    heads: _Ints,
    tops: _Floats,
    links: _Ints,
    remaining: _Ints,
    escaped: _Ints,
    state: _Ints,
) -> int: ...


@wp.kernel
def _count_kernel(
    frames: wp.array(dtype=wp.mat33),
    directions: wp.array(dtype=wp.vec3d),
    exact: wp.array2d(dtype=wp.vec3d),
    corners: _Floats,
    points: _Floats,
    most: int,
    capacity: int,
    flat: _Floats,
    tests: _Floats,
    plane: _Floats,
    heads: _Ints,
    tops: _Floats,
    links: _Ints,
    state: _Ints,
    entries: _Ints,
    remaining: _Ints,
    escaped: _Ints,
):
    """Take one direction after the other, each with the points that are left; one thread does all."""
    faces = exact.shape[0]
    count = remaining.shape[0]
    for number in range(directions.shape[0]):
        frame = frames[number]
        _flatten(frame, corners, faces, flat, plane)
        found = _list_faces(flat, plane, faces, capacity, heads, tops, links)
        entries[0] = wp.max(entries[0], found)
        if found > capacity:
            break
        _make_tests(flat, plane, faces, tests)
        state[0] = 0
        state[1] = 0
        state[2] = -1
        j = int(0)  # noqa: UP018, RUF046  a variable to Warp, where a literal is a constant
        while j < count:
            j = _count_points(
                frame, points, count, most, tests, plane, heads, tops, links, remaining, escaped, state
            )
            if j < count:
                face = links[2 * state[2]]
                i = 3 * remaining[j]
                point = wp.vec3d(wp.vec3(points[i], points[i + 1], points[i + 2]))
                space = hidden_space(exact[face, 0], exact[face, 1], exact[face, 2], directions[number])
                state[4] = int(is_hidden(space, point))
        count = state[1]

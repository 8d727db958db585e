"""Target fields of a normalised mesh on the query grid: distance, signed distance, occupancy.

Distances are exact distances to the triangles. The interior is what cannot be reached from outside without
crossing a triangle, so neither the orientation of faces nor how often a face is listed has any influence.
"""

from typing import Literal

import numpy as np
import warp as wp
from jaxtyping import Bool, Float, Int
from scipy import ndimage

from pointproj.geometry.meshes import SMALLEST_AREA, Mesh, MeshError, face_areas, query_grid

Kind = Literal["udf", "sdf", "occupancy"]

FLOOD_SIDE = 117
"""The exterior is flooded on a lattice of at least this many nodes a side that contains the query grid."""

REACH, OPEN_REACH = 0.1, 0.5
"""How far a face shuts links beyond its edges, in lattice cells; the second where the surface ends.

This closes cracks between parts that should meet, which the flood finds or misses by chance otherwise."""

SURFACE_TOLERANCE = 1e-6
"""A lattice node this close to a triangle lies on the surface, in units of the query cube."""

wp.config.log_level = max(wp.config.log_level, wp.LOG_WARNING)
wp.set_module_options({"enable_backward": False})


class NoInterior(MeshError):  # noqa: N818  named by what is true of the mesh; it is an error for some targets only
    """A mesh that encloses no point of the query grid: usable for ``udf`` only."""


def target_field(mesh: Mesh, side: int, kind: Kind, *, device: str = "cpu") -> Float[np.ndarray, " Q"]:
    """Evaluate a target on the query grid.

    Parameters
    ----------
    mesh : Mesh
        Normalised.
    side : int
        Points a side of the grid of :func:`pointproj.geometry.meshes.query_grid`; ``Q = side**3``.
    kind : {"udf", "sdf", "occupancy"}
        Unsigned distance; signed distance, negative inside; 1 inside and 0 elsewhere.
        Distances are in units of the query cube.
    device : str
        Where Warp runs: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.

    Returns
    -------
    float32 array, shape (side**3,)
        In the order of the query grid.

    Raises
    ------
    NoInterior
        If ``kind`` needs an interior and no grid point is inside.
    ValueError
        If ``kind`` is none of the three, or the mesh is not normalised.
    """
    if kind not in ("udf", "sdf", "occupancy"):
        raise ValueError(f"expected a target field udf, sdf or occupancy, got {kind!r}")
    if kind == "udf":
        return unsigned_distance(mesh, query_grid(side), device=device)
    enclosed = inside(mesh, side, device=device)
    if not enclosed.any():
        raise NoInterior(
            mesh.name, f"encloses no point of the grid of {side} a side, so only target=udf can use it"
        )
    if kind == "occupancy":
        return enclosed.astype(np.float32)
    distance = unsigned_distance(mesh, query_grid(side), device=device)
    return np.where(enclosed, -distance, distance)


def unsigned_distance(
    mesh: Mesh, points: Float[np.ndarray, "Q 3"], *, device: str = "cpu"
) -> Float[np.ndarray, " Q"]:
    """Exact distance from each point to the nearest triangle.

    Warp's mesh query gives a near face in single precision; it skips slivers and is inexact close to them.
    So every face whose box is as near as that one is measured again in double precision.

    Parameters
    ----------
    mesh : Mesh
        Coordinates of about unit size, as :func:`pointproj.geometry.meshes.normalize` gives.
    points : float32 array, shape (Q, 3)
    device : str
        Where Warp runs.

    Returns
    -------
    float32 array, shape (Q,)
        In the mesh's units, correct to the rounding of the result.
    """
    corners = mesh.vertices[mesh.faces]
    with wp.ScopedDevice(device):
        search_mesh = wp.Mesh(
            points=wp.array(corners.reshape(-1, 3).astype(np.float32), dtype=wp.vec3),
            indices=wp.array(np.arange(corners.shape[0] * 3, dtype=np.int32), dtype=wp.int32),
        )
        # rounded outwards, or the box of a face could miss the face
        boxes = wp.Bvh(
            lowers=wp.array(np.nextafter(corners.min(axis=1).astype(np.float32), -np.inf), dtype=wp.vec3),
            uppers=wp.array(np.nextafter(corners.max(axis=1).astype(np.float32), np.inf), dtype=wp.vec3),
        )
        distances = wp.empty(len(points), dtype=wp.float32)
        wp.launch(
            _distance_kernel,
            dim=len(points),
            inputs=[
                search_mesh.id,
                boxes.id,
                wp.array(corners, dtype=wp.vec3d),
                wp.array(np.ascontiguousarray(points, dtype=np.float32), dtype=wp.vec3),
            ],
            outputs=[distances],
        )
        return distances.numpy()


def inside(mesh: Mesh, side: int, *, device: str = "cpu") -> Bool[np.ndarray, " Q"]:
    """Tell which points of the query grid cannot be reached from outside.

    A lattice with the query grid among its nodes is flooded from the corner of the query cube, along the
    links between neighbouring nodes that no triangle crosses. What stays dry is inside. It follows that

    - orientation, duplicate, overlapping and non-manifold faces make no difference: overlapping parts give
      their union, and an enclosed cavity is inside, since faces of arbitrary orientation cannot tell it
      from solid;
    - a single sheet has no interior;
    - a point on the surface is inside only if nothing around it is outside, as where two solids touch;
    - cracks are closed: where the surface ends, up to the width of a lattice cell (2 / 116 for a grid of
      30), and between any two parts up to a fifth of that. A wider opening is one, and the flood enters.

    Parameters
    ----------
    mesh : Mesh
        Normalised: its surface lies within the query cube and off its boundary.
    side : int
        Points a side of the query grid.
    device : str
        Where Warp runs.

    Returns
    -------
    bool array, shape (side**3,)
        In the order of :func:`pointproj.geometry.meshes.query_grid`.

    Raises
    ------
    ValueError
        If the surface reaches the boundary of the query cube, or ``side`` is below 2.
    """
    if side < 2:
        raise ValueError(f"expected a grid of at least 2 points a side, got {side}: raise data.grid")
    refinement = -(-(FLOOD_SIDE - 1) // (side - 1))
    dry = inside_lattice(mesh, refinement * (side - 1) + 1, device=device)
    return dry[::refinement, ::refinement, ::refinement].reshape(-1)


def inside_lattice(mesh: Mesh, nodes: int, *, device: str = "cpu") -> Bool[np.ndarray, "n n n"]:
    """Tell which nodes of a flooded lattice with ``nodes`` a side are inside: see :func:`inside`."""
    corners = mesh.vertices[mesh.faces]
    reach = float(np.abs(corners).max())
    if not reach < 1:
        raise ValueError(
            f"{mesh.name}: expected a normalised mesh within the query cube, got coordinates up to "
            f"{reach:.3g}: call pointproj.geometry.meshes.normalize first"
        )
    return _unreached(_passages(corners, open_edges(mesh), nodes, device))


def open_edges(mesh: Mesh) -> Bool[np.ndarray, "F 3"]:
    """Tell which edges have surface on one side only, so that the flood may slip past them.

    Such an edge belongs to one face, or to several that lie on each other: copies of it, or the back of a
    doubled sheet with other diagonals. Vertices at the same place count as one.

    Parameters
    ----------
    mesh : Mesh

    Returns
    -------
    bool array, shape (F, 3)
        Edge ``e`` of a face goes from its corner ``e`` to corner ``(e + 1) % 3``.
    """
    _, place = np.unique(mesh.vertices + 0.0, axis=0, return_inverse=True)
    ends = np.sort(np.stack([mesh.faces, np.roll(mesh.faces, -1, axis=1)], axis=-1), axis=-1)
    ends = np.sort(place.reshape(-1)[ends], axis=-1)
    _, edge_of = np.unique(ends[..., 0] * len(place) + ends[..., 1], return_inverse=True)
    edge_of = edge_of.reshape(-1)

    start = mesh.vertices[mesh.faces]
    along = _unit(np.roll(start, -1, axis=1) - start)
    across = np.roll(start, -2, axis=1) - start
    across = _unit(across - (across * along).sum(axis=-1, keepdims=True) * along)
    across[face_areas(mesh) <= SMALLEST_AREA] = 0  # such a face is no surface to continue on
    across = across.reshape(-1, 3)
    faces = np.bincount(edge_of, weights=(across * across).sum(axis=1))
    pull = np.stack([np.bincount(edge_of, weights=across[:, k]) for k in range(3)], axis=1)
    # unit vectors add up to their number only if all point the same way, here to within a degree or two
    one_sided = np.linalg.norm(pull, axis=1) >= (1 - 1e-4) * faces
    return one_sided[edge_of].reshape(-1, 3)


def _unit(vectors: Float[np.ndarray, "*shape 3"]) -> Float[np.ndarray, "*shape 3"]:
    """Unit vectors; 0 stays 0."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(length > 0, length, 1.0)


def _passages(
    corners: Float[np.ndarray, "F 3 3"], is_open: Bool[np.ndarray, "F 3"], nodes: int, device: str
) -> Int[np.ndarray, "M M M"]:
    """Lattice as a maze, ``M = 2 * nodes - 1`` a side: nodes at even places, links between; 0 is shut."""
    even, odd = slice(None, None, 2), slice(1, None, 2)
    maze = np.zeros((2 * nodes - 1,) * 3, dtype=np.uint8)
    maze[even, even, even] = 1
    maze[odd, even, even] = maze[even, odd, even] = maze[even, even, odd] = 1
    spacing = 2.0 / (nodes - 1)
    tolerance = SURFACE_TOLERANCE / spacing
    with wp.ScopedDevice(device):
        passages = wp.array(maze, dtype=wp.uint8)
        wp.launch(
            _shut_kernel,
            dim=(len(corners), 3),
            inputs=[
                wp.array((corners + 1.0) / spacing, dtype=wp.vec3d),
                wp.array(np.where(is_open, OPEN_REACH, REACH), dtype=wp.vec3d),
                tolerance,
            ],
            outputs=[passages],
        )
        return passages.numpy()


def _unreached(passages: Int[np.ndarray, "M M M"]) -> Bool[np.ndarray, "n n n"]:
    """Nodes that the flood from the lattice's corner does not reach."""
    rooms, _ = ndimage.label(passages)
    room = rooms[::2, ::2, ::2]
    outside = room == room[0, 0, 0]
    on_surface = room == 0
    beside_outside = ndimage.binary_dilation(outside, np.ones((3, 3, 3), dtype=bool))
    return ~outside & ~(on_surface & beside_outside)


@wp.func
def _segment_parameter(start: wp.vec3d, end: wp.vec3d, point: wp.vec3d) -> wp.float64:
    """Place in [0, 1] along a segment that is nearest to a point."""
    along = end - start
    squared = wp.dot(along, along)
    if squared == wp.float64(0.0):
        return wp.float64(0.0)
    return wp.clamp(wp.dot(point - start, along) / squared, wp.float64(0.0), wp.float64(1.0))


@wp.func
def _segment_squared(start: wp.vec3d, end: wp.vec3d, point: wp.vec3d) -> wp.float64:
    nearest = start + _segment_parameter(start, end, point) * (end - start)
    return wp.length_sq(nearest - point)


@wp.func
def _triangle_squared(a: wp.vec3d, b: wp.vec3d, c: wp.vec3d, point: wp.vec3d) -> wp.float64:
    """Squared distance to a triangle: to its plane where the point projects into it, else to its edges."""
    nearest = wp.min(
        _segment_squared(a, b, point), wp.min(_segment_squared(b, c, point), _segment_squared(c, a, point))
    )
    zero = wp.float64(0.0)
    normal = wp.cross(b - a, c - a)
    squared = wp.length_sq(normal)
    toward_c = wp.dot(wp.cross(b - a, point - a), normal)
    toward_b = wp.dot(wp.cross(point - a, c - a), normal)
    if squared > zero and toward_b >= zero and toward_c >= zero and toward_b + toward_c <= squared:
        height = wp.dot(point - a, normal)
        nearest = wp.min(nearest, height * height / squared)
    return nearest


@wp.kernel
def _distance_kernel(
    search_mesh: wp.uint64,
    boxes: wp.uint64,
    corners: wp.array2d(dtype=wp.vec3d),
    points: wp.array(dtype=wp.vec3),
    distances: wp.array(dtype=wp.float32),
):
    i = wp.tid()
    point = wp.vec3d(points[i])
    face = int(0)  # noqa: UP018, RUF046  a variable to Warp, where a literal is a constant
    query = wp.mesh_query_point_no_sign(search_mesh, points[i], 1.0e6)
    if query.result:
        face = query.face
    nearest = _triangle_squared(corners[face, 0], corners[face, 1], corners[face, 2], point)
    # the sphere is widened by more than the rounding of its radius and of the boxes
    candidates = wp.bvh_query_sphere(boxes, points[i], wp.float32(wp.sqrt(nearest)) * 1.00001 + 1.0e-6)
    while wp.bvh_query_next(candidates, face):
        nearest = wp.min(
            nearest, _triangle_squared(corners[face, 0], corners[face, 1], corners[face, 2], point)
        )
    distances[i] = wp.float32(wp.sqrt(nearest))


@wp.func
def _flat(point: wp.vec3d, axis: int) -> wp.vec3d:
    """Projection along an axis: the two other coordinates in cyclic order, then 0."""
    return wp.vec3d(point[(axis + 1) % 3], point[(axis + 2) % 3], wp.float64(0.0))


@wp.func
def _turn(a: wp.vec3d, b: wp.vec3d, c: wp.vec3d) -> wp.float64:
    """Twice the signed area of a triangle in the plane."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


@wp.func
def _crossing(
    a: wp.vec3d, b: wp.vec3d, c: wp.vec3d, area: wp.float64, reach: wp.vec3d, line: wp.vec3d, axis: int
) -> wp.vec2d:
    """Where a line along an axis meets a triangle: how far beside its projection, and at what depth.

    A line that misses the projection by no more than the reach of an edge meets the nearest point of that
    edge. One that misses by more has an infinite first number.
    """
    flat_a = _flat(a, axis)
    flat_b = _flat(b, axis)
    flat_c = _flat(c, axis)
    weight_a = _turn(line, flat_b, flat_c) / area
    weight_b = _turn(line, flat_c, flat_a) / area
    weight_c = wp.float64(1.0) - weight_a - weight_b
    gap = wp.float64(0.0)
    depth = weight_a * a[axis] + weight_b * b[axis] + weight_c * c[axis]
    if wp.min(weight_a, wp.min(weight_b, weight_c)) < wp.float64(0.0):
        gap = wp.float64(wp.inf)
        ring = wp.matrix_from_rows(a, b, c, a)
        for edge in range(3):
            start = ring[edge]
            end = ring[edge + 1]
            flat_start = _flat(start, axis)
            flat_end = _flat(end, axis)
            t = _segment_parameter(flat_start, flat_end, line)
            beside = wp.length(flat_start + t * (flat_end - flat_start) - line)
            if beside <= reach[edge] and beside < gap:
                gap = beside
                depth = start[axis] + t * (end[axis] - start[axis])
    return wp.vec2d(gap, depth)


@wp.kernel
def _shut_kernel(
    corners: wp.array2d(dtype=wp.vec3d),
    reaches: wp.array(dtype=wp.vec3d),
    tolerance: wp.float64,
    passages: wp.array3d(dtype=wp.uint8),
):
    """Shut the links that one triangle crosses along one axis, and the nodes that lie on it.

    All lengths are in lattice cells, and coordinates count from the lattice's corner.
    """
    face, axis = wp.tid()
    a = corners[face, 0]
    b = corners[face, 1]
    c = corners[face, 2]
    flat_a = _flat(a, axis)
    flat_b = _flat(b, axis)
    flat_c = _flat(c, axis)
    area = _turn(flat_a, flat_b, flat_c)
    longest = wp.max(
        wp.length(flat_b - flat_a), wp.max(wp.length(flat_c - flat_b), wp.length(flat_a - flat_c))
    )
    if wp.abs(area) <= tolerance * longest:
        return  # seen edge-on it stops no line; nodes on it are found along another axis

    last = (passages.shape[0] - 1) // 2
    widest = wp.max(reaches[face])
    low = wp.min(flat_a, wp.min(flat_b, flat_c))
    high = wp.max(flat_a, wp.max(flat_b, flat_c))
    first_j = wp.max(int(wp.ceil(low[1] - widest)), 0)
    end_j = wp.min(int(wp.floor(high[1] + widest)), last) + 1
    for i in range(
        wp.max(int(wp.ceil(low[0] - widest)), 0), wp.min(int(wp.floor(high[0] + widest)), last) + 1
    ):
        for j in range(first_j, end_j):
            line = wp.vec3d(wp.float64(i), wp.float64(j), wp.float64(0.0))
            met = _crossing(a, b, c, area, reaches[face], line, axis)
            gap = met[0]
            depth = met[1]
            if gap < wp.float64(wp.inf):
                place = 2 * int(wp.floor(depth)) + 1
                if gap <= tolerance and wp.abs(depth - wp.round(depth)) <= tolerance:
                    place = 2 * int(wp.round(depth))
                if axis == 0:
                    passages[place, 2 * i, 2 * j] = wp.uint8(0)
                elif axis == 1:
                    passages[2 * j, place, 2 * i] = wp.uint8(0)
                else:
                    passages[2 * i, 2 * j, place] = wp.uint8(0)

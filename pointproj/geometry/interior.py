"""The interior of a mesh: the points that cannot be reached from outside without crossing a triangle.

So neither the orientation of faces nor how often a face is listed has any influence. The exterior is found
by a flood fill of a regular lattice.
"""

from functools import lru_cache

import numpy as np
import warp as wp
from jaxtyping import Bool, Float, UInt8
from scipy import ndimage

from pointproj.geometry.distances import nearest_parameter
from pointproj.geometry.meshes import SMALLEST_AREA, Mesh, face_areas
from pointproj.geometry.warp_meshes import on_device, search_mesh

FLOOD_SIDE = 117
"""The lattice that is filled has at least this many nodes a side, and the query grid among them."""

MARGIN, OPEN_MARGIN = 0.1, 0.5
"""How far a face blocks links beyond its edges, in lattice cells; the second where the surface ends.

This closes cracks between parts that should meet; without it the fill would enter some of them by chance."""

SURFACE_TOLERANCE = 1e-6
"""A lattice node this close to a triangle lies on the surface, in units of the query cube."""

# Corners of a cell as bits of their axes, by distance from the first.
_CORNERS = np.array([0b000, 0b001, 0b010, 0b100, 0b011, 0b101, 0b110, 0b111], dtype=np.int32)

wp.set_module_options({"enable_backward": False})


def inside(mesh: Mesh, side: int, *, device: str = "cpu") -> Bool[np.ndarray, " Q"]:
    """Tell which points of the query grid cannot be reached from outside.

    A lattice with the query grid among its nodes is filled from the corner of the query cube, along the links
    between neighbouring nodes that no triangle crosses. Nodes that the fill does not reach are inside. It
    follows that

    - orientation, duplicate, overlapping and non-manifold faces make no difference: overlapping parts give
      their union, and an enclosed cavity is inside, since faces of arbitrary orientation cannot tell it
      from solid;
    - a single sheet has no interior;
    - a point on the surface is inside only if nothing around it is outside, as where two solids touch;
    - cracks are closed: where the surface ends, up to the width of a lattice cell (2 / 116 for a grid of
      30), and between any two parts up to a fifth of that. The fill enters through anything wider.

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
    nodes = inside_lattice(mesh, refinement * (side - 1) + 1, device=device)
    return nodes[::refinement, ::refinement, ::refinement].reshape(-1)


def inside_at(mesh: Mesh, points: Float[np.ndarray, "Q 3"], *, device: str = "cpu") -> Bool[np.ndarray, " Q"]:
    """Tell which points cannot be reached from outside: see :func:`inside`.

    A point is on the side of the nearest lattice node that it sees, among the eight corners of its cell. One
    that sees none of them lies between sheets that are closer than the nodes (2 / 116), and is inside.

    Parameters
    ----------
    mesh : Mesh
        Normalised.
    points : float32 array, shape (Q, 3)
        In the query cube.
    device : str
        Where Warp runs.

    Returns
    -------
    bool array, shape (Q,)

    Raises
    ------
    ValueError
        If the surface reaches the boundary of the query cube.
    """
    nodes = inside_lattice(mesh, FLOOD_SIDE, device=device)
    with on_device(device):
        triangles = search_mesh(mesh)
        enclosed = wp.empty(len(points), dtype=wp.uint8)
        wp.launch(
            _side_kernel,
            dim=len(points),
            inputs=[
                triangles.id,
                wp.array(nodes.astype(np.uint8), dtype=wp.uint8),
                wp.array(_CORNERS, dtype=wp.int32),
                wp.array(np.ascontiguousarray(points, dtype=np.float32), dtype=wp.vec3),
            ],
            outputs=[enclosed],
        )
        return enclosed.numpy().astype(bool)


@lru_cache(maxsize=1)  # the grid and random points of a mesh are usually evaluated one after the other
def inside_lattice(mesh: Mesh, side: int, *, device: str = "cpu") -> Bool[np.ndarray, "side side side"]:
    """Tell which nodes of a lattice over the query cube are inside: see :func:`inside`.

    Parameters
    ----------
    mesh : Mesh
        Normalised.
    side : int
        Nodes along each axis.
    device : str
        Where Warp runs.

    Returns
    -------
    bool array, shape (side, side, side)
        Read-only, since the next call with the same mesh returns it too.

    Raises
    ------
    ValueError
        If the surface reaches the boundary of the query cube.
    """
    corners = mesh.vertices[mesh.faces]
    largest = float(np.abs(corners).max())
    if not largest < 1:
        raise ValueError(
            f"{mesh.name}: expected a normalised mesh within the query cube, got coordinates up to "
            f"{largest:.3g}: call pointproj.geometry.meshes.normalize first"
        )
    nodes = _unreached(_open_links(corners, open_edges(mesh), side, device))
    nodes.flags.writeable = False
    return nodes


def open_edges(mesh: Mesh) -> Bool[np.ndarray, "F 3"]:
    """Tell which edges have surface on one side only, so that the fill may slip past them.

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
    summed = np.stack([np.bincount(edge_of, weights=across[:, k]) for k in range(3)], axis=1)
    # unit vectors add up to their number only if all point the same way, here to within a degree or two
    one_sided = np.linalg.norm(summed, axis=1) >= (1 - 1e-4) * faces
    return one_sided[edge_of].reshape(-1, 3)


def _unit(vectors: Float[np.ndarray, "*shape 3"]) -> Float[np.ndarray, "*shape 3"]:
    """Unit vectors; 0 stays 0."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(length > 0, length, 1.0)


def _open_links(
    corners: Float[np.ndarray, "F 3 3"], is_open: Bool[np.ndarray, "F 3"], side: int, device: str
) -> UInt8[np.ndarray, "M M M"]:
    """Mark the nodes and links of a lattice that no triangle blocks.

    Returns
    -------
    uint8 array, shape (M, M, M), M = 2 * side - 1
        1 where the fill can go. Nodes are at even places along all axes, the link between two nodes is at the
        place between them, and all other places hold 0.
    """
    even, odd = slice(None, None, 2), slice(1, None, 2)
    unblocked = np.zeros((2 * side - 1,) * 3, dtype=np.uint8)
    unblocked[even, even, even] = 1
    unblocked[odd, even, even] = unblocked[even, odd, even] = unblocked[even, even, odd] = 1
    spacing = 2.0 / (side - 1)
    tolerance = SURFACE_TOLERANCE / spacing
    with on_device(device):
        links = wp.array(unblocked, dtype=wp.uint8)
        wp.launch(
            _block_kernel,
            dim=(len(corners), 3),
            inputs=[
                wp.array((corners + 1.0) / spacing, dtype=wp.vec3d),
                wp.array(np.where(is_open, OPEN_MARGIN, MARGIN), dtype=wp.vec3d),
                tolerance,
            ],
            outputs=[links],
        )
        return links.numpy()


def _unreached(links: UInt8[np.ndarray, "M M M"]) -> Bool[np.ndarray, "side side side"]:
    """Nodes that a fill from the lattice's corner does not reach."""
    labels, _ = ndimage.label(links)
    component = labels[::2, ::2, ::2]
    outside = component == component[0, 0, 0]
    on_surface = component == 0
    beside_outside = ndimage.binary_dilation(outside, np.ones((3, 3, 3), dtype=bool))
    return ~outside & ~(on_surface & beside_outside)


@wp.func
def _flat(point: wp.vec3d, axis: int) -> wp.vec3d:
    """Projection along an axis: the two other coordinates in cyclic order, then 0."""
    return wp.vec3d(point[(axis + 1) % 3], point[(axis + 2) % 3], wp.float64(0.0))


@wp.func
def _doubled_area(a: wp.vec3d, b: wp.vec3d, c: wp.vec3d) -> wp.float64:
    """Twice the signed area of a triangle in the plane."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


@wp.func
def _crossing(
    a: wp.vec3d, b: wp.vec3d, c: wp.vec3d, area: wp.float64, margin: wp.vec3d, line: wp.vec3d, axis: int
) -> wp.vec2d:
    """Where a line along an axis meets a triangle: how far beside its projection, and at what depth.

    A line that misses the projection by no more than the margin of an edge meets the nearest point of that
    edge. One that misses by more has an infinite first number.
    """
    flat_a = _flat(a, axis)
    flat_b = _flat(b, axis)
    flat_c = _flat(c, axis)
    weight_a = _doubled_area(line, flat_b, flat_c) / area
    weight_b = _doubled_area(line, flat_c, flat_a) / area
    weight_c = wp.float64(1.0) - weight_a - weight_b
    gap = wp.float64(0.0)
    depth = weight_a * a[axis] + weight_b * b[axis] + weight_c * c[axis]
    if wp.min(weight_a, wp.min(weight_b, weight_c)) < wp.float64(0.0):
        gap = wp.float64(wp.inf)
        loop = wp.matrix_from_rows(a, b, c, a)
        for edge in range(3):
            start = loop[edge]
            end = loop[edge + 1]
            flat_start = _flat(start, axis)
            flat_end = _flat(end, axis)
            t = nearest_parameter(flat_start, flat_end, line)
            beside = wp.length(flat_start + t * (flat_end - flat_start) - line)
            if beside <= margin[edge] and beside < gap:
                gap = beside
                depth = start[axis] + t * (end[axis] - start[axis])
    return wp.vec2d(gap, depth)


@wp.kernel
def _block_kernel(
    corners: wp.array2d(dtype=wp.vec3d),
    margins: wp.array(dtype=wp.vec3d),
    tolerance: wp.float64,
    links: wp.array3d(dtype=wp.uint8),
):
    """Block the links that one triangle crosses along one axis, and the nodes that lie on it.

    All lengths are in lattice cells, and coordinates count from the lattice's corner.
    """
    face, axis = wp.tid()
    a = corners[face, 0]
    b = corners[face, 1]
    c = corners[face, 2]
    flat_a = _flat(a, axis)
    flat_b = _flat(b, axis)
    flat_c = _flat(c, axis)
    area = _doubled_area(flat_a, flat_b, flat_c)
    longest = wp.max(
        wp.length(flat_b - flat_a), wp.max(wp.length(flat_c - flat_b), wp.length(flat_a - flat_c))
    )
    if wp.abs(area) <= tolerance * longest:
        return  # seen edge-on it stops no line; nodes on it are found along another axis

    last = (links.shape[0] - 1) // 2
    widest = wp.max(margins[face])
    low = wp.min(flat_a, wp.min(flat_b, flat_c))
    high = wp.max(flat_a, wp.max(flat_b, flat_c))
    first_j = wp.max(int(wp.ceil(low[1] - widest)), 0)
    end_j = wp.min(int(wp.floor(high[1] + widest)), last) + 1
    for i in range(
        wp.max(int(wp.ceil(low[0] - widest)), 0), wp.min(int(wp.floor(high[0] + widest)), last) + 1
    ):
        for j in range(first_j, end_j):
            line = wp.vec3d(wp.float64(i), wp.float64(j), wp.float64(0.0))
            met = _crossing(a, b, c, area, margins[face], line, axis)
            gap = met[0]
            depth = met[1]
            if gap < wp.float64(wp.inf):
                place = 2 * int(wp.floor(depth)) + 1
                if gap <= tolerance and wp.abs(depth - wp.round(depth)) <= tolerance:
                    place = 2 * int(wp.round(depth))
                if axis == 0:
                    links[place, 2 * i, 2 * j] = wp.uint8(0)
                elif axis == 1:
                    links[2 * j, place, 2 * i] = wp.uint8(0)
                else:
                    links[2 * i, 2 * j, place] = wp.uint8(0)


@wp.kernel
def _side_kernel(
    triangles: wp.uint64,
    nodes: wp.array3d(dtype=wp.uint8),
    corners: wp.array(dtype=wp.int32),
    points: wp.array(dtype=wp.vec3),
    enclosed: wp.array(dtype=wp.uint8),
):
    """Take the side of the nearest corner of the point's cell that no triangle hides."""
    i = wp.tid()
    point = points[i]
    last = nodes.shape[0] - 1
    spacing = 2.0 / float(last)
    beyond = 0.01 * spacing  # a node on the surface tells nothing: the ray ends behind it
    place = (point + wp.vec3(1.0, 1.0, 1.0)) / spacing
    low = wp.vec3i(0, 0, 0)
    near = int(0)  # noqa: UP018, RUF046  a variable to Warp, where a literal is a constant
    for axis in range(3):
        low[axis] = wp.clamp(int(wp.floor(place[axis])), 0, last - 1)
        if place[axis] - float(low[axis]) > 0.5:
            near = near | (1 << axis)
    answer = int(2)  # noqa: UP018, RUF046
    for order in range(8):
        if answer == 2:
            corner = near ^ corners[order]
            x = low[0] + (corner & 1)
            y = low[1] + ((corner >> 1) & 1)
            z = low[2] + ((corner >> 2) & 1)
            node = wp.vec3(float(x), float(y), float(z)) * spacing - wp.vec3(1.0, 1.0, 1.0)
            toward = node - point
            distance = wp.length(toward)
            blocked = bool(False)  # noqa: UP018
            if distance > 0.0:
                blocked = wp.mesh_query_ray(triangles, point, toward / distance, distance + beyond).result
            if not blocked:
                answer = int(nodes[x, y, z])
    enclosed[i] = wp.uint8(wp.min(answer, 1))

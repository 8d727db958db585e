"""Points drawn on many surfaces, and queries drawn from pools, by one Warp kernel each, on any device.

Points have the distribution of :meth:`pointproj.geometry.sampling.SurfaceSampler.draw`. The random numbers
are those of Philox-4x32 with ten rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011).
Its key is the seed; its counter holds the number of the point, the epoch and the shape. So a point does not
depend on the batch that it is in, and a run is resumed without a stored random state.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import warp as wp
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.geometry.scanning import CAMERA_DISTANCE, CAMERAS, first_seen
from pointproj.ops.bridge.warp_op import warp_op

OPTIONS = {"module": "unique", "module_options": {"enable_backward": False, "fuse_fp": False}}

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = wp.constant(wp.uint64(0xD2511F53)), wp.constant(wp.uint64(0xCD9E8D57))
INCREMENT_0, INCREMENT_1 = wp.constant(wp.uint32(0x9E3779B9)), wp.constant(wp.uint32(0xBB67AE85))
HALF = wp.constant(wp.uint64(32))
UNIT = wp.constant(wp.float64(2.0**-32))
# Bits of the counter's first word: points, queries and cameras get different random numbers.
FOR_QUERIES, FOR_CAMERAS = wp.constant(wp.uint32(1 << 31)), wp.constant(wp.uint32(1 << 30))
RAYS_FROM = wp.constant(CAMERAS)
FAR = wp.constant(wp.float64(CAMERA_DISTANCE))

Words = wp.types.vector(length=4, dtype=wp.uint32)


class Surfaces(NamedTuple):
    """The triangles of all shapes in order; kernels get them as :class:`SurfacesStruct`."""

    vertices: Float[Tensor, "V 3"]  # float64
    faces: Int[Tensor, "F 3"]  # int32, rows of vertices
    summed_areas: Float[Tensor, " F"]  # float64, cumulative within each shape
    first_face: Int[Tensor, " S"]  # int32
    last_face: Int[Tensor, " S"]  # int32, the last face with area


@wp.struct
class SurfacesStruct:
    """:class:`Surfaces` inside a kernel."""

    vertices: wp.array(dtype=wp.vec3d)
    faces: wp.array(dtype=wp.vec3i)
    summed_areas: wp.array(dtype=wp.float64)
    first_face: wp.array(dtype=wp.int32)
    last_face: wp.array(dtype=wp.int32)


@wp.func
def random_words(counter: Words, key_0: wp.uint32, key_1: wp.uint32) -> Words:
    """Return four random words for a counter and a key."""
    for _ in range(ROUNDS):
        product_0 = MULTIPLIER_0 * wp.uint64(counter[0])
        product_1 = MULTIPLIER_1 * wp.uint64(counter[2])
        counter = Words(
            wp.uint32(product_1 >> HALF) ^ counter[1] ^ key_0,
            wp.uint32(product_1),
            wp.uint32(product_0 >> HALF) ^ counter[3] ^ key_1,
            wp.uint32(product_0),
        )
        key_0 += INCREMENT_0
        key_1 += INCREMENT_1
    return counter


@wp.func
def words_of(number: wp.uint32, identity: wp.int64, epoch: wp.int64, seed: wp.int64) -> Words:
    """Return the random words of a point, a query or a camera."""
    shape = wp.uint64(identity)
    key = wp.uint64(seed)
    counter = Words(number, wp.uint32(epoch), wp.uint32(shape), wp.uint32(shape >> HALF))
    return random_words(counter, wp.uint32(key), wp.uint32(key >> HALF))


@wp.func
def fraction(word: wp.uint32) -> wp.float64:
    """Return a number in [0, 1)."""
    return wp.float64(word) * UNIT


@wp.func
def face_at(surfaces: SurfacesStruct, shape: int, where: wp.float64) -> int:
    """Return the first face whose summed area exceeds the share ``where`` of the shape's area."""
    low = surfaces.first_face[shape]
    high = surfaces.last_face[shape]
    sought = where * surfaces.summed_areas[high]
    while low < high:
        middle = low + (high - low) / 2
        if surfaces.summed_areas[middle] > sought:
            high = middle
        else:
            low = middle + 1
    return low


@wp.func
def camera_at(words: Words) -> wp.vec3f:
    """Return a random place of a camera, on a sphere around the query cube."""
    height = wp.float64(2.0) * fraction(words[0]) - wp.float64(1.0)
    angle = wp.float64(wp.TAU) * fraction(words[1])
    radius = wp.sqrt(wp.float64(1.0) - height * height)
    return wp.vec3f(FAR * wp.vec3d(radius * wp.cos(angle), radius * wp.sin(angle), height))


@wp.kernel(**OPTIONS)
def points_kernel(
    surfaces: SurfacesStruct,
    scanned: wp.array(dtype=wp.int64),
    drawn: wp.array2d(dtype=wp.int64),
    seed: wp.int64,
    points: wp.array2d(dtype=wp.vec3f),
    normals: wp.array2d(dtype=wp.vec3f),
    sensors: wp.array2d(dtype=wp.vec3f),
):
    """One thread a point; launched over (B, n)."""
    cloud, number = wp.tid()
    words = words_of(wp.uint32(number), drawn[cloud, 1], drawn[cloud, 2], seed)
    where = fraction(words[0]) + fraction(words[1]) * UNIT
    face = surfaces.faces[face_at(surfaces, wp.int32(drawn[cloud, 0]), where)]
    origin = surfaces.vertices[face[0]]
    first = surfaces.vertices[face[1]] - origin
    second = surfaces.vertices[face[2]] - origin
    across = wp.sqrt(fraction(words[2]))
    along = fraction(words[3])
    point = origin + (across * (wp.float64(1.0) - along)) * first + (across * along) * second
    points[cloud, number] = wp.vec3f(point)
    normals[cloud, number] = wp.vec3f(wp.normalize(wp.cross(first, second)))
    sensors[cloud, number] = wp.vec3f()
    if scanned:
        mesh = wp.uint64(scanned[wp.int32(drawn[cloud, 0])])
        camera = FOR_CAMERAS | wp.uint32(number % RAYS_FROM)
        place = camera_at(words_of(camera, drawn[cloud, 1], drawn[cloud, 2], seed))
        seen = first_seen(mesh, place, points[cloud, number], normals[cloud, number])
        points[cloud, number] = seen.point
        normals[cloud, number] = seen.normal
        sensors[cloud, number] = seen.sensor


@wp.kernel(**OPTIONS)
def queries_kernel(
    pool_points: wp.array2d(dtype=wp.vec3f),
    pool_values: wp.array2d(dtype=wp.float32),
    drawn: wp.array2d(dtype=wp.int64),
    seed: wp.int64,
    query_points: wp.array2d(dtype=wp.vec3f),
    target: wp.array2d(dtype=wp.float32),
):
    """One thread a query; launched over (B, q)."""
    cloud, number = wp.tid()
    words = words_of(FOR_QUERIES | wp.uint32(number), drawn[cloud, 1], drawn[cloud, 2], seed)
    shape = wp.int32(drawn[cloud, 0])
    size = wp.uint64(pool_values.shape[1])
    chosen = wp.int32((wp.uint64(words[0]) * size) >> HALF)
    query_points[cloud, number] = pool_points[shape, chosen]
    target[cloud, number] = pool_values[shape, chosen]


def _clouds(drawn: Tensor, count: int, *names: str) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    return {name: ((len(drawn), count, 3), torch.float32) for name in names}


@warp_op(
    "pointproj::draw_on_surfaces",
    outputs=lambda drawn, count, **others: _clouds(drawn, count, "points", "normals", "sensors"),
)
def draw_on_surfaces(
    launch,
    vertices: Tensor,
    faces: Tensor,
    summed_areas: Tensor,
    first_face: Tensor,
    last_face: Tensor,
    scanned: Tensor | None,
    drawn: Tensor,
    seed: int,
    count: int,
    *,
    points: Tensor,
    normals: Tensor,
    sensors: Tensor,
) -> None:
    """Draw points on shapes, uniformly by area; for a scan, take what a camera sees towards each point.

    Parameters
    ----------
    vertices, faces, summed_areas, first_face, last_face
        :class:`Surfaces`.
    scanned : (S,) int64 tensor, optional
        Ids of the shapes' ``warp.Mesh`` objects on the same device. With these, a cloud is a scan
        (:mod:`pointproj.geometry.scanning`).
    drawn : (B, 3) int64 tensor
        For each cloud: number of its shape, the shape's identity, epoch.
    count : int
        Points a cloud.

    Returns
    -------
    points, normals, sensors : (B, count, 3) float32 tensors
        Points; unit normals of their faces; unit vectors to the cameras, 0 without cameras.
    """
    surfaces = Surfaces(vertices, faces, summed_areas, first_face, last_face)
    launch(points_kernel, (len(drawn), count), surfaces, scanned, drawn, seed, points, normals, sensors)


@warp_op(
    "pointproj::draw_from_pools",
    outputs=lambda drawn, count, **others: {
        **_clouds(drawn, count, "query_points"),
        "target": ((len(drawn), count), torch.float32),
    },
)
def draw_from_pools(
    launch,
    points: Tensor,
    values: Tensor,
    drawn: Tensor,
    seed: int,
    count: int,
    *,
    query_points: Tensor,
    target: Tensor,
) -> None:
    """Draw query points and their targets uniformly from pools (S, P, 3) and (S, P).

    ``drawn``, ``seed`` and ``count`` are as in :func:`draw_on_surfaces`. The results are float32,
    (B, count, 3) and (B, count).
    """
    launch(queries_kernel, (len(drawn), count), points, values, drawn, seed, query_points, target)

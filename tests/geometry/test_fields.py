"""The interior against winding numbers and on surfaces that have none, and the fields made of it."""

from pathlib import Path

import numpy as np
import pytest
import trimesh

from pointproj.data.furniture import CLASSES, make_furniture
from pointproj.geometry.distances import unsigned_distance
from pointproj.geometry.fields import NoInterior, target_field
from pointproj.geometry.files import read_mesh
from pointproj.geometry.interior import directions, inside, inside_at, widened
from pointproj.geometry.meshes import Mesh, MeshError, normalize, query_grid
from pointproj.geometry.sampling import SurfaceSampler, pool_points

REAL = Path(__file__).parents[3] / "shared" / "modelnet10" / "ModelNet10"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the sample of real ModelNet files is not here")


def winding_number(mesh, points):
    """Sum of the signed solid angles of all triangles over 4 pi (Van Oosterom and Strackee 1983, eq. 8)."""
    total = []
    for some in np.array_split(points.astype(np.float64), len(points) // 50):
        a, b, c = (mesh.vertices[mesh.faces[:, k]].T[:, None] - some.T[:, :, None] for k in range(3))
        la, lb, lc = (np.sqrt((side * side).sum(0)) for side in (a, b, c))
        volume = sum(a[i] * (b[i - 2] * c[i - 1] - b[i - 1] * c[i - 2]) for i in range(3))
        scale = la * lb * lc + (a * b).sum(0) * lc + (b * c).sum(0) * la + (c * a).sum(0) * lb
        total.append(np.arctan2(volume, scale).sum(1) / (2 * np.pi))
    return np.concatenate(total)


def of(shape, name="shape"):
    return Mesh(shape.vertices, shape.faces, name)


def joined(*shapes):
    return of(trimesh.util.concatenate(shapes))


def box(extents, centre=(0, 0, 0)):
    shape = trimesh.creation.box(extents=extents)
    shape.apply_translation(centre)
    return shape


def table():
    legs = [box((0.1, 0.1, 1), (x, y, 0.5)) for x in (-0.9, 0.9) for y in (-0.4, 0.4)]
    return joined(box((2, 1, 0.1), (0, 0, 1)), *legs)


def crossed_boards(seed):
    generator = np.random.default_rng(seed)
    boards = []
    for _ in range(8):
        board = box(generator.uniform(0.05, 1, 3))
        rotation = trimesh.transformations.rotation_matrix(generator.uniform(0, 3), generator.normal(size=3))
        board.apply_transform(rotation)
        board.apply_translation(generator.uniform(-0.7, 0.7, 3))
        boards.append(board)
    return joined(*boards)


def sharp_wedge():
    """Two boards that meet at 10 degrees: outside narrows to nothing between them."""
    boards = []
    for angle in (5, -5):
        board = box((1, 0.6, 0.02), (0.5, 0, 0))
        board.apply_transform(trimesh.transformations.rotation_matrix(np.radians(angle) + 0.3, (0.1, 1, 0.2)))
        boards.append(board)
    return joined(*boards)


def sheet(*corners):
    """A rectangle of two triangles."""
    return trimesh.Trimesh(corners, [[0, 1, 2], [0, 2, 3]], process=False)


def chamber(gap):
    """An open box of side 1.8 without thickness, its lid ``gap`` above the walls."""
    h, top = 0.9, 0.9 + gap
    ring = [(-h, -h), (h, -h), (h, h), (-h, h)]
    walls = [
        sheet((*p, -h), (*q, -h), (*q, h), (*p, h)) for p, q in zip(ring, ring[1:] + ring[:1], strict=True)
    ]
    return joined(sheet(*((*p, -h) for p in ring)), sheet(*((*p, top) for p in ring)), *walls)


def open_tube():
    cylinder = trimesh.creation.cylinder(radius=0.5, height=2)
    return Mesh(cylinder.vertices, cylinder.faces[np.abs(cylinder.face_normals[:, 2]) < 0.5], "tube")


def doubled(mesh):
    return Mesh(mesh.vertices, np.concatenate([mesh.faces, mesh.faces[:, ::-1]]), mesh.name)


def half_flipped(mesh):
    faces = mesh.faces.copy()
    flipped = np.random.default_rng(5).random(len(faces)) < 0.5
    faces[flipped] = faces[flipped][:, ::-1]
    return Mesh(mesh.vertices, faces, mesh.name)


CLOSED = {
    "box": lambda: of(box((1, 0.7, 0.4))),
    "slab": lambda: of(box((1, 0.5, 0.08))),
    "sphere": lambda: of(trimesh.creation.icosphere(subdivisions=3)),
    "torus": lambda: of(trimesh.creation.torus(1, 0.2)),
    "pipe": lambda: of(trimesh.creation.annulus(r_min=0.45, r_max=0.5, height=1.0)),
    "table of overlapping boxes": table,
    "crossed boards": lambda: crossed_boards(1),
    "more crossed boards": lambda: crossed_boards(2),
    "sharp wedge": sharp_wedge,
    **{name: lambda name=name: make_furniture(name, 3) for name in CLASSES},
}


@pytest.mark.parametrize("make", CLOSED.values(), ids=CLOSED.keys())
def test_inside_of_watertight_meshes_is_that_of_the_winding_number(make):
    mesh = normalize(make())
    grid = query_grid(30)
    some = np.random.default_rng(0).choice(len(grid), 1000, replace=False)
    labels = inside(mesh, 30)
    assert labels.any()
    assert (labels[some] == (np.abs(winding_number(mesh, grid[some])) > 0.5)).mean() >= 0.995


@pytest.mark.parametrize("make", CLOSED.values(), ids=CLOSED.keys())
def test_orientation_and_copies_of_faces_change_no_label(make):
    mesh = normalize(make())
    labels = inside(mesh, 30)
    np.testing.assert_array_equal(inside(doubled(mesh), 30), labels)
    np.testing.assert_array_equal(inside(half_flipped(mesh), 30), labels)


@needs_real
@pytest.mark.parametrize("name", ["bed/train/bed_0519", "chair/train/chair_0897", "sofa/test/sofa_0690"])
def test_inside_of_watertight_real_meshes_is_that_of_the_winding_number(name):
    mesh = normalize(read_mesh(REAL / f"{name}.off"))
    grid = query_grid(30)
    some = np.random.default_rng(0).choice(len(grid), 1000, replace=False)
    assert (inside(mesh, 30)[some] == (np.abs(winding_number(mesh, grid[some])) > 0.5)).mean() >= 0.995


@needs_real
@pytest.mark.parametrize("name", CLASSES)
def test_orientation_and_copies_change_no_label_of_real_meshes(name):
    mesh = normalize(read_mesh(sorted((REAL / name / "train").glob("*.off"))[-1]))
    labels = inside(mesh, 30)
    assert (inside(doubled(mesh), 30) == labels).mean() >= 0.995
    assert (inside(half_flipped(mesh), 30) == labels).mean() >= 0.995


def test_inside_of_a_box_runs_z_fastest():
    labels = inside(normalize(of(box((1.8, 0.9, 0.3)))), 24)
    expected = (np.abs(query_grid(24)) < [0.9, 0.45, 0.15]).all(axis=1)
    np.testing.assert_array_equal(labels, expected)


def test_points_on_a_face_are_outside():
    """With 21 points a side the faces of a cube of side 1.8 hold grid points; those are not inside."""
    labels = inside(of(box((1.8, 1.8, 1.8))), 21)
    expected = (np.abs(query_grid(21)) < 0.85).all(axis=1)
    np.testing.assert_array_equal(labels, expected)


def test_the_face_between_two_touching_boxes_is_inside():
    mesh = joined(box((0.9, 1.8, 1.8), (-0.45, 0, 0)), box((0.9, 1.8, 1.8), (0.45, 0, 0)))
    np.testing.assert_array_equal(inside(mesh, 21), inside(of(box((1.8, 1.8, 1.8))), 21))


def test_a_cavity_is_inside_whichever_way_its_wall_faces():
    outer, cavity = box((1.8, 1.8, 1.8)), box((1, 1, 1))
    expected = inside(of(outer), 30)
    np.testing.assert_array_equal(inside(joined(outer, cavity), 30), expected)
    cavity.invert()
    np.testing.assert_array_equal(inside(joined(outer, cavity), 30), expected)


def test_inside_at_coarse_points_is_that_of_a_finer_grid():
    mesh = normalize(of(trimesh.creation.icosphere(subdivisions=3)))
    fine = inside(mesh, 101).reshape(101, 101, 101)
    for side in (2, 5, 51):
        step = 100 // (side - 1)
        np.testing.assert_array_equal(inside(mesh, side), fine[::step, ::step, ::step].reshape(-1))


SHEETS = {
    "one sheet": lambda: of(sheet((-0.9, -0.9, 0), (0.9, -0.9, 0), (0.9, 0.9, 0), (-0.9, 0.9, 0))),
    "a sheet at a slant": lambda: of(
        sheet((-0.9, -0.9, -0.7), (0.9, -0.9, 0.1), (0.9, 0.9, 0.7), (-0.9, 0.9, -0.1))
    ),
    "a box without its lid": lambda: Mesh(
        chamber(0).vertices, np.delete(chamber(0).faces, [2, 3], 0), "open"
    ),
    "a tube open at both ends": lambda: normalize(open_tube()),
}


@pytest.mark.parametrize("side", [21, 30])
@pytest.mark.parametrize("make", SHEETS.values(), ids=SHEETS.keys())
def test_open_surfaces_have_no_interior(make, side):
    mesh = make()
    assert not inside(mesh, side).any()
    assert not inside(doubled(mesh), side).any()
    assert not inside(half_flipped(mesh), side).any()


def torn(mesh, width, seed=0):
    """Every face with corners of its own, each moved a little, so that all edges are open."""
    corners = mesh.vertices[mesh.faces]
    corners = corners + np.random.default_rng(seed).normal(0, width, corners.shape)
    return Mesh(corners.reshape(-1, 3), np.arange(3 * len(corners)).reshape(-1, 3), mesh.name)


@pytest.mark.parametrize("name", ["box", "slab", "table of overlapping boxes", "crossed boards"])
def test_cracks_along_all_edges_change_no_label_off_the_surface(name):
    mesh = normalize(CLOSED[name]())
    grid = query_grid(30)
    clear = unsigned_distance(mesh, grid) > 3e-3
    labels = inside(mesh, 30)[clear]
    differ = inside(torn(mesh, 5e-4), 30)[clear] != labels
    assert differ.sum() <= 0.005 * labels.sum()


def test_a_slit_opens_a_box_as_far_as_one_sees_out_through_it():
    whole = inside(normalize(chamber(0.0)), 30)
    assert whole.sum() == 26**3
    for gap, least in ((0.005, 1.0), (0.012, 0.999), (0.02, 0.99), (0.05, 0.85)):
        slit = normalize(chamber(gap))
        labels = inside(slit, 30)
        assert labels.sum() >= least * whole.sum()
        np.testing.assert_array_equal(inside(doubled(slit), 30), labels)
    near_the_slit = np.array([[0, 0, 0.7]], np.float32)
    assert not inside_at(normalize(chamber(0.3)), near_the_slit).any()


def test_directions_are_spread_evenly_and_so_are_the_first():
    chosen = directions()
    assert len(np.unique(chosen, axis=0)) == len(chosen) == 256
    np.testing.assert_allclose(np.linalg.norm(chosen, axis=1), 1, atol=5e-4)
    assert np.abs(chosen).min() > 1e-3  # along no axis: faces along axes are never seen edge-on
    points = np.random.default_rng(0).normal(size=(20_000, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    for count, angle in ((256, 10), (64, 24)):  # nothing is far from all of them
        assert (points @ chosen[:count].T).max(axis=1).min() > np.cos(np.radians(angle))
        assert np.linalg.norm(chosen[:count].mean(axis=0)) < 0.03


def test_widened_faces_have_edges_farther_out():
    square = sheet((0, 0, 0.5), (1, 0, 0.5), (1, 1, 0.5), (0, 1, 0.5))
    first, _ = widened(square.vertices[square.faces])
    diagonal = 3e-3 * (1 + 2**0.5)
    expected = [[-diagonal, -3e-3, 0.5], [1.003, -3e-3, 0.5], [1.003, 1 + diagonal, 0.5]]
    np.testing.assert_allclose(first, expected, atol=1e-12)
    needle = np.array([[[0, 0, 0], [1, -1e-4, 0], [1, 1e-4, 0]]])
    moved = widened(needle) - needle
    np.testing.assert_allclose(moved[0, 0], [-0.012, 0, 0], atol=1e-9)
    assert moved[0, 1, 1] < -2.9e-3
    np.testing.assert_allclose(widened(needle[:, ::-1]), widened(needle)[:, ::-1], atol=1e-12)


def escapes(mesh, points):
    """Which directions meet no widened face, solving for the place on each in double precision."""
    a, b, c = np.moveaxis(widened(mesh.vertices[mesh.faces]), 1, 0)
    escaped = []
    for direction in directions():
        normal = np.cross(b - a, c - a)
        facing = normal @ direction
        with np.errstate(divide="ignore", invalid="ignore"):
            depth = ((a - points[:, None]) * normal).sum(-1) / facing
            met = points[:, None] + depth[..., None] * direction - a
            first = (np.cross(met, c - a) * normal).sum(-1) / (normal**2).sum(-1)
            second = (np.cross(b - a, met) * normal).sum(-1) / (normal**2).sum(-1)
            hit = (depth > 1e-6) & (first >= 0) & (second >= 0) & (first + second <= 1)
        escaped.append(~hit.any(axis=1))
    return np.array(escaped)


@pytest.mark.parametrize("name", ["pipe", "sharp wedge", "crossed boards", "more crossed boards"])
def test_labels_are_those_of_counted_directions(name):
    mesh = normalize(CLOSED[name]())
    generator = np.random.default_rng(1)
    points = generator.uniform(-0.9, 0.9, (200, 3)).astype(np.float32)
    escaped = escapes(mesh, points)
    first, every = escaped[:64].sum(0), escaped.sum(0)
    expected = (first == 0) | ((first <= 4) & (every <= 6))
    np.testing.assert_array_equal(inside_at(mesh, points), expected)
    assert (expected == (every <= 6)).mean() >= 0.99


def test_fields_of_a_box_are_the_known_ones():
    half = np.array([0.9, 0.45, 0.15])
    mesh = of(box(2 * half))
    beyond = np.abs(query_grid(16).astype(np.float64)) - half
    signed = np.linalg.norm(np.maximum(beyond, 0), axis=1) + np.minimum(beyond.max(axis=1), 0)
    udf, sdf, occupancy = (target_field(mesh, 16, kind) for kind in ("udf", "sdf", "occupancy"))
    for field in (udf, sdf, occupancy):
        assert (field.dtype, field.shape) == (np.float32, (16**3,))
    np.testing.assert_allclose(udf, np.abs(signed), atol=2e-7)
    np.testing.assert_allclose(sdf, signed, atol=2e-7)
    np.testing.assert_array_equal(occupancy, signed < 0)


def test_no_interior_is_an_error_only_where_one_is_needed():
    mesh = of(sheet((-0.9, -0.9, 0), (0.9, -0.9, 0), (0.9, 0.9, 0), (-0.9, 0.9, 0)), name="table_0007")
    grid = query_grid(10).astype(np.float64)
    beyond = np.maximum(np.abs(grid) - [0.9, 0.9, 0], 0)
    np.testing.assert_allclose(target_field(mesh, 10, "udf"), np.linalg.norm(beyond, axis=1), atol=2e-7)
    for kind in ("sdf", "occupancy"):
        with pytest.raises(NoInterior, match=r"table_0007: encloses no point .* only target=udf") as caught:
            target_field(mesh, 10, kind)
        assert isinstance(caught.value, MeshError)


def test_a_vertex_that_no_face_uses_changes_no_field():
    crate = of(box((1.8, 1.8, 1.2)))
    stray = normalize(Mesh([[1e300, 0, 0], *crate.vertices], crate.faces + 1, "stray"))
    np.testing.assert_array_equal(target_field(stray, 12, "sdf"), target_field(crate, 12, "sdf"))


def test_errors_say_what_was_expected():
    mesh = of(box((1, 1, 1)), name="crate")
    with pytest.raises(ValueError, match="expected a target field udf, sdf or occupancy, got 'psdf'"):
        target_field(mesh, 8, "psdf")
    with pytest.raises(ValueError, match=r"at least 2 points a side, got 1: raise data\.grid"):
        inside(mesh, 1)
    with pytest.raises(ValueError, match=r"crate: expected a normalised mesh .* up to 15: call"):
        inside(of(box((30, 1, 1)), name="crate"), 8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CLASSES)
def test_cuda_gives_the_fields_of_the_cpu(name):
    mesh = normalize(make_furniture(name, 3))
    np.testing.assert_array_equal(inside(mesh, 30, device="cuda"), inside(mesh, 30))
    np.testing.assert_array_equal(target_field(mesh, 30, "sdf", device="cuda"), target_field(mesh, 30, "sdf"))
    damaged = normalize(make_furniture(name, 4, varied=True, defects=True))
    points = pool_points(SurfaceSampler(damaged.vertices, damaged.faces), 30_000, 0)
    np.testing.assert_array_equal(inside_at(damaged, points, device="cuda"), inside_at(damaged, points))

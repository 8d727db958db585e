"""Clouds from files of any kind, and what is refused before any work starts."""

import numpy as np
import pytest
import trimesh

from pointproj.geometry.files import write_mesh
from pointproj.geometry.files.points import read_cloud
from pointproj.geometry.meshes import Mesh, MeshError

SHIFT, SCALE = np.array([100.0, -40.0, 7.0]), 25.0


@pytest.fixture(scope="module")
def box():
    made = trimesh.creation.box([1.0, 0.6, 2.0])
    return Mesh(made.vertices * SCALE + SHIFT, made.faces, "box")


def rows(points):
    return "".join(" ".join(map(repr, row)) + "\n" for row in np.asarray(points).tolist())


def saved(path, points):
    """Write points, or points with normals, in the kind that the suffix says."""
    if path.suffix == ".npy":
        np.save(path, points)
    elif path.suffix == ".npz":
        arrays = {"points": points[:, :3]} | ({"normals": points[:, 3:]} if points.shape[1] == 6 else {})
        np.savez(path, **arrays)
    elif path.suffix in (".xyz", ".txt"):
        path.write_text("# a scan\n\n" + rows(points))
    elif path.suffix == ".csv":
        names = ",".join(["x", "y", "z", "nx", "ny", "nz"][: points.shape[1]])
        path.write_text(f"{names}\n" + rows(points).replace(" ", ", "))
    elif path.suffix == ".obj":
        path.write_text("".join(f"v {row}" for row in rows(points).splitlines(keepends=True)))
    else:
        names = ["x", "y", "z", "nx", "ny", "nz"][: points.shape[1]]
        properties = "".join(f"property double {name}\n" for name in names)
        header = f"ply\nformat ascii 1.0\nelement vertex {len(points)}\n{properties}end_header\n"
        path.write_text(header + rows(points))
    return path


@pytest.mark.parametrize("suffix", [".off", ".ply", ".obj", ".stl"])
def test_meshes_are_sampled(box, tmp_path, suffix):
    path = tmp_path / f"box{suffix}"
    surface = trimesh.Trimesh(box.vertices, box.faces, process=False)
    path.write_bytes(
        surface.export(file_type=suffix[1:]).encode()
        if suffix in (".off", ".obj")
        else surface.export(file_type=suffix[1:])
    )
    cloud = read_cloud(path, 500)
    assert cloud.name == "box"
    assert cloud.points.shape == cloud.normals.shape == (500, 3)
    assert cloud.points.dtype == np.float32
    assert np.abs(cloud.points).max(axis=0) == pytest.approx([0.45, 0.27, 0.9], abs=0.02)
    on_face = (np.abs(np.abs(cloud.points) - [0.45, 0.27, 0.9]) < 1e-4).any(axis=1)
    assert on_face.all()


@pytest.mark.parametrize("suffix", [".xyz", ".txt", ".csv", ".npy", ".npz", ".ply", ".obj"])
def test_points_are_taken_as_they_are_and_moved_back(tmp_path, suffix):
    points = SHIFT + SCALE * np.random.default_rng(0).uniform(-1, 1, (200, 3))
    cloud = read_cloud(saved(tmp_path / f"scan{suffix}", points), 300)
    assert cloud.normals is None
    assert np.abs(cloud.points).max() == pytest.approx(0.9)
    back = cloud.placement.to_file(Mesh(cloud.points, np.empty((0, 3), int), "back")).vertices
    assert np.allclose(back, points, atol=1e-4)


@pytest.mark.parametrize("suffix", [".xyz", ".csv", ".npy", ".npz", ".ply"])
def test_normals_come_along_with_unit_length(tmp_path, suffix):
    directions = np.random.default_rng(0).standard_normal((50, 3))
    cloud = read_cloud(saved(tmp_path / f"scan{suffix}", np.hstack([directions, 3 * directions])), 50)
    unit = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    assert np.allclose(cloud.normals, unit, atol=1e-6)


@pytest.mark.parametrize("suffix", [".xyz", ".npy", ".ply"])
@pytest.mark.parametrize("each", [True, False])
def test_sensors_are_told_as_directions_and_thinned_with_their_points(tmp_path, suffix, each):
    generator = np.random.default_rng(0)
    points = SHIFT + SCALE * generator.uniform(-1, 1, (200, 3))
    sensors = SHIFT + 3 * SCALE * generator.standard_normal((200 if each else 1, 3))
    files = saved(tmp_path / "scan.npy", points), saved(tmp_path / f"sensors{suffix}", sensors)
    assert read_cloud(files[0], 200).sensors is None
    cloud = read_cloud(files[0], 50, sensors=files[1])
    assert (cloud.sensors.shape, cloud.sensors.dtype) == ((50, 3), np.float32)
    whole = read_cloud(files[0], 200)
    rows = np.abs(whole.points[None] - cloud.points[:, None]).sum(axis=2).argmin(axis=1)
    away = (np.broadcast_to(sensors, points.shape) - points)[rows]
    assert np.allclose(cloud.sensors, away / np.linalg.norm(away, axis=1, keepdims=True), atol=1e-5)


def test_a_sensor_that_is_not_known_has_no_direction(tmp_path):
    points = np.random.default_rng(0).uniform(-1, 1, (30, 3))
    sensors = np.zeros((30, 3)) + 5
    sensors[3], sensors[4, 1] = points[3], np.nan
    np.save(tmp_path / "sensors.npy", sensors)
    directions = read_cloud(
        saved(tmp_path / "scan.npy", points), 30, sensors=tmp_path / "sensors.npy"
    ).sensors
    lengths = np.linalg.norm(directions, axis=1)
    assert np.flatnonzero(lengths < 0.5).tolist() == [3, 4]
    assert not directions[3:5].any()
    assert np.allclose(np.delete(lengths, [3, 4]), 1)


def test_sensors_that_do_not_fit_are_refused(tmp_path, box):
    points = np.random.default_rng(0).uniform(-1, 1, (30, 3))
    cloud, few = saved(tmp_path / "scan.npy", points), saved(tmp_path / "few.npy", points[:7])
    with pytest.raises(MeshError, match=r"few\.npy: .*holds 7 points.*each of 30 points, or one of all"):
        read_cloud(cloud, 30, sensors=few)
    write_mesh(box, tmp_path / "box.ply")
    write_mesh(box, tmp_path / "box.off")
    with pytest.raises(MeshError, match="holds a mesh"):
        read_cloud(cloud, 30, sensors=tmp_path / "box.ply")
    with pytest.raises(MeshError, match=r"an unknown kind of points: expected \.ply"):
        read_cloud(cloud, 30, sensors=tmp_path / "box.off")
    with pytest.raises(MeshError, match="no sensor has seen"):
        read_cloud(tmp_path / "box.off", 30, sensors=few)


def test_binary_ply_of_points(tmp_path):
    points = np.random.default_rng(0).uniform(-1, 1, (60, 3))
    header = "ply\nformat binary_little_endian 1.0\nelement vertex 60\n"
    header += "property double x\nproperty double y\nproperty double z\nend_header\n"
    (tmp_path / "scan.ply").write_bytes(header.encode() + points.astype("<f8").tobytes())
    assert len(read_cloud(tmp_path / "scan.ply", 100).points) == 60


def test_large_clouds_are_thinned_the_same_way_each_time(tmp_path):
    points = np.random.default_rng(0).uniform(-1, 1, (500, 3))
    path = saved(tmp_path / "scan.npy", points)
    one, again = read_cloud(path, 100), read_cloud(path, 100)
    assert np.array_equal(one.points, again.points)
    assert len(np.unique(one.points, axis=0)) == 100


CORNERS = np.array(np.meshgrid([0.0, 1], [0, 1], [0, 1])).reshape(3, -1).T
LINE = np.linspace(0, 1, 9)[:, None] * [1.0, 2, 3]
PLANE = np.random.default_rng(0).uniform(0, 1, (30, 2)) @ [[1.0, 0, 1], [0, 1, 1]]


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        (np.empty((0, 3)), "is empty: expected points"),
        (np.ones((1, 3)), "no extent: all 1 points lie in one place"),
        (np.ones((40, 3)), "no extent: all 40 points"),
        (LINE, "lie on a line"),
        (PLANE, "lie in a plane"),
        (np.vstack([CORNERS, [[0, np.nan, 0]]]), "point 8 holds a NaN"),
        (np.vstack([CORNERS, [[np.inf, 0, 0]]]), "point 8 holds a NaN or an infinity"),
        (CORNERS[:, :2], r"must have shape \(n, 3\)"),
        (np.hstack([CORNERS, 0 * CORNERS]), "normals without a direction"),
        (CORNERS.astype(complex), "real numbers"),
        (CORNERS.astype(object), "real numbers .*Object arrays"),
    ],
)
def test_clouds_without_an_inside_are_refused(tmp_path, points, reason):
    with pytest.raises(MeshError, match=rf"scan\.npy: .*{reason}"):
        read_cloud(saved(tmp_path / "scan.npy", points), 100)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.doc", b"0 0 0", "is of an unknown kind: expected .off.*got '.doc'"),
        ("a.xyz", b"", "is empty"),
        ("a.xyz", b"0 0 0\n1 1\n", "must have x y z"),
        ("a.xyz", b"0 0 0\n1 1 one\n", "must have x y z.*'one'"),
        ("a.npy", b"no array", "not a complete NPY or NPZ file"),
        ("a.npy", b"", "not a complete NPY or NPZ file"),
        ("a.npz", b"no archive", "not a complete NPY or NPZ file"),
        ("a.csv", b"x,y,z\n0,0,0,0\n", "names 3 columns, but has 4"),
        ("a.off", b"OFF\n3 0 0\n0 0 0\n1 0 0\n0 1 0\n", "is empty"),
        ("a.ply", b"ply\nformat ascii 1.0\nelement vertex 2\nend_header\n", "must have the property x"),
    ],
)
def test_files_that_hold_no_cloud_are_named(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MeshError, match=reason):
        read_cloud(tmp_path / name, 100)
    with pytest.raises(MeshError, match="cannot be read"):
        read_cloud(tmp_path / f"missing-{name}".replace(".doc", ".off"), 100)


def test_a_flat_mesh_is_refused(tmp_path):
    sheet = Mesh(
        np.array([[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]]), np.array([[0, 1, 2], [1, 3, 2]]), "x"
    )
    write_mesh(sheet, tmp_path / "sheet.ply")
    with pytest.raises(MeshError, match="lie in a plane"):
        read_cloud(tmp_path / "sheet.ply", 100)

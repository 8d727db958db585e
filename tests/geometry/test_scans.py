"""Files of scanners: LAS, LAZ, PCD and E57, with exact coordinates of a survey."""

import numpy as np
import pytest

from pointproj.geometry.files.measured import read_sample
from pointproj.geometry.files.points import read_cloud
from pointproj.geometry.meshes import MeshError

pytest.importorskip("pye57", reason='needs the extra "scans"')

GENERATOR = np.random.default_rng(0)
BALL = GENERATOR.normal(size=(60, 3))
BALL /= np.linalg.norm(BALL, axis=1, keepdims=True)
CENTRE = np.array([500_000.0, 4_649_776, 100])
SCANS = (".las", ".laz", ".pcd", ".e57")
PLACES = np.round(2 * BALL + CENTRE, 3)


def las(path, places, withheld=(), intensity=None, **header):
    import laspy

    data = laspy.LasData(laspy.LasHeader(**{"version": "1.4", "point_format": 6, **header}))
    data.header.scales, data.header.offsets = [0.001] * 3, CENTRE
    data.x, data.y, data.z = places.T
    if intensity is not None:
        data.intensity = intensity
    data.withheld = np.isin(np.arange(len(places)), withheld)
    data.write(str(path))


def pcd(path, places, normals=None, encoding="binary", **more):
    import pypcd4

    columns = [*places.T, *([] if normals is None else normals.T)]
    names = [*["x", "y", "z", "normal_x", "normal_y", "normal_z"][: len(columns)], *more]
    columns += more.values()
    cloud = pypcd4.PointCloud.from_points(columns, names, [np.float64] * len(columns))
    cloud.save(path, encoding=pypcd4.Encoding(encoding))


def e57(path, *scans):
    import pye57

    file = pye57.E57(str(path), mode="w")
    for places, pose, *more in scans:
        columns = {f"cartesian{axis}": values for axis, values in zip("XYZ", places.T, strict=True)}
        file.write_scan_raw(columns | dict(*more), **pose)
    file.close()


def read_places(path, count=60):
    cloud = read_cloud(path, count)
    return cloud.points * cloud.placement.scale + cloud.placement.centre, cloud.normals


@pytest.mark.parametrize("suffix", [".las", ".laz"])
@pytest.mark.parametrize("header", [{}, {"version": "1.2", "point_format": 3}])
def test_las_files_are_exact_and_leave_withheld_points_out(tmp_path, suffix, header, caplog):
    path = tmp_path / f"a{suffix}"
    las(path, PLACES, withheld=[0, 7], **header)
    np.testing.assert_allclose(read_places(path)[0], np.delete(PLACES, [0, 7], axis=0), rtol=0, atol=1e-6)
    assert "2 points withheld are left out" in caplog.text
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(MeshError, match=r"not a complete LA[SZ] file|declares 60 points|cut short"):
        read_cloud(path, 60)


@pytest.mark.parametrize(
    "record", [(34735, np.array([1, 1, 0, 1, 1024, 0, 1, 2], "<u2").tobytes()), (2112, b"GEOGCS[")]
)
def test_las_files_in_degrees_are_refused(tmp_path, record):
    import laspy

    las(tmp_path / "a.las", PLACES)
    data = laspy.read(str(tmp_path / "a.las"))
    data.header.vlrs.append(laspy.VLR("LASF_Projection", record[0], record_data=record[1]))
    data.write(str(tmp_path / "a.las"))
    with pytest.raises(MeshError, match="has degrees for coordinates"):
        read_cloud(tmp_path / "a.las", 60)


@pytest.mark.parametrize("encoding", ["ascii", "binary", "binary_compressed"])
def test_pcd_files_in_each_encoding(tmp_path, encoding, caplog):
    path = tmp_path / "a.pcd"
    places = PLACES.copy()
    places[3] = np.nan
    pcd(path, places, BALL, encoding)
    found, normals = read_places(path)
    np.testing.assert_allclose(found, np.delete(PLACES, 3, axis=0), rtol=0, atol=1e-6)
    np.testing.assert_allclose(normals, np.delete(BALL, 3, axis=0), atol=1e-6)
    assert "1 points without a return (NaN) are left out" in caplog.text
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"\n", 0, -1)] if encoding == "ascii" else content[:-48])
    with pytest.raises(MeshError, match=r"not a complete PCD file|declares 60 points, but holds 59"):
        read_cloud(path, 60)


def test_pcd_files_with_odd_blanks(tmp_path):
    pcd(tmp_path / "a.pcd", PLACES, encoding="ascii")
    head, mark, body = (tmp_path / "a.pcd").read_bytes().partition(b"DATA ascii\n")
    (tmp_path / "a.pcd").write_bytes(head + mark + body.replace(b" ", b"\t ").replace(b"\n", b" \r\n"))
    np.testing.assert_allclose(read_places(tmp_path / "a.pcd")[0], PLACES, rtol=0, atol=1e-6)


@pytest.mark.parametrize("suffix", [".pcd", ".ply"])
def test_digits_of_text_are_kept_whatever_type_is_declared(tmp_path, suffix):
    rows = "".join(f"{x:.3f} {y:.3f} {z:.3f}\n" for x, y, z in PLACES)
    head = "# .PCD\nVERSION 0.7\n# DATA binary\nFIELDS x y z\nSIZE 4 4 4\nTYPE F F F\nCOUNT 1 1 1\n"
    head += "WIDTH 60\nHEIGHT 1\nVIEWPOINT 0 0 0 1 0 0 0\nPOINTS 60\nDATA ascii\n"
    if suffix == ".ply":
        head = "ply\nformat ascii 1.0\nelement vertex 60\n"
        head += "".join(f"property float {axis}\n" for axis in "xyz") + "end_header\n"
    (tmp_path / f"a{suffix}").write_text(head + rows)
    np.testing.assert_array_equal(read_sample(tmp_path / f"a{suffix}", []).points, PLACES)


def test_values_of_several_numbers_are_refused(tmp_path):
    import laspy

    data = laspy.LasData(laspy.LasHeader(version="1.4", point_format=6))
    data.add_extra_dim(laspy.ExtraBytesParams(name="speed", type="3f8"))
    data.write(str(tmp_path / "a.las"))
    with pytest.raises(MeshError, match="has 3 numbers a point in speed"):
        read_sample(tmp_path / "a.las", ["speed"])


def test_e57_poses_in_another_order_are_refused(tmp_path, monkeypatch):
    """Numbers of a pose have names; the library takes them as they stand."""
    from pye57 import libe57

    class Backwards(libe57.StructureNode):
        """A structure that gets its children w, x, y, z as x, y, z, w."""

        def set(self, name, node):
            if name == "w":
                self.first = node
                return
            super().set(name, node)
            if name == "z" and hasattr(self, "first"):
                super().set("w", self.first)

    monkeypatch.setattr(libe57, "StructureNode", Backwards)
    e57(tmp_path / "a.e57", (BALL, {"translation": CENTRE}))
    monkeypatch.undo()
    with pytest.raises(MeshError, match="has a rotation in the order xyzw: write it as wxyz"):
        read_cloud(tmp_path / "a.e57", 60)


def test_e57_scans_are_placed_by_their_poses(tmp_path):
    quarter = {"rotation": np.array([0.5**0.5, 0, 0, 0.5**0.5]), "translation": CENTRE}  # of a turn about z
    e57(tmp_path / "a.e57", (2 * BALL[:30], quarter), (2 * BALL[30:], {"translation": CENTRE}))
    turned = BALL[:30, [1, 0, 2]] * [-1, 1, 1]
    expected = 2 * np.concatenate([turned, BALL[30:]]) + CENTRE
    np.testing.assert_allclose(read_places(tmp_path / "a.e57")[0], expected, rtol=0, atol=1e-5)
    content = (tmp_path / "a.e57").read_bytes()
    for cut in (content[:30], content[:-100], b"", content[:2000] + bytes(60) + content[2060:]):
        (tmp_path / "a.e57").write_bytes(cut)
        with pytest.raises(MeshError, match="not a complete E57 file"):
            read_cloud(tmp_path / "a.e57", 60)


@pytest.mark.parametrize("suffix", [".las", ".laz", ".pcd", ".e57", ".pts", ".xyz", ".ply"])
def test_values_of_points(tmp_path, suffix):
    """Intensity is that of each point that is kept; positions stay exact."""
    path, intensity, kept = (
        tmp_path / f"a{suffix}",
        np.arange(60) * 7.0,
        np.arange(60) >= 3 * (suffix in SCANS),
    )
    rows = [f"{x:.3f} {y:.3f} {z:.3f} {value}" for (x, y, z), value in zip(PLACES, intensity, strict=True)]
    if suffix in (".las", ".laz"):
        las(path, PLACES, withheld=np.flatnonzero(~kept), intensity=intensity)
    elif suffix == ".pcd":
        pcd(path, np.where(kept[:, None], PLACES, np.nan), intensity=intensity)
    elif suffix == ".e57":
        state = {"intensity": intensity, "cartesianInvalidState": (~kept).astype(np.int8)}
        e57(path, (PLACES - CENTRE, {"translation": CENTRE}, state))
    elif suffix == ".ply":
        names = "".join(f"property double {name}\n" for name in ("x", "y", "z", "intensity"))
        rows.insert(0, f"ply\nformat ascii 1.0\nelement vertex 60\n{names}end_header")
    elif suffix == ".pts":
        rows = ["60", *(f"{row} 1 2 3" for row in rows)]
    else:
        rows.insert(0, "# x y z intensity")
    if suffix not in SCANS:
        path.write_text("\n".join(rows))
    sample = read_sample(path, ["intensity"])
    np.testing.assert_allclose(sample.points, PLACES[kept], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(sample.values["intensity"][:, 0], intensity[kept])
    with pytest.raises(MeshError, match=r"has no field heat: its points have .*intensity"):
        read_sample(path, ["heat"])


@pytest.mark.parametrize("suffix", [".las", ".pcd", ".e57"])
def test_without_its_package_a_scan_names_the_command(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / f"a{suffix}").write_bytes(b"")
    with pytest.raises(
        MeshError, match=rf"{suffix} needs \w+: pip install -c constraints.txt -e \"\.\[scans\]\""
    ):
        read_cloud(tmp_path / f"a{suffix}", 60)

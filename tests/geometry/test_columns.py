"""Text, arrays and scans: which columns are positions and normals, and what is refused by name."""

import numpy as np
import pytest

from pointproj.geometry.files.points import read_cloud
from pointproj.geometry.files.tables import parse
from pointproj.geometry.meshes import MeshError

GENERATOR = np.random.default_rng(0)
BALL = GENERATOR.normal(size=(40, 3))
BALL /= np.linalg.norm(BALL, axis=1, keepdims=True)
COLOURS = GENERATOR.integers(1, 256, (40, 3))
PLACES = 2 * BALL + [500_000, 4_649_776, 100]  # of a survey


def text(*columns, separator=" ", first="", decimal="."):
    rows = (separator.join(f"{x:.6f}".replace(".", decimal) for x in row) for row in np.hstack(columns))
    return f"{first}\n" + "\n".join(rows) + "\n"


INDEX = np.arange(40.0)[:, None]
WITH_NORMALS = {
    "names": text(PLACES, BALL, separator=",", first="x,y,z,nx,ny,nz"),
    "another order": text(INDEX, BALL, PLACES, separator=",", first='"id",NX,NY,NZ,X [m],Y [m],Z [m]'),
    "ParaView": text(
        PLACES,
        BALL,
        separator=",",
        first=",".join(f'"{n}:{i}"' for n in ("Points", "Normals") for i in range(3)),
    ),
    "units in quoted names": text(
        PLACES, BALL, separator=",", first='"X (m)","Y (m)","Z (m)","NX ","NY","NZ"'
    ),
    "quoted numbers": "x,y,z,nx,ny,nz\n"
    + "".join(",".join(f'"{x:.6f}"' for x in row) + "\n" for row in np.hstack([PLACES, BALL])),
    "names in a comment": text(COLOURS, PLACES, BALL, first="# r g b x y z normal_x normal_y normal_z"),
    "no names": text(PLACES, BALL),
    "colours before normals": text(PLACES, COLOURS, BALL),
    "intensity before normals": text(PLACES, INDEX, BALL),
    "semicolons and decimal commas": text(PLACES, BALL, separator=";", decimal=","),
    "tabs and decimal commas": text(PLACES, BALL, separator="\t", decimal=","),
}
WITHOUT_NORMALS = {
    "colours by name": text(PLACES, COLOURS, separator=",", first="//X,Y,Z,R,G,B"),
    "colours without names": text(PLACES, COLOURS),
    "colours from 0 to 1": text(PLACES, COLOURS / 255),
    "intensity without a name": text(PLACES, INDEX),
    "a column of words": "x,y,z,kind\n" + "".join(f"{x},{y},{z},tree\n" for x, y, z in PLACES.tolist()),
    "separators at the ends": text(PLACES, separator=", ").replace("\n", ",\n")[2:],
    "a count first": "40\n" + text(PLACES, 9 * INDEX, COLOURS).lstrip(),
    "two scans with counts": "30\n" + text(PLACES[:30]).strip() + "\n10\n" + text(PLACES[30:]).lstrip(),
    "form feeds in comments": "# a\fb\u2028c\n" + text(PLACES).lstrip(),
    "CR alone": text(PLACES).replace("\n", "\r"),
    "exponents of Fortran": "".join(f"{x:.13e} {y:.13e} {z:.13e}\n" for x, y, z in PLACES).replace("e", "D"),
}


@pytest.mark.parametrize("name", [*WITH_NORMALS, *WITHOUT_NORMALS])
@pytest.mark.parametrize("suffix", [".csv", ".pts"])
def test_columns_are_told_by_names_or_values(tmp_path, name, suffix):
    path = tmp_path / f"cloud{suffix}"
    path.write_text((WITH_NORMALS | WITHOUT_NORMALS)[name], newline="", encoding="utf-8")
    cloud = read_cloud(path, 40)
    places = cloud.points * cloud.placement.scale + cloud.placement.centre
    np.testing.assert_allclose(places, PLACES, rtol=0, atol=1e-5)
    if name in WITHOUT_NORMALS:
        assert cloud.normals is None
    else:
        np.testing.assert_allclose(cloud.normals, BALL, atol=1e-5)


UNCLEAR = {
    "no x": (text(INDEX, BALL[:, :2], separator=",", first="id,x,y"), "x, y, z once each, got id, x, y"),
    "degrees": (
        text(BALL, separator=",", first="lon,lat,h"),
        "has the columns lon, lat, h: expected x, y, z",
    ),
    "more names in a comment than columns": (
        text(INDEX, BALL, first="# id x y z label"),
        "5 names in a comment, 'id, x, y, z, label', and 4 columns",
    ),
    "x twice": (text(BALL, INDEX, separator=",", first="x,y,z,X"), "once each"),
    "half a normal": (text(BALL, INDEX, first="x y z nx"), "columns nx, ny, nz once each"),
    "an empty field": (
        text(BALL, INDEX, separator=",").replace(".", ",", 1),
        "row 2 has 4 columns, the first 5",
    ),
    "commas and blanks": (text(BALL, decimal=","), "decimal commas"),
    "two kinds of normals": (text(BALL, BALL, BALL), "normals in several columns"),
    "five columns": (text(BALL, COLOURS[:, :2]), "first line of names"),
    "fewer than counted": ("41\n" + text(BALL).lstrip(), "declares 41 points, but 40 lines follow"),
    "atoms": ("2\nwater\nH 0 0 0\nO 1 1 1\n", "has the columns water"),
}


def test_decimal_commas_after_a_row_of_whole_numbers():
    assert parse(b"0;0;0\n1,5;2;3\n").vertices.tolist() == [[0, 0, 0], [1.5, 2, 3]]


@pytest.mark.parametrize("name", UNCLEAR)
def test_columns_that_are_not_clear_are_refused(tmp_path, name):
    content, reason = UNCLEAR[name]
    (tmp_path / "cloud.xyz").write_text(content)
    with pytest.raises(MeshError, match=reason):
        read_cloud(tmp_path / "cloud.xyz", 40)


def test_what_is_left_out_is_said(tmp_path, caplog):
    (tmp_path / "cloud.txt").write_text(text(PLACES, INDEX))
    read_cloud(tmp_path / "cloud.txt", 40)
    assert "cloud.txt: column 4 is without a name and left out" in caplog.text


def test_arrays_with_names_and_meshes_in_archives(tmp_path):
    named = np.zeros(40, [("i", "u2"), *((axis, "f8") for axis in "xyz")])
    for axis, values in zip("xyz", PLACES.T, strict=True):
        named[axis] = values
    np.save(tmp_path / "a.npy", named)
    assert read_cloud(tmp_path / "a.npy", 40).placement.centre == pytest.approx(
        (PLACES.min(axis=0) + PLACES.max(axis=0)) / 2, abs=1e-9
    )
    np.savez(tmp_path / "a.npz", points=BALL, faces=COLOURS)
    with pytest.raises(MeshError, match="holds faces"):
        read_cloud(tmp_path / "a.npz", 40)
    np.savez(tmp_path / "a.npz", normals=BALL)
    with pytest.raises(MeshError, match="must hold the array points"):
        read_cloud(tmp_path / "a.npz", 40)

"""Predicted values: the same from a run's own measures, from its files, and for every kind of file."""

import numpy as np
import pytest

from pointproj.data.errors import DataError
from pointproj.data.fields.dataset import prepare_fields
from pointproj.geometry.files import write_mesh
from pointproj.geometry.files.measured import read_geometry
from pointproj.geometry.files.points import read_cloud
from pointproj.geometry.meshes import Mesh
from pointproj.inference.evaluate_fields import evaluate_fields
from pointproj.inference.export import ExportError, export
from pointproj.inference.field_model import FieldModel
from pointproj.inference.hub import write_folder
from pointproj.inference.predict import main
from pointproj.inference.trained_model import load_trained
from pointproj.training import checkpoint
from pointproj.training.field_measures import MEAN, NEAREST
from pointproj.training.networks import build_model
from tests.configs import config_of

pv = pytest.importorskip("pyvista")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with random weights, and its data."""
    folder = tmp_path_factory.mktemp("fields")
    config = config_of(
        "experiment=flow", "data.limit=2", f"data.root={folder}/flow", f"data.cache={folder}/cache"
    )
    data = prepare_fields(config)
    model = build_model(config, "torch", data.statistics)
    state = {"model": model.state_dict(), "statistics": data.statistics.as_mapping()}
    checkpoint.save(folder / "best.pt", state, config)
    return folder


def _predicted(run, source, out, *more):
    main([str(run), str(source), "--out", str(out), *more])
    return pv.read(out)


def test_own_points_of_a_sample_get_the_values_of_the_network(run, tmp_path):
    source = run / "flow/test/body_0001.npz"
    result = _predicted(run, source, tmp_path / "result.vtp")
    sample, model = read_geometry(source, "points"), FieldModel.load(run, "cpu", "torch")
    rows = [line.split(",") for line in (run / "flow/parameters.csv").read_text().splitlines()]
    stream = next(
        dict(zip(rows[0][1:], map(float, row[1:]), strict=True)) for row in rows if row[0] == "test/body_0001"
    )
    values = model(sample, stream)["pressure_coefficient"][:, 0]
    np.testing.assert_allclose(result["pressure_coefficient_predicted"], values, atol=1e-4)
    assert len(values) == 2048
    assert result.n_cells == 4092
    np.testing.assert_array_equal(result.points, sample.points)


@pytest.mark.parametrize("suffix", [".stl", ".obj", ".ply", ".vtp"])
def test_every_kind_of_surface(run, tmp_path, suffix):
    sphere = pv.Icosphere(radius=0.6, nsub=4)  # 2,562 points are more than are evaluated at once
    source = tmp_path / f"ball{suffix}"
    if suffix == ".vtp":
        sphere.save(source)
    else:
        write_mesh(Mesh(sphere.points, sphere.regular_faces, "ball"), source)
    stream = ["--parameters", "stream_x=1", "stream_y=0", "stream_z=0"]
    result = _predicted(run, source, tmp_path / "result.vtp", *stream)
    assert result.n_cells == sphere.n_cells
    assert np.isfinite(result["pressure_coefficient_predicted"]).all()


def test_what_is_missing_is_named(run, tmp_path):
    np.savez(tmp_path / "cloud.npz", points=np.random.default_rng(0).random((300, 3)))
    with pytest.raises(DataError, match="parameters stream_x, stream_y, stream_z"):
        main([str(run), str(tmp_path / "cloud.npz"), "--out", str(tmp_path)])
    stream = ["--parameters", "stream_x=1", "stream_y=0", "stream_z=0"]
    with pytest.raises(DataError, match="trained with normals"):
        main([str(run), str(tmp_path / "cloud.npz"), "--out", str(tmp_path), *stream])
    for words, reason in {
        "stream_x=nan": "each name once, and finite",
        "stream_x=1 stream_x=2": "each name once",
        "speed=1": "speed: the parameters of the network are stream_x, stream_y, stream_z",
    }.items():
        with pytest.raises(DataError, match=reason):
            main([str(run), str(tmp_path / "cloud.npz"), "--parameters", *words.split()])
    with pytest.raises(DataError, match=r"absent\.vtp: no such file"):
        main([str(run), str(tmp_path / "absent.vtp"), "--out", str(tmp_path)])
    with pytest.raises(DataError, match=r"several files are called body\.vtp"):
        main([str(run), "a/body.vtp", "b/body.vtp", "--out", str(tmp_path)])
    np.savez(tmp_path / "result.npz", points=np.eye(3))
    with pytest.raises(DataError, match=r"result\.npz is an input file, which stays"):
        main([str(run), str(tmp_path / "result.npz"), "--out", str(tmp_path / "result.npz")])
    with pytest.raises(DataError, match=r"a VTU file may hold a volume, so write .*result\.vtu"):
        main([str(run), str(tmp_path / "a.vtu"), "--out", str(tmp_path / "result.vtp")])
    with pytest.raises(DataError, match=r"leave --points grid out, and end --out with \.vtp"):
        main([str(run), str(tmp_path / "cloud.npz"), "--points", "grid"])
    with pytest.raises(ExportError, match=r"target=field cannot be exported.*--hub FOLDER"):
        export(run, tmp_path, device="cpu")
    write_folder(run, tmp_path / "hub")
    assert "features=features, query_features=query_features)" in (tmp_path / "hub/README.md").read_text()


@pytest.mark.parametrize("target", ["udf", "sdf"])
def test_distances_in_the_unit_of_the_file(tmp_path, target):
    config = config_of(f"target={target}", "data.points=256", "projector.normals=false")
    checkpoint.save(tmp_path / "best.pt", {"model": build_model(config, "torch").state_dict()}, config)
    sphere = pv.Icosphere(radius=50.0, center=(100.0, 0, 0), nsub=3)
    source = tmp_path / "ball.stl"
    write_mesh(Mesh(sphere.points, sphere.regular_faces, "ball"), source)
    grid = _predicted(tmp_path, source, tmp_path / "result.vti", "--side", "9")
    assert grid.dimensions == (9, 9, 9)
    np.testing.assert_allclose(np.mean(np.reshape(grid.bounds, (3, 2)), axis=1), [100, 0, 0], atol=1e-3)
    true = np.abs(np.linalg.norm(grid.points - [100.0, 0, 0], axis=1) - 50)
    assert np.abs(grid[target] - true).mean() < 3  # a new network predicts the soft distance
    own = _predicted(tmp_path, source, tmp_path / "result.vtp")
    assert (own.n_points, own.n_cells) == (3 * sphere.n_cells, sphere.n_cells)
    model, cloud = load_trained(tmp_path, "cpu", targets=[target]), read_cloud(source, 256)
    values = model.field(cloud.points)(cloud.placement.to_cube(own.points).astype(np.float32))
    np.testing.assert_allclose(own[f"{target}_predicted"], values * cloud.placement.scale, atol=1e-3)
    for name, data in {"ball.vtp": sphere, "ball.vtu": sphere.cast_to_unstructured_grid()}.items():
        data.save(tmp_path / name)
        own = _predicted(tmp_path, tmp_path / name, tmp_path / f"result{name[-4:]}")
        values = model.field(cloud.points)(cloud.placement.to_cube(own.points).astype(np.float32))
        np.testing.assert_allclose(own[f"{target}_predicted"], values * cloud.placement.scale, atol=1e-2)


def test_fields_of_a_volume_on_a_grid(tmp_path):
    for number, points in enumerate(np.random.default_rng(0).uniform(3, 5, (3, 40, 3))):
        np.savez(tmp_path / f"{number}.npz", points=points, wind=points * [1, 2, 3], heat=points[:, 0])
    where = [f"data.root={tmp_path}", f"data.cache={tmp_path}/cache", "data.fields=[wind,heat]"]
    config = config_of("data=fields", "target=field", "data.points=20", "data.test=0.3", *where)
    statistics = prepare_fields(config).statistics
    state = {"model": build_model(config, "torch", statistics).state_dict()}
    checkpoint.save(tmp_path / "best.pt", {**state, "statistics": statistics.as_mapping()}, config)
    source = tmp_path / "0.npz"
    grid = _predicted(tmp_path, source, tmp_path / "result.vti", "--side", "5")
    model, (centre, scale) = FieldModel.load(tmp_path, "cpu", "torch"), statistics.box
    np.testing.assert_allclose(grid.bounds, np.add.outer(centre, [-scale, scale]).ravel(), rtol=1e-6)
    values = model(read_geometry(source, "points"), at=np.asarray(grid.points, dtype=np.float64))
    np.testing.assert_allclose(grid["wind"], values["wind"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grid["heat"], values["heat"][:, 0], rtol=1e-4, atol=1e-5)


def test_evaluation_writes_a_table_and_a_page(run, tmp_path):
    means = evaluate_fields(run, tmp_path, "cpu", limit=1)
    rows = (tmp_path / "results.csv").read_text().splitlines()
    assert [row.split(",")[1] for row in rows[1:]] == [*means] == ["network", MEAN, NEAREST]
    assert float(rows[2].split(",")[2]) == pytest.approx(means[MEAN]["relative_l2"], rel=1e-5)
    page = (tmp_path / "index.html").read_text()
    assert all(word in page for word in ("pressure coefficient relative l2", "body_0001", MEAN))
    assert len([*tmp_path.rglob("*.glb")]) == 3

"""From a checkpoint to reconstructions: the two command lines, what they leave, and what they refuse."""

import contextlib
import csv
import functools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh

from pointproj.__main__ import main
from pointproj.data.furniture import write_furniture
from pointproj.geometry import baselines, well_posed
from pointproj.geometry.baselines import flooded_distance
from pointproj.geometry.files import read_mesh, write_mesh
from pointproj.geometry.grids import dense_values
from pointproj.geometry.metrics import truth_of
from pointproj.inference import evaluate
from pointproj.inference.arguments import PACKAGED, WEIGHTS
from pointproj.inference.evaluate import _chosen_samplings
from pointproj.inference.trained_model import load_trained
from pointproj.training import checkpoint
from pointproj.training.networks import build_model
from tests.configs import config_of


def write_checkpoint(path, *overrides, shift=-0.15):
    """A checkpoint of a model that is not trained: distances to the cloud, off by ``shift``."""
    config = config_of("experiment=smoke", *overrides)
    model = build_model(config, "torch")
    with torch.no_grad():
        model.query_mlp[-1].bias[-1] = shift
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(path, {"model": model.state_dict()}, config)
    return path


@pytest.fixture(scope="module")
def furniture(tmp_path_factory):
    root = tmp_path_factory.mktemp("furniture")
    write_furniture(root, ["chair", "table"], train=0, test=1)
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("run") / "best.pt", "target=sdf")


class QuickJob(evaluate._Job):
    """With coarser floods and fewer samples, in a tenth of the time, also in a process of its own."""

    def __call__(self, file):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(well_posed, "FLOOD_SIDES", (20, 40))
            patch.setattr(baselines, "FLOOD_SIDE", 32)
            patch.setattr(baselines, "flooded_distance", functools.partial(flooded_distance, side=32))
            patch.setattr(evaluate, "truth_of", functools.partial(truth_of, samples=5000))
            return super().__call__(file)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(evaluate, "_Job", QuickJob)


def call(command, *arguments):
    main([command, *map(str, arguments)])


def test_evaluate_leaves_table_page_pictures_and_meshes(trained, furniture, tmp_path, caplog, quick):
    out = tmp_path / "out"
    with caplog.at_level("INFO"):
        arguments = ("--meshes", furniture, "--side", 24, "--baselines", "flood", "--out", out)
        arguments += ("--samples", "even", "scan")
        call("evaluate", trained.parent, *arguments)
    with (out / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["mesh"], row["samples"], row["points"], row["method"]) for row in rows] == [
        (mesh, samples, points, method)
        for mesh in ("chair_5001", "table_5001")
        for samples, points in (("even", "256"), ("scan", "3000"))
        for method in ("network", "flood")
    ]
    for row in rows:
        assert 0 < float(row["iou"]) < 1
        assert 0 <= float(row["f_score"]) <= 1
        assert row["side"] == "24"
        assert float(row["label_agreement"]) == 1
    assert "IoU, grid" in caplog.text
    with (out / "summary.csv").open(newline="") as file:
        means = list(csv.DictReader(file))
    assert len(means) == (2 + 2) * 2 * 2  # classes, well-posed and all meshes; samples; methods
    last = [row for row in means if (row["class"], row["samples"], row["method"]) == ("all", "scan", "flood")]
    of_both = [float(row["iou"]) for row in rows if (row["samples"], row["method"]) == ("scan", "flood")]
    assert float(last[0]["iou"]) == pytest.approx(np.mean(of_both), rel=1e-4)
    assert (last[0]["meshes"], last[0]["well_posed"]) == ("2", "2")
    lines = (out / "summary.md").read_text().splitlines()
    assert lines[0].startswith("| class | samples | method | meshes | well posed | IoU, grid |")
    assert len([line for line in lines if line.startswith("|")]) == 2 + len(means)
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    page = (out / "index.html").read_text()
    judged = [row for row in rows if (row["samples"], row["method"]) == ("even", "network")]
    worst = min(judged, key=lambda row: float(row["iou"]))
    assert page.index("<h2>") == page.index(f"<h2>{worst['mesh']}</h2>")
    for name in ("chair_5001", "table_5001"):
        views = {file.name for file in (out / "views" / name).iterdir()}
        assert views == {f"{view}.glb" for view in ("cloud", "network", "flood", "label", "file")}
    for row in rows:
        assert (out / "pictures" / f"{row['mesh']}.png").read_bytes()[1:4] == b"PNG"
        name = f"{row['mesh']}-{row['samples']}-{row['method']}"
        ply, off = (out / "meshes" / f"{name}{suffix}" for suffix in (".ply", ".off"))
        one, other = read_mesh(ply), read_mesh(off)
        assert np.array_equal(one.vertices, other.vertices)
        assert np.array_equal(one.faces, other.faces)


def test_meshes_evaluated_side_by_side_have_the_results_of_one_after_the_other(
    trained, furniture, tmp_path, monkeypatch, quick
):
    monkeypatch.setattr(evaluate, "FEWEST_MESHES", 2)
    rows = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        arguments = ("--side", 8, "--samples", "area", "--points", 60, "--baselines", "--out", out)
        call("evaluate", trained, "--meshes", furniture, "--workers", workers, *arguments)
        with (out / "results.csv").open(newline="") as file:
            rows.append([{**row, "seconds": None} for row in csv.DictReader(file)])
    assert [row["mesh"] for row in rows[0]] == ["chair_5001", "table_5001"]
    assert rows[0] == rows[1]


def test_an_interruption_leaves_a_page_of_the_meshes_so_far(trained, furniture, tmp_path, monkeypatch):
    class Interrupted(QuickJob):
        def __call__(self, file):
            if file.class_name == "table":
                raise KeyboardInterrupt
            return super().__call__(file)

    monkeypatch.setattr(evaluate, "_Job", Interrupted)
    arguments = ("--meshes", furniture, "--side", 8, "--samples", "area", "--baselines", "--workers", 1)
    with pytest.raises(SystemExit, match="130"):
        call("evaluate", trained, *arguments, "--out", tmp_path)
    assert "chair_5001" in (tmp_path / "index.html").read_text()
    assert "chair" in (tmp_path / "summary.csv").read_text()


def test_predict_puts_the_solid_where_the_file_has_it(trained, furniture, tmp_path, capsys):
    source = furniture / "chair" / "test" / "chair_5001.off"
    call("predict", trained, source, "--out", tmp_path, "--side", 24)
    said, *files = capsys.readouterr().out.splitlines()
    files = [*map(Path, files)]
    assert [file.name for file in files] == [
        f"chair_5001-reconstruction{s}" for s in (".ply", ".off", ".png")
    ]
    made, true = read_mesh(files[0]), read_mesh(source)
    scale = np.ptp(true.vertices, axis=0).max() / 1.8
    assert np.allclose(made.vertices.min(axis=0), true.vertices.min(axis=0), atol=0.25 * scale)
    assert np.allclose(made.vertices.max(axis=0), true.vertices.max(axis=0), atol=0.25 * scale)
    a, b, c = np.moveaxis(made.vertices[made.faces], 1, 0)
    volume = (np.cross(a, b) * c).sum() / 6
    facts = f"{len(made.vertices):,} vertices, {len(made.faces):,} faces, volume {volume:.4g}, watertight, "
    assert said.startswith(f"{source}: 256 points, grid 24^3: {facts}")
    assert said.endswith(" s")


def test_without_a_checkpoint_the_weights_of_the_package_are_taken(furniture, tmp_path, capsys):
    chair = furniture / "chair" / "test" / "chair_5001.off"
    call("predict", "--weights", PACKAGED, chair, "--out", tmp_path / "solid.ply", "--side", 48)
    said, facts, *_ = capsys.readouterr().out.splitlines()
    assert "weights of the package, furniture: trained on data that this project generates" in said
    assert f"Apache-2.0 ({WEIGHTS / PACKAGED / 'README.md'})" in said
    assert re.search(r", watertight, \d pieces?, ", facts)
    made, true = (trimesh.load_mesh(path).volume for path in (tmp_path / "solid.ply", chair))
    assert made == pytest.approx(true, rel=0.3)
    assert "Licence" in (WEIGHTS / PACKAGED / "README.md").read_text()
    wrong = {
        "no FILE to reconstruct": (tmp_path,),
        "expected one of them": (tmp_path, chair, "weights=furniture"),
    }
    for words, arguments in wrong.items():
        with pytest.raises(SystemExit, match="2"):
            call("predict", *arguments)
        assert words in capsys.readouterr().err


def test_the_protocol_of_the_literature_measures_scans_of_watertight_meshes(furniture, tmp_path):
    pytest.importorskip("pymeshlab", reason='needs the extra "baselines"', exc_type=ImportError)
    arguments = ("--meshes", furniture, "--limit", 1, "--side", 16, "--baselines", "--out", tmp_path)
    call("evaluate", *arguments, "--protocol", "dsr")
    with (tmp_path / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["samples"] for row in rows} in ({"scan"}, {"scan", "sensors"})  # as the weights can read
    assert {(row["points"], row["protocol"]) for row in rows} == {("3000", "dsr")}
    assert all(float(row["iou"]) > 0.3 for row in rows)


def test_predict_takes_several_files_and_goes_on_after_one_that_it_cannot_use(
    trained, furniture, tmp_path, capsys, caplog
):
    chair, table = (furniture / name / "test" / f"{name}_5001.off" for name in ("chair", "table"))
    broken = tmp_path / "broken.off"
    broken.write_text("OFF\n")
    with pytest.raises(SystemExit, match="1 of 3 files could not be reconstructed"):
        call("predict", trained, chair, broken, table, "--out", tmp_path / "out", "--side", 16)
    assert "MeshError: " in caplog.text
    assert len(list((tmp_path / "out").iterdir())) == 6
    write_mesh(read_mesh(chair), tmp_path / "chair_5001.stl")
    call("predict", trained, chair, tmp_path / "chair_5001.stl", "--out", tmp_path / "two", "--side", 16)
    names = {file.name for file in (tmp_path / "two").glob("*.ply")}
    assert names == {f"chair_5001{suffix}-reconstruction.ply" for suffix in (".off", ".stl")}
    for wrong in ((chair, chair), (chair, table, "--out", tmp_path / "one.stl"), (chair, "--out", chair)):
        with pytest.raises(
            SystemExit, match=r"called chair_5001\.off|stl is one file for 2|is an input file"
        ):
            call("predict", trained, *wrong)


@pytest.mark.parametrize("suffix", [".ply", ".off", ".obj", ".stl", ".glb"])
def test_predict_writes_the_kind_of_file_that_out_names(trained, furniture, tmp_path, suffix, capsys):
    chair = furniture / "chair" / "test" / "chair_5001.off"
    call("predict", trained, chair, "--out", tmp_path / f"solid{suffix}", "--side", 16)
    assert {path.name for path in tmp_path.iterdir()} == {f"solid{suffix}", "solid.png"}
    assert len(read_mesh(tmp_path / f"solid{suffix}").faces) > 100
    assert ", watertight, " in capsys.readouterr().out
    for wrong in ("solid.npy", "solid.stp"):
        with pytest.raises(SystemExit, match=r"expected a folder, or a file of \.off"):
            call("predict", trained, chair, "--out", tmp_path / wrong)


def test_predict_warns_of_a_stray_point(tmp_path, caplog):
    path = write_checkpoint(tmp_path / "best.pt", "target=sdf", "projector.normals=false")
    sphere = np.random.default_rng(0).standard_normal((300, 3))
    sphere /= np.linalg.norm(sphere, axis=1, keepdims=True)
    for stray, warned in (((1, 0, 0), False), ((1000, 0, 0), True)):
        np.save(tmp_path / "scan.npy", np.vstack([sphere, stray]))
        caplog.clear()
        with contextlib.suppress(SystemExit):  # the sphere beside the stray may be too small to be found
            call("predict", path, tmp_path / "scan.npy", "--out", tmp_path, "--side", 16)
        words = "farthest is (1000, 0, 0). Remove the strays (1)"
        assert any(words in text for text in caplog.messages) == warned


def test_sensors_change_what_a_network_makes_of_a_scan(furniture, tmp_path, trained):
    settings = "target=occupancy", "projector=visibility", "data.sampling=sensors"
    path = write_checkpoint(tmp_path / "run" / "best.pt", *settings, shift=0.4)
    model = load_trained(path, "cpu")
    assert model.config.projector.sensors
    generator = np.random.default_rng(0)
    points = generator.uniform(-0.8, 0.8, (256, 3)).astype(np.float32)
    np.save(tmp_path / "scan.npy", points)
    np.save(tmp_path / "sensors.npy", np.array([[0.0, 0, 3]]))
    queries = generator.uniform(-1, 1, (50, 3)).astype(np.float32)
    unknown = model.field(points)(queries)
    assert np.array_equal(model.field(points, None, np.zeros_like(points))(queries), unknown)
    towards = np.array([0, 0, 3], np.float32) - points
    known = model.field(points, None, towards / np.linalg.norm(towards, axis=1, keepdims=True))(queries)
    assert np.abs(known - unknown).max() > 1e-3
    told = tmp_path / "scan.npy", "--sensors", tmp_path / "sensors.npy"
    call("predict", path, *told, "--out", tmp_path, "--side", 16)
    assert (tmp_path / "scan-reconstruction.off").exists()
    with pytest.raises(SystemExit, match="trained without sensors"):
        call("predict", trained, *told)
    assert [*_chosen_samplings(None, 256, model)] == ["even", "area", "scan", "sensors"]
    without = load_trained(trained, "cpu")
    assert [*_chosen_samplings(None, 256, without)] == ["even", "area", "scan"]
    with pytest.raises(SystemExit, match="trained without sensors"):
        call("evaluate", trained, "--meshes", furniture, "--samples", "sensors")


def test_dense_queries_do_not_depend_on_the_parts(trained):
    model = load_trained(trained, "cpu")
    generator = np.random.default_rng(0)
    points = generator.uniform(-0.8, 0.8, (256, 3)).astype(np.float32)
    field = model.field(points, np.ones_like(points) / 3**0.5)
    assert np.allclose(dense_values(field, 12), dense_values(field, 12, chunk=100), atol=1e-5)


def test_refusals_name_what_to_do_and_write_nothing(trained, furniture, tmp_path):
    chair = furniture / "chair" / "test" / "chair_5001.off"
    scan, plane, out = tmp_path / "scan.xyz", tmp_path / "plane.xyz", tmp_path / "out"
    scan.write_text("".join(f"{x} {y} {z}\n" for x, y, z in np.random.default_rng(0).random((300, 3))))
    plane.write_text("0 0 0\n1 0 0\n0 1 0\n1 1 0\n")
    few, diverged = tmp_path / "few.npy", tmp_path / "diverged" / "best.pt"
    np.save(few, np.random.default_rng(0).random((5, 3)))
    write_checkpoint(diverged, "target=sdf", shift=float("nan"))
    empty = write_checkpoint(
        tmp_path / "empty" / "best.pt", "target=occupancy", "projector.normals=false", shift=-9.0
    )
    for path, file, reason in [
        (tmp_path / "none.pt", chair, "there is no checkpoint"),
        (trained, plane, "lie in a plane"),
        (trained, scan, "has no normals"),
        (empty, few, "the cloud has 5 points, and this model needs at least 7"),
        (diverged, chair, r"holds NaN or infinity in query_mlp.*take a checkpoint from before"),
        (trained, tmp_path / "missing.off", "cannot be read"),
        (empty, scan, "finds nothing inside"),
    ]:
        with pytest.raises(SystemExit, match=reason):
            call("predict", path, file, "--out", out)
    with pytest.raises(SystemExit, match=r"expected.*class.*test"):
        call("evaluate", trained, "--meshes", tmp_path / "nowhere", "--out", out)
    for wrong in (("--samples", "regular"), ("--side", 1), ("--side", 100_000), ("--baselines", "flod")):
        with pytest.raises(SystemExit, match="2"):
            call("evaluate", trained, *wrong)
    for command, more in (("evaluate", ()), ("predict", (chair,))):
        with pytest.raises(SystemExit, match="is a file; name another folder"):
            call(command, trained, *more, "--out", chair / "out")
    assert not out.exists()

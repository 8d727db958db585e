"""Samples with fields: found, checked, scaled by the training samples alone, and drawn."""

import re
import tracemalloc
from operator import eq

import numpy as np
import pytest
import torch

from pointproj.config import AugmentationConfig
from pointproj.data.batches import batches, collate
from pointproj.data.dataset import Draw
from pointproj.data.device_sampler import SamplerUnavailable
from pointproj.data.errors import DataError
from pointproj.data.fields import preparation
from pointproj.data.fields.augmentation import augment_fields
from pointproj.data.fields.dataset import prepare_fields
from pointproj.data.fields.device_sampler import field_sampler
from pointproj.data.fields.statistics import FieldStatistics
from pointproj.geometry.files.measured import FieldSample
from tests.configs import config_of

NAMES = [f"sample_{number}" for number in range(6)]


def _write(folder, *, names=NAMES, table=True, **changed):
    """Write samples of 50 points with pressure and velocity; ``changed`` has other arrays by sample."""
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        generator = np.random.default_rng(number)
        points = generator.uniform((4, -1, -1), (6, 1, 1), (50, 3))
        normals = points / np.linalg.norm(points, axis=1, keepdims=True)
        arrays = {"points": points, "normals": normals, "areas": generator.uniform(1, 2, 50)}
        arrays |= {"pressure": number + points[:, 0], "velocity": points * [1, 2, 3]} | changed.get(name, {})
        np.savez(folder / f"{name}.npz", **arrays)
    rows = "".join(f"{name},{number},0,1\n" for number, name in enumerate(names))
    if table:
        (folder / "parameters.csv").write_text(f"sample,wind_x,wind_y,wind_z\n{rows}")


def _config(folder, *more, fields="pressure,velocity"):
    where = [f"data.root={folder}", f"data.cache={folder}-cache", f"data.fields=[{fields}]"]
    small = ["data.points=40", "data.queries=30", "projector.k=4", "data.validation=0.2", "data.test=0.2"]
    return config_of("data=fields", "target=field", *where, *small, *more)


def test_statistics_are_those_of_the_training_samples(tmp_path):
    _write(tmp_path / "data")
    data = prepare_fields(_config(tmp_path / "data"))
    assert [len(each) for each in (data.train, data.validation, data.test)] == [4, 1, 1]
    statistics, numbers = data.statistics, [int(s.name[-1]) for s in data.train.samples]
    files = [np.load(tmp_path / "data" / f"sample_{number}.npz") for number in numbers]
    means = [np.average(file["pressure"], weights=file["areas"]) for file in files]
    squares = [np.average(file["pressure"] ** 2, weights=file["areas"]) for file in files]
    assert statistics.mean[0] == pytest.approx(np.mean(means))
    assert statistics.std[0] == pytest.approx(np.sqrt(np.mean(squares) - np.mean(means) ** 2))
    assert statistics.mean[1:] == [0, 0, 0]  # of a vector, with one scale
    assert len({*statistics.std[1:]}) == 1
    assert statistics.parameters == ["wind_x", "wind_y", "wind_z"]
    assert FieldStatistics(**statistics.as_mapping()) == statistics
    points = np.concatenate([file["points"] for file in files])
    placed = statistics.placed(points)
    assert np.ptp(placed, axis=0).max() == pytest.approx(1.8, rel=1e-6)
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    torch.testing.assert_close(statistics.in_units(statistics.normalized(values)), values)


def test_draws_are_rows_of_the_file_and_differ_by_epoch(tmp_path, monkeypatch):
    _write(tmp_path / "data")
    data = prepare_fields(_config(tmp_path / "data"))
    draws = [data.train[Draw(epoch, 0, data.train.samplings[0])] for epoch in range(8)]
    first, again = draws[0], data.train[Draw(0, 0, data.train.samplings[0])]
    assert torch.equal(first["target"], again["target"])
    # A draw begins at one of 50 rows, so two of eight may be alike.
    assert len({each["target"].numpy().tobytes() for each in draws}) > 4
    monkeypatch.setattr(preparation, "_code_digest", lambda: "other code")
    other = prepare_fields(_config(tmp_path / "data")).train  # prepared again, with the same draws
    assert other.samples[0].folder != data.train.samples[0].folder
    assert torch.equal(other[0]["target"], first["target"])
    file = np.load(tmp_path / "data" / f"{first['name']}.npz")
    placed = data.statistics.placed(file["points"])
    away = np.linalg.norm(first["query_points"].numpy()[:, None] - placed, axis=-1)
    rows = away.argmin(1)
    assert away.min(1).max() < 1e-5
    assert len({*rows}) == 30
    values = data.statistics.in_units(first["target"])
    np.testing.assert_allclose(values[:, 0], file["pressure"][rows], rtol=1e-5)
    np.testing.assert_allclose(values[:, 1:], file["velocity"][rows], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(first["areas"], file["areas"][rows], rtol=1e-6)
    whole = next(batches(data.test, 1))
    assert whole["query_points"].shape == (1, 50, 3)  # all points of a test sample


def test_the_device_draws_what_the_loader_draws(tmp_path):
    _write(tmp_path / "data")
    data = prepare_fields(_config(tmp_path / "data"))
    for dataset in (data.train, data.test):
        draw = field_sampler(dataset, torch.device("cpu"), 2**20)
        drawn, loaded = (batches(dataset, 3, seed=1, epochs=2, draw=each) for each in (draw, None))
        for mine, theirs in zip(drawn, loaded, strict=True):
            assert mine.keys() == theirs.keys()
            for name, values in mine.items():
                same = torch.equal if isinstance(values, torch.Tensor) else eq
                assert same(values, theirs[name]), name
    with pytest.raises(SamplerUnavailable, match="quarter of the free memory"):
        field_sampler(data.train, torch.device("cpu"), 2**10)


def test_folders_are_splits(tmp_path):
    for split in ("train", "validation", "test"):
        _write(tmp_path / split, names=[f"{split}_1"], table=False)
    data = prepare_fields(_config(tmp_path))
    assert [data.train[0]["name"], data.validation[0]["name"]] == ["train_1", "validation_1"]


def test_samples_of_one_name_in_several_folders(tmp_path):
    for number in range(4):
        _write(tmp_path / f"data{number}", names=["body"], table=False, body={"angle": np.array(number)})
    (tmp_path / "parameters.csv").write_text(
        " sample , angle\n" + "".join(f"data{number}/body , {number}\n" for number in range(4))
    )
    data = prepare_fields(_config(tmp_path))
    samples = [each for split in (data.train, data.validation, data.test) for each in split.samples]
    assert {each.name: each.facts["parameters"]["angle"] for each in samples} == {
        f"data{number}_body": number for number in range(4)
    }
    (tmp_path / "parameters.csv").write_text("sample,angle\nbody,1\n")
    with pytest.raises(DataError, match="has a row body, and 4 samples have that name"):
        prepare_fields(_config(tmp_path))


def test_scans_and_the_meshes_beside_arrays(tmp_path):
    """A scan is a sample; a PLY file is one unless it is the geometry of the file beside it."""
    (tmp_path / "data").mkdir()
    for number in range(4):
        rows = np.random.default_rng(number).uniform(0, 1, (50, 7)).round(6)
        text = "\n".join(" ".join(map(str, row)) for row in rows)
        (tmp_path / f"data/{number}.pts").write_text(f"50\n{text}\n")
    (tmp_path / "data/0.ply").write_bytes(b"not read")
    data = prepare_fields(_config(tmp_path / "data", fields="intensity,red"))
    assert not data.left_out
    assert not data.statistics.on_surface
    whole = data.test.whole(0)
    rows = np.loadtxt(tmp_path / "data" / f"{whole['name']}.pts", skiprows=1)
    values = data.statistics.in_units(whole["target"])
    found = np.concatenate([data.statistics.placed(rows[:, :3]), rows[:, 3:5]], axis=1)
    drawn = np.concatenate([whole["query_points"], values], axis=1)
    np.testing.assert_allclose(*(each[each[:, 0].argsort()] for each in (drawn, found)), atol=1e-5)


def test_preparation_takes_little_more_memory_than_its_result(monkeypatch, tmp_path):
    monkeypatch.setattr(preparation, "MOST_CLOUD", 1000)
    rows = np.random.default_rng(0).random((100_000, 8))
    rows[:, 3] = np.random.default_rng(1).permutation(100_000)  # tells the rows apart
    sample = FieldSample(rows[:, :3], {"pressure": rows[:, 3:4]}, rows[:, 4:7], rows[:, 7])
    tracemalloc.start()
    arrays, facts = preparation._arrays(sample, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * arrays["field"].nbytes
    for first in (0.0, 1.0):  # as by two runs at once
        preparation._store(tmp_path / "entry", {"field": np.full(3, first)}, facts)
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]
    assert not np.load(tmp_path / "entry/field.npy").any()
    kept = arrays["field"][arrays["field"][:, 7].argsort()]
    expected = rows[rows[:, 3].argsort()][:, [0, 1, 2, 4, 5, 6, 7, 3]]
    expected[:, :3] -= facts["origin"]
    np.testing.assert_allclose(kept, expected, atol=1e-6)
    assert facts["mean_square"] == [pytest.approx(np.average(rows[:, 3] ** 2, weights=rows[:, 7]))]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"pressure": np.full(50, np.nan)}, "NaN or infinity in pressure"),
        ({"pressure": np.full(50, 3e6)}, "pressure is .* times that of the other samples"),
        ({"points": 1e3 * np.random.default_rng(0).random((50, 3))}, "its size is .* times"),
    ],
    ids=["nan", "unit of a field", "unit of length"],
)
def test_what_cannot_be_used_is_left_out_by_name(tmp_path, changed, words):
    _write(tmp_path / "data", sample_1=changed)
    ((path, reason),) = prepare_fields(_config(tmp_path / "data")).left_out
    assert path.endswith("sample_1.npz")
    assert re.search(words, reason)


def test_refusals_say_what_there_is(tmp_path):
    _write(tmp_path / "data")
    with pytest.raises(DataError, match="has no field heat: its points have pressure, velocity"):
        prepare_fields(_config(tmp_path / "data", fields="heat"))
    with pytest.raises(DataError, match=r"write data\.points=50"):
        prepare_fields(_config(tmp_path / "data", "data.points=60"))
    for rows in ("sample_0,fast", "sample_0,nan", "sample_0,1,2", "sample_1,1\nsample_1,2"):
        (tmp_path / "data/parameters.csv").write_text(f"sample,speed\n{rows}\n")
        with pytest.raises(DataError, match=r"parameters\.csv, row [23]"):
            prepare_fields(_config(tmp_path / "data"))
    (tmp_path / "data/sample_0.csv").write_text("x,y,z,pressure,velocity\n0,0,0,0,0\n")
    with pytest.raises(DataError, match=r"sample_0\.csv and sample_0\.npz are one sample"):
        prepare_fields(_config(tmp_path / "data"))
    with pytest.raises(DataError, match="no samples in"):
        prepare_fields(_config(tmp_path / "elsewhere"))


@pytest.mark.parametrize("rotate", ["any", "cube"])
def test_turned_samples_stay_consistent(tmp_path, rotate):
    """Products of vectors are the same before and after; the network's input turns as a whole."""
    _write(tmp_path / "data")
    data = prepare_fields(_config(tmp_path / "data"))
    batch = collate([data.train.whole(index) for index in range(4)])
    turn = AugmentationConfig(rotate=rotate, mirror=True)
    turned = augment_fields(batch, turn, data.statistics, seed=(0, 1))

    def invariants(of):
        wind, velocity = of["parameters"][:, None], of["target"][..., 1:]
        pairs = (of["query_points"], wind), (of["query_normals"], velocity), (velocity, wind)
        return torch.stack([(a * b).sum(-1) for a, b in pairs])

    torch.testing.assert_close(invariants(turned), invariants(batch))
    heights = (each["query_points"][..., 2] for each in (turned, batch))
    if rotate == "any":
        torch.testing.assert_close(*heights)
    else:  # axes onto axes
        lengths = (each["query_points"].abs().sort().values for each in (turned, batch))
        torch.testing.assert_close(*lengths)
        assert not torch.equal(*heights)
    torch.testing.assert_close(turned["target"][..., 0], batch["target"][..., 0])
    assert not torch.equal(turned["query_points"], batch["query_points"])

"""Training at random points: drawn repeatably, valued by the mesh, and what goes with them."""

from functools import partial

import numpy as np
import pytest
import torch

from pointproj.config import ConfigError
from pointproj.data import preparation
from pointproj.data.batches import batches
from pointproj.data.dataset import prepare
from pointproj.geometry.fields import field_at
from pointproj.geometry.meshes import Mesh
from tests.configs import config_of


@pytest.fixture
def config(config):
    return partial(config, points=32, queries=40, pool=500, classes=["dresser"])


@pytest.mark.parametrize("target", ["udf", "sdf", "occupancy"])
def test_values_are_those_of_the_mesh_at_the_points(config, target):
    data = prepare(config(target))
    prepare(config(target))  # from the cache
    shape = data.train.shapes[0]
    mesh = Mesh(shape.source.vertices, shape.source.faces, shape.name)
    assert shape.pool_points.shape == (500, 3)
    expected = field_at(mesh, shape.pool_points.numpy(), target)
    np.testing.assert_array_equal(shape.pool_values.numpy(), expected)
    assert len(np.unique(expected)) > 1


def test_points_are_of_mesh_and_recipe_and_not_of_the_code(config, monkeypatch):
    pools = {}
    for code, count in (("one", 500), ("other", 500), ("one", 501)):
        monkeypatch.setattr(preparation, "_code_digest", lambda code=code: code)
        shapes = prepare(config(pool=count)).train.shapes
        first, second = shapes[0], shapes[1]
        assert not torch.equal(first.pool_points[:400], second.pool_points[:400])
        pools[code, count] = first.pool_points
    assert torch.equal(pools["one", 500], pools["other", 500])
    assert not torch.equal(pools["one", 501][:500], pools["one", 500])


def test_training_draws_from_the_pool_anew_in_every_epoch_and_testing_has_the_grid(config):
    data = prepare(config("occupancy"))
    first, again, later = (
        next(batches(data.train, 2, shuffle=True, seed=1, epoch=epoch)) for epoch in (0, 0, 1)
    )
    assert (first["query_points"].shape, first["target"].shape) == ((2, 40, 3), (2, 40))
    assert torch.equal(first["query_points"], again["query_points"])
    assert not torch.equal(first["query_points"], later["query_points"])
    pool = {shape.name: shape for shape in data.train.shapes}
    for name, points, values in zip(first["name"], first["query_points"], first["target"], strict=True):
        same = (points[:, None] == pool[name].pool_points).all(-1)
        assert same.any(1).all()
        assert torch.equal(pool[name].pool_values[same.int().argmax(1)], values)
    tested = next(batches(data.test, 1))
    assert (tested["query_points"].shape, tested["target"].shape) == ((216, 3), (1, 216))


def test_a_pool_is_no_part_of_a_run_on_the_grid(config):
    data = prepare(config("occupancy", queries=0))
    assert data.train.shapes[0].pool_points is None
    assert next(batches(data.train, 1))["query_points"].shape == (216, 3)


def test_mixed_data_is_real_meshes_repeated_beside_made_ones_in_training_alone(
    config, monkeypatch, tmp_path, furniture
):
    monkeypatch.chdir(tmp_path)
    settings = config("occupancy", name="mixed", repeats=3, limit=2, train_meshes=2, varied=True, grid=12)
    data = prepare(settings)
    assert [shape.name for shape in data.test.shapes] == ["dresser_5001", "dresser_5002"]
    assert len(data.train) == 3 * 2 + 2
    once = [data.train[index]["reference_points"] for index in range(len(data.train))]
    assert len({tuple(points.flatten().tolist()) for points in once}) == len(once)  # each sampled anew
    assert (tmp_path / "data" / "furniture-varied").is_dir()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.queries=0", "augmentation.mirror=true"], r"data\.queries=2048"),
        (["target=random", "data.queries=9"], r"data\.queries=0"),
        (["target=udf", "augmentation.stretch=0.2"], "changes distances unevenly"),
        (["target=udf", "augmentation.warp=0.2"], "changes distances unevenly"),
        (["augmentation.drop=1.5"], "of at least 0 and below 1"),
        (["augmentation.rotate=some"], "none, right, any"),
        (["data.repeats=2"], "data=mixed"),
        (["target.loss=smoth"], "did you mean smooth"),
        (["target=udf", "target.loss=cross_entropy"], "target=occupancy"),
        (["target=occupancy", "target.eikonal=0.1"], r"target\.eikonal=0"),
        (["projector=visibility", "projector.hidden_channels=12"], "multiple of 8"),
        (["projector=visibility", "projector.neighbors=1900"], "at most 1024"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        config_of(*overrides)


def test_visibility_sees_no_normals_unless_asked():
    assert config_of("projector=visibility", "target=occupancy").projector.normals is False
    assert config_of("projector=knn", "target=occupancy").projector.normals is True
    assert config_of("projector=visibility", "projector.normals=true").projector.normals is True

import math

import pytest
import torch

from pointproj.config import AugmentationConfig
from pointproj.data.augmentation import augment
from pointproj.geometry.meshes import LONGEST_SIDE


def batch(clouds=8, points=200):
    """Boxes' surfaces of normalised size, and queries labelled by the box."""
    generator = torch.Generator().manual_seed(0)
    half = torch.tensor([0.9, 0.5, 0.3])
    inside = torch.rand(clouds, points, 3, generator=generator) * 2 - 1
    axis = torch.randint(0, 3, (clouds, points, 1), generator=generator)
    side = torch.randint(0, 2, (clouds, points, 1), generator=generator) * 2.0 - 1
    normals = torch.zeros(clouds, points, 3).scatter(2, axis, side)
    on_surface = inside.scatter(2, axis, side) * half
    queries = torch.rand(clouds, 300, 3, generator=generator) * 2 - 1
    label = (queries.abs() < half).all(-1).float()
    made = {"reference_points": on_surface, "normals": normals, "query_points": queries, "target": label}
    return {**made, "name": ["box"] * clouds}


def changed(made, seed=(0, 0), distances=False, **settings):
    return augment(made, AugmentationConfig(**settings), seed=seed, distances=distances)


ALL = {
    "rotate": "any",
    "mirror": True,
    "stretch": 0.3,
    "warp": 0.5,
    "shrink": 0.2,
    "noise": 0.01,
    "drop": 0.3,
}


def test_nothing_asked_for_changes_nothing():
    made = batch()
    assert changed(made) is made


def test_equal_seeds_change_equally_and_others_do_not():
    first, same, other = (changed(batch(), seed=seed, **ALL) for seed in ((3, 5), (3, 5), (3, 6)))
    for name in ("reference_points", "query_points", "normals"):
        assert torch.equal(first[name], same[name])
        assert not torch.equal(first[name], other[name])


def test_the_batch_given_keeps_its_tensors():
    made = batch()
    changed(made, **ALL)
    assert all(torch.equal(made[name], batch()[name]) for name in made if name != "name")


@pytest.mark.parametrize("rotate", ["none", "right", "any", "cube"])
def test_queries_move_with_the_cloud(rotate):
    made = batch()
    moved = changed(made, rotate=rotate, mirror=True, stretch=0.3, shrink=0.2)
    source = torch.cat([made["reference_points"], torch.ones(8, 200, 1)], dim=-1)
    for cloud in range(8):  # one affine map for points and queries
        linear = torch.linalg.lstsq(source[cloud], moved["reference_points"][cloud]).solution
        queries = torch.cat([made["query_points"][cloud], torch.ones(300, 1)], dim=-1)
        torch.testing.assert_close(queries @ linear, moved["query_points"][cloud], atol=1e-5, rtol=1e-4)
        tilt = torch.linalg.inv(linear[:3].double())
        normals = torch.nn.functional.normalize(made["normals"][cloud].double() @ tilt.mT, dim=-1)
        torch.testing.assert_close(normals.float(), moved["normals"][cloud], atol=1e-4, rtol=1e-3)
        upright = linear[2, :2].abs().max().item() < 1e-5
        assert upright or rotate == "cube"


def with_sensors():
    """A batch whose sensors are one place for all points of a shape."""
    made = batch()
    place = 3 * torch.nn.functional.normalize(
        torch.randn(8, 1, 3, generator=torch.Generator().manual_seed(1)), dim=-1
    )
    return {**made, "sensors": torch.nn.functional.normalize(place - made["reference_points"], dim=-1)}


@pytest.mark.parametrize(
    "change", [{"rotate": "any", "mirror": True, "stretch": 0.3, "shrink": 0.2}, {"warp": 0.5}]
)
def test_sight_lines_move_with_the_cloud(change):
    made, step = with_sensors(), 1e-3
    moved = changed(made, **change)
    ahead = {**made, "query_points": made["reference_points"] + step * made["sensors"]}
    towards = changed(ahead, **change)["query_points"] - moved["reference_points"]
    lines = torch.nn.functional.normalize(towards, dim=-1)
    torch.testing.assert_close(moved["sensors"], lines, atol=5e-3, rtol=0)


def test_points_that_go_missing_take_their_sensors_along():
    made = with_sensors()
    made["sensors"] = made["reference_points"].clone()
    dropped = changed(made, drop=0.5)
    assert torch.equal(dropped["sensors"], dropped["reference_points"])


def test_moved_shapes_have_the_normalised_size_or_shrink_from_it():
    for shrink in (0.0, 0.25):
        points = changed(batch(), rotate="any", stretch=0.3, shrink=shrink)["reference_points"]
        longest = (points.amax(1) - points.amin(1)).amax(-1)
        assert (longest <= LONGEST_SIDE + 1e-5).all()
        assert (longest >= LONGEST_SIDE * (1 - shrink) - 1e-5).all()
        torch.testing.assert_close(
            (points.amax(1) + points.amin(1)) / 2, torch.zeros(8, 3), atol=1e-5, rtol=0
        )


def test_a_warp_keeps_planes_across_the_axes_and_what_is_inside():
    made = batch()
    changed_batch = changed(made, warp=0.8)
    normals, points = changed_batch["normals"], changed_batch["reference_points"]
    torch.testing.assert_close(normals, made["normals"], atol=1e-6, rtol=0)
    low, high = points.amin(1, keepdim=True), points.amax(1, keepdim=True)
    across = normals.abs() > 0.5
    on_a_side = torch.minimum((points - low).abs(), (points - high).abs()) < 1e-5
    assert on_a_side[across].all()
    queries = changed_batch["query_points"]
    inside = ((queries > low) & (queries < high)).all(-1)
    assert torch.equal(inside.float(), made["target"])
    lengths = (high - low)[:, 0] / torch.tensor([1.8, 1.0, 0.6])
    ratios = lengths / lengths[:, :1]
    assert ratios.std(0)[1:].min() > 0.02  # each shape in its own way


def test_quarter_rotations_keep_boxes_along_the_axes():
    normals = changed(batch(), rotate="right")["normals"]
    torch.testing.assert_close(normals.abs().amax(-1), torch.ones(8, 200), atol=1e-6, rtol=0)


def test_distances_scale_with_the_shape_and_labels_do_not():
    made = batch()
    made["target"] = made["target"] + 0.5
    moved = changed(made, shrink=0.5, distances=True)
    lengths = moved["query_points"].diff(dim=1).norm(dim=-1) / made["query_points"].diff(dim=1).norm(dim=-1)
    expected = made["target"] * lengths.mean(1, keepdim=True)
    torch.testing.assert_close(moved["target"], expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(changed(made, shrink=0.5)["target"], made["target"])


def test_noise_has_at_most_the_size_asked_for():
    made = batch(clouds=64)
    noise = changed(made, noise=0.02)["reference_points"] - made["reference_points"]
    sizes = noise.std(dim=(1, 2))
    assert sizes.max() < 0.022
    assert math.isclose(sizes.mean().item(), 0.01, rel_tol=0.25)


def test_a_gap_is_one_region_and_the_number_of_points_stays():
    made = batch(clouds=16)
    made["reference_points"] = made["reference_points"] + 1e-3 * torch.rand(16, 200, 3)
    thinned = changed(made, drop=0.5)
    assert thinned["reference_points"].shape == made["reference_points"].shape
    shares = []
    for before, after, normals_before, normals_after in zip(
        made["reference_points"],
        thinned["reference_points"],
        made["normals"],
        thinned["normals"],
        strict=True,
    ):
        same = (before[:, None] == after).all(-1)
        assert torch.equal(normals_before[same.int().argmax(0)], normals_after)
        kept = same.any(1)
        shares.append(kept.float().mean())
        away = (before - before[0]).norm(dim=1)
        assert kept.all() or away[~kept].max() <= away[kept].min()
    shares = torch.stack(shares)
    assert 0.5 <= shares.min() < 0.7
    assert shares.max() > 0.85

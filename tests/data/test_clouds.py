"""Even clouds against the plain definition, in which order shapes move and clouds are made, and sizes."""

import numpy as np
import pytest
import torch

from pointproj.config import AugmentationConfig, DataConfig, MixtureConfig
from pointproj.data.augmentation import augment
from pointproj.data.batches import batches
from pointproj.data.clouds import DENSER, Sampling, finished_cloud
from pointproj.data.dataset import Draw, prepare
from pointproj.data.device_sampler import device_sampler
from pointproj.geometry.meshes import LONGEST_SIDE


def plainly_farthest(points, count):
    """The definition: all points are compared with each that was chosen."""
    nearest, chosen = torch.full((len(points),), float("inf")), [0]
    while len(chosen) < count:
        away = points - points[chosen[-1]]
        squared = away * away
        nearest = torch.minimum(nearest, squared[:, 0] + squared[:, 1] + squared[:, 2])
        chosen.append(int(nearest.argmax()))
    return torch.tensor(chosen)


def test_an_even_cloud_is_finished_after_the_shape_has_moved():
    generator = torch.Generator().manual_seed(1)
    drawn = torch.rand((2, DENSER * 40, 3), generator=generator) - 0.5
    batch = {
        **{"reference_points": drawn, "normals": torch.nn.functional.normalize(drawn, dim=-1)},
        **{"query_points": drawn[:, :7], "target": torch.zeros(2, 7)},
    }
    settings, seed = AugmentationConfig(stretch=0.6, warp=0.5, rotate="any"), (3, 4)
    moved = augment(batch, settings, seed=seed, distances=False)
    made = augment(batch, settings, seed=seed, distances=False, finish=Sampling("even", 40).finish)
    for cloud in range(2):
        rows = plainly_farthest(moved["reference_points"][cloud], 40)
        for name in ("reference_points", "normals"):
            assert torch.equal(made[name][cloud], moved[name][cloud][rows])
    assert torch.equal(made["query_points"], moved["query_points"])


def test_noise_is_of_the_size_asked_for_whatever_the_shape_did():
    batch = {"reference_points": torch.rand(3, 5000, 3), "normals": torch.zeros(3, 5000, 3)}
    batch |= {"query_points": torch.rand(3, 7, 3), "target": torch.zeros(3, 7)}
    settings, given = AugmentationConfig(stretch=0.6, shrink=0.5), {"seed": (1, 2), "distances": False}
    plain = augment(batch, settings, **given)["reference_points"]
    noisy = augment(batch, settings, finish=Sampling("area", 5000, 0.01).finish, **given)["reference_points"]
    deviation = (noisy - plain).std(dim=1)
    torch.testing.assert_close(deviation, torch.full((3, 3), 0.01 * LONGEST_SIDE), rtol=0.05, atol=0)


@pytest.fixture
def prepared(config):
    given = {"points": 50, "queries": 9, "pool": 60, "classes": ["dresser"]}
    return lambda **data: prepare(config(**(given | data)))


def test_test_clouds_are_even_and_noisy_and_always_the_same(prepared):
    plain = prepared(points=50 * DENSER).test[0]["reference_points"]
    even = prepared(sampling="even").test[0]
    rows = plainly_farthest(plain, 50)
    assert torch.equal(even["reference_points"], plain[rows])
    noisy = [prepared(sampling="even", noise=0.01).test[0]["reference_points"] for _ in range(2)]
    assert torch.equal(*noisy)
    assert 0 < (noisy[0] - even["reference_points"]).abs().max() < 0.1


def test_a_cloud_with_too_many_points_is_thinned_as_training_clouds_are():
    points = np.random.default_rng(0).random((90, 3), dtype=np.float32)
    even = Sampling("even", 20).thin(points, 20, np.random.default_rng(1))
    assert even.tolist() == plainly_farthest(torch.from_numpy(points), 20).tolist()
    chosen = Sampling("area", 20).thin(points, 20, np.random.default_rng(1))
    assert len(set(chosen)) == 20
    mixed = DataConfig(points=30, mixture=[MixtureConfig("scan"), MixtureConfig("even", 50)])
    assert Sampling.for_prediction(mixed) == Sampling("even", 30)
    assert Sampling.for_prediction(DataConfig(sampling="scan", points=30, noise=0.1)) == Sampling("scan", 30)


def test_finished_clouds_follow_from_the_generator():
    cloud = {"reference_points": torch.rand(60, 3), "normals": torch.rand(60, 3)}
    ones, same, others = (
        finished_cloud(cloud, Sampling("even", 12, 0.1), np.random.default_rng(seed)) for seed in (0, 0, 1)
    )
    assert ones["reference_points"].shape == (12, 3)
    assert torch.equal(ones["reference_points"], same["reference_points"])
    assert not torch.equal(ones["reference_points"], others["reference_points"])


MIXTURE = [MixtureConfig("area", 8), MixtureConfig("even", 20, 0.01), MixtureConfig(points=30)]


@pytest.mark.parametrize("sampler", ["loader", "device"])
def test_batches_take_turns_with_the_clouds_of_a_mixture_also_where_a_run_resumes(prepared, sampler):
    dataset = prepared(mixture=MIXTURE, sampling="scan", noise=0.02).train
    draw = device_sampler(dataset, torch.device("cpu"), 2**30) if sampler == "device" else None
    order = {"shuffle": True, "seed": 1, "epochs": 2, "draw": draw}
    made = list(batches(dataset, 2, **order))
    kinds = [Sampling("area", 8, 0.02), Sampling("even", 20, 0.01), Sampling("scan", 30, 0.02)]
    assert [batch["sampling"] for batch in made] == [kinds[0], kinds[1], kinds[1], kinds[2]]
    assert [batch["reference_points"].shape[1] for batch in made] == [8, 100, 100, 30]
    rest = list(batches(dataset, 2, start=1, **order))
    for batch, other in zip(rest, made[1:], strict=True):
        assert torch.equal(batch["reference_points"], other["reference_points"])
    if draw is None:
        (shape,) = (index for index, shape in enumerate(dataset.shapes) if shape.name == made[2]["name"][0])
        again = dataset[Draw(1, shape, kinds[1])]["reference_points"]
        assert torch.equal(made[2]["reference_points"][0], again)


@pytest.mark.parametrize("kind", ["area", "even", "scan"])
def test_loader_and_device_draw_from_the_same_distribution(prepared, kind):
    dataset = prepared(mixture=[MixtureConfig(kind, 400)]).train
    draw = device_sampler(dataset, torch.device("cpu"), 2**30)
    chunk = [Draw(epoch, 0, dataset.samplings[0]) for epoch in range(40)]
    host = torch.stack([dataset[each]["reference_points"] for each in chunk])
    device = draw(chunk)["reference_points"]
    for moment in (lambda points: points.mean((0, 1)), lambda points: points.square().mean((0, 1))):
        torch.testing.assert_close(moment(host), moment(device), rtol=0, atol=0.05)

"""Batches drawn on the device: the points that equal random numbers give on the host, fixed by the seed."""

import numpy as np
import pytest
import torch
import warp as wp

from pointproj.data.batches import batches
from pointproj.data.dataset import prepare
from pointproj.data.device_sampler import SamplerUnavailable, device_sampler
from pointproj.data.surface_draws import Surfaces, Words, draw_from_pools, draw_on_surfaces, random_words
from pointproj.geometry.sampling import SurfaceSampler
from pointproj.runtime.distributed import Processes

MASK = 2**32 - 1
SEED, EPOCH = 2**62 + 12345, 7

# Counter, key and result, from the known answers of the authors' library Random123.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def philox(counter, key):
    """Philox-4x32-10 in plain Python."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        one, two = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (two >> 32) ^ b ^ k, two & MASK, (one >> 32) ^ d ^ m, one & MASK
        k, m = (k + 0x9E3779B9) & MASK, (m + 0xBB67AE85) & MASK
    return [a, b, c, d]


def words_of(numbers, identity, epoch, seed):
    shape = identity & MASK, identity >> 32
    return np.array(
        [philox([n, epoch, *shape], [seed & MASK, seed >> 32]) for n in numbers], dtype=np.float64
    )


class Given:
    """A random generator that returns given numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def random(self, shape):
        assert self.numbers.shape == shape
        return self.numbers


@wp.kernel
def words_kernel(counters: wp.array2d(dtype=wp.uint32), words: wp.array2d(dtype=wp.uint32)):
    i = wp.tid()
    counter = Words(counters[i, 0], counters[i, 1], counters[i, 2], counters[i, 3])
    made = random_words(counter, counters[i, 4], counters[i, 5])
    for j in range(4):
        words[i, j] = made[j]


def test_random_numbers_are_those_of_philox():
    for counter, key, expected in KNOWN:
        assert philox(counter, key) == expected
        given = wp.array(np.array([[*counter, *key]], dtype=np.uint32), device="cpu")
        words = wp.zeros((1, 4), dtype=wp.uint32, device="cpu")
        wp.launch(words_kernel, 1, inputs=[given, words], device="cpu")
        assert words.numpy().tolist() == [expected]


def soup(faces, seed):
    """Triangles at random, some without area: the first, the last, and one between."""
    rng = np.random.default_rng(seed)
    vertices = rng.standard_normal((faces + 2, 3))
    corners = rng.integers(0, len(vertices), (faces, 3)).astype(np.int32)
    corners[[0, faces // 2, -1]] = 1
    corners[1:3] = [[0, 1, 2], [1, 2, 0]]
    return SurfaceSampler(vertices, corners)


def joined(samplers, device):
    first = np.cumsum([0, *(len(s.faces) for s in samplers)])[:-1]
    vertices = np.cumsum([0, *(len(s.vertices) for s in samplers)])[:-1]
    arrays = Surfaces(
        np.concatenate([s.vertices for s in samplers]),
        np.concatenate([s.faces + start for s, start in zip(samplers, vertices, strict=True)]).astype(
            np.int32
        ),
        np.concatenate([s.summed_areas for s in samplers]),
        first.astype(np.int32),
        np.array([s.last_face + start for s, start in zip(samplers, first, strict=True)], dtype=np.int32),
    )
    return Surfaces(*(torch.from_numpy(array).to(device) for array in arrays))


def test_points_are_those_of_the_host_for_the_same_random_numbers(device):
    samplers = [soup(5, 0), soup(40, 1), soup(301, 2)]
    shapes, identities = [2, 0, 1, 1], [2**64 - 3, 1, 2**40 + 5, 6]
    drawn = np.array([[s, i, EPOCH] for s, i in zip(shapes, identities, strict=True)], dtype=np.uint64)
    drawn = torch.from_numpy(drawn.view(np.int64)).to(device)
    points, normals, _ = draw_on_surfaces(*joined(samplers, device), None, drawn, SEED, 131)
    for cloud, (shape, identity) in enumerate(zip(shapes, identities, strict=True)):
        words = words_of(range(131), identity, EPOCH, SEED) / 2**32
        numbers = np.stack([words[:, 0] + words[:, 1] / 2**32, words[:, 2], words[:, 3]])
        expected, expected_normals = samplers[shape].draw(131, Given(numbers))
        np.testing.assert_allclose(points[cloud].cpu(), expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(normals[cloud].cpu(), expected_normals, rtol=1e-6, atol=1e-6)


def test_queries_come_from_the_shapes_own_pool_each_equally_likely(device):
    values = torch.rand(3, 7, device=device)
    pool = values[..., None].expand(3, 7, 3).contiguous()
    drawn = torch.tensor([[1, 5, 0], [2, 5, 0], [2, 6, 0]], device=device)
    points, target = draw_from_pools(pool, values, drawn, SEED, 7001)
    assert torch.equal(points, target[..., None].expand(3, 7001, 3))
    for cloud, shape in enumerate([1, 2, 2]):
        counts = (target[cloud, :, None] == values[shape]).sum(0)
        assert counts.sum() == 7001
        assert (counts - 1000).abs().max() < 150  # five standard deviations
    words = words_of([2**31, 2**31 + 6999], 6, 0, SEED)[:, 0]
    assert target[2, [0, 6999]].tolist() == values[2][(words * 7 / 2**32).astype(int)].tolist()


@pytest.fixture
def prepared(config):
    def make(seed=5, **data):
        made = config(**({"points": 65, "queries": 33, "pool": 100} | data))
        made.seed = seed
        return prepare(made)

    return make


def drawn_batches(dataset, size, *, device="cpu", **order):
    draw = device_sampler(dataset, torch.device(device), 2**30)
    return list(batches(dataset, size, draw=draw, **order))


def by_shape(made):
    """Each sample by its name."""
    samples = {}
    for batch in made:
        for row, name in enumerate(batch["name"]):
            queries = batch["query_points"]
            samples[name] = {
                **{key: batch[key][row] for key in ("reference_points", "normals", "target")},
                "query_points": queries[row] if queries.dim() == 3 else queries,
                "class_name": batch["class_name"][row],
                "identity": batch["identity"][row],
            }
    return samples


def assert_equal_samples(ones, others, keys=("reference_points", "normals", "query_points", "target")):
    assert ones.keys() == others.keys()
    assert ones
    for name, one in ones.items():
        assert (one["class_name"], one["identity"]) == (others[name]["class_name"], others[name]["identity"])
        for key in keys:
            assert torch.equal(one[key].cpu(), others[name][key].cpu()), (name, key)


@pytest.mark.parametrize("queries", [0, 33])
def test_batches_hold_what_those_of_the_loader_do(prepared, device, queries):
    dataset = prepared(queries=queries).train
    order = {"shuffle": True, "seed": 3, "epoch": 2}
    made, loaded = drawn_batches(dataset, 4, device=device, **order), list(batches(dataset, 4, **order))
    assert [batch["name"] for batch in made] == [batch["name"] for batch in loaded]
    for one, other in zip(made, loaded, strict=True):
        assert one.keys() == other.keys()
        tensors = {key: value for key, value in one.items() if isinstance(value, torch.Tensor)}
        assert {key: (value.shape, value.dtype) for key, value in tensors.items()} == {
            key: (other[key].shape, other[key].dtype) for key in tensors
        }
        assert {value.device.type for value in tensors.values()} == {device}
    if not queries:
        assert_equal_samples(by_shape(made), by_shape(loaded), ("query_points", "target"))
    pools = {shape.name: shape for shape in dataset.shapes}
    for name, sample in by_shape(made).items():
        if queries:
            same = (sample["query_points"].cpu()[:, None] == pools[name].pool_points).all(-1)
            assert same.any(1).all()
            assert torch.equal(sample["target"].cpu(), pools[name].pool_values[same.int().argmax(1)])
        surface = pools[name].source
        corners = surface.vertices[surface.faces]
        normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
        normals /= np.linalg.norm(normals, axis=1, keepdims=True)
        offsets = (normals * corners[:, 0]).sum(axis=1)
        points, drawn_normals = (sample[key].cpu().numpy() for key in ("reference_points", "normals"))
        gaps = np.abs(points @ normals.T - offsets) + np.abs(drawn_normals @ normals.T - 1)
        assert gaps.min(axis=1).max() < 1e-5


def test_samples_are_fixed_by_seed_epoch_and_shape_not_by_their_batch(prepared):
    dataset = prepared().train
    first = by_shape(drawn_batches(dataset, 4, shuffle=True, epoch=2))
    assert_equal_samples(first, by_shape(drawn_batches(dataset, 1, epoch=2)))
    assert_equal_samples(first, by_shape(drawn_batches(prepared(seed=5).train, 2, epoch=2)))
    for other in (drawn_batches(dataset, 4, epoch=3), drawn_batches(prepared(seed=6).train, 4, epoch=2)):
        for name, sample in by_shape(other).items():
            for key in ("reference_points", "query_points"):
                assert not torch.equal(sample[key], first[name][key])
    names = list(first)
    assert not torch.equal(first[names[0]]["reference_points"], first[names[1]]["reference_points"])


def test_epochs_resume_in_the_middle(prepared):
    dataset = prepared().train
    order = {"shuffle": True, "seed": 1}
    whole = drawn_batches(dataset, 2, epoch=4, epochs=2, **order)
    rest = drawn_batches(dataset, 2, epoch=4, epochs=2, start=2, **order)
    assert len(rest) == len(whole) - 2
    for one, other in zip(rest, whole[2:], strict=True):
        assert_equal_samples(by_shape([one]), by_shape([other]))


def test_processes_draw_what_one_would_each_its_own_shapes(prepared):
    dataset = prepared().train
    order = {"shuffle": True, "seed": 1, "epoch": 1}
    whole = drawn_batches(dataset, 4, **order)
    parts = [drawn_batches(dataset, 2, processes=Processes(rank, 2), **order) for rank in range(2)]
    for batch, mine, others in zip(whole, *parts, strict=True):
        assert mine["name"] + others["name"] == batch["name"]
        assert_equal_samples(by_shape([mine, others]), by_shape([batch]))
        assert mine["share"] + others["share"] == 1


def test_a_mesh_that_occurs_several_times_is_kept_once_and_drawn_each_time_anew(prepared):
    dataset = prepared().train
    once = dataset.shapes.entries
    dataset.shapes.entries = [*once, *(entry._replace(identity=entry.identity + 1) for entry in once)]
    (batch,) = drawn_batches(dataset, 12)
    twice = [
        points
        for name, points in zip(batch["name"], batch["reference_points"], strict=True)
        if name == once[0].name
    ]
    assert len(twice) == 2
    assert not torch.equal(*twice)
    with pytest.raises(SamplerUnavailable):
        device_sampler(dataset, torch.device("cpu"), bytes_of(dataset) - 1)
    device_sampler(dataset, torch.device("cpu"), bytes_of(dataset))


def bytes_of(dataset):
    """What the tables of a dataset take, each mesh once."""
    shapes = {shape.name: shape for shape in dataset.shapes}.values()
    surfaces = sum(
        s.source.vertices.nbytes + s.source.faces.nbytes + s.source.summed_areas.nbytes + 8 for s in shapes
    )
    return surfaces + sum(16 * len(s.pool_values) for s in shapes)


def test_what_is_the_same_in_every_epoch_is_that_of_the_loader(prepared, device):
    fixed = prepared(resample=False)
    for dataset in (fixed.train, fixed.test):
        loaded = by_shape(batches(dataset, 4))
        for epoch in (0, 3):
            assert_equal_samples(by_shape(drawn_batches(dataset, 3, epoch=epoch, device=device)), loaded)
    with pytest.raises(SamplerUnavailable, match="a quarter of the free memory"):
        device_sampler(fixed.test, torch.device(device), 1000)

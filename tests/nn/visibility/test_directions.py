"""Directions that planes share: those of most planes first, and the same in single and double precision."""

from functools import partial

import pytest
import torch

from pointproj.nn.visibility.directions import shared_directions

SETTINGS = {"same": 0.05, "rounds": 3, "least": 8}


def planes(counts, deviation=0.01, seed=0):
    """So many unit normals, of either sign, near each of some directions; then these directions."""
    generator = torch.Generator().manual_seed(seed)
    normalize = partial(torch.nn.functional.normalize, dim=-1)
    directions = normalize(torch.randn(len(counts), 3, generator=generator, dtype=torch.float64))
    around = directions.repeat_interleave(torch.tensor(counts), dim=0)
    around = normalize(around + deviation * torch.randn(around.shape, generator=generator))
    signs = torch.randint(0, 2, (len(around), 1), generator=generator) * 2 - 1
    order = torch.randperm(len(around), generator=generator)
    return (signs * around).float()[order][None], directions.float()


@pytest.mark.parametrize(
    ("counts", "voting"), [([700, 400, 150], 1250), ([30, 8], 38), ([900, 90, 20], 2000)]
)
def test_single_precision_finds_what_double_finds(device, counts, voting):
    normals, _ = planes(counts)
    normals = torch.cat([normals, normals.new_zeros(1, voting - normals.shape[1], 3)], dim=1).to(device)
    normals = torch.cat([normals, normals.flip(1)])
    found = shared_directions(normals, **SETTINGS)
    double = shared_directions(normals.double(), **SETTINGS)
    count = double.any(-1).sum(1)
    assert torch.equal(found.any(-1).sum(1), count)
    # Voters with equally many votes stand for each other, and end up a little apart.
    cosine = (found.double() @ double.mT).abs()[:, : count.min(), : count.min()]
    assert cosine.amax(-1).min() > 0.9995


def test_directions_are_the_means_of_many_planes_and_the_most_common_comes_first():
    normals, directions = planes([800, 500, 200])
    found = shared_directions(normals, **SETTINGS)[0]
    assert (found[:3] * directions).sum(-1).abs().min() > 0.99999
    single = torch.nn.functional.normalize(
        torch.randn(6, 3, generator=torch.Generator().manual_seed(9)), dim=-1
    )
    few = torch.zeros(1, 1024, 3)
    few[0, :6] = single  # each alone
    assert not shared_directions(few, **SETTINGS).any()

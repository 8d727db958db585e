"""Directions that planes share: those of most planes first, and the same from kernels as from torch."""

from functools import partial

import pytest
import torch

from pointproj.nn.visibility.constants import SharedDirection
from pointproj.nn.visibility.directions import plain_shared_directions, shared_directions
from pointproj.ops.bridge.warp_op import warp_op

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SETTINGS = {"same": 0.05, "rounds": 3, "least": 8}


@warp_op(
    "pointproj_tests::shared_directions",
    outputs=lambda normals, same, rounds, least: {
        "found": ((len(normals), SharedDirection.COUNT, 3), normals.dtype),
    },
)
def from_kernels(launch, normals: torch.Tensor, same: float, rounds: int, least: int, found: torch.Tensor):
    found.copy_(shared_directions(launch, normals, same=same, rounds=rounds, least=least))


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("counts", "voting"), [([700, 400, 150], 1250), ([30, 8], 38), ([900, 90, 20], 2000)]
)
def test_kernels_find_what_operators_of_torch_find(device, counts, voting):
    normals, _ = planes(counts)
    normals = torch.cat([normals, normals.new_zeros(1, voting - normals.shape[1], 3)], dim=1).to(device)
    normals = torch.cat([normals, normals.flip(1)])
    found = from_kernels(normals, *SETTINGS.values())
    plain = plain_shared_directions(normals.double(), **SETTINGS)
    count = plain.any(-1).sum(1)
    assert torch.equal(found.any(-1).sum(1), count)
    # Voters with equally many votes stand for each other, and end up a little apart.
    cosine = (found.double() @ plain.mT).abs()[:, : count.min(), : count.min()]
    assert cosine.amax(-1).min() > 0.9995


def test_directions_are_the_means_of_many_planes_and_the_most_common_comes_first():
    normals, directions = planes([800, 500, 200])
    found = from_kernels(normals, *SETTINGS.values())[0]
    assert (found[:3] * directions).sum(-1).abs().min() > 0.99999
    single = torch.nn.functional.normalize(
        torch.randn(6, 3, generator=torch.Generator().manual_seed(9)), dim=-1
    )
    few = torch.zeros(1, 1024, 3)
    few[0, :6] = single  # each alone
    assert not from_kernels(few, *SETTINGS.values()).any()

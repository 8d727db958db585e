"""``compat.pointnet2`` against the definitions of PointNet++, written out for all pairs."""

import pytest
import torch
from torch import Tensor

from pointproj.compat import pointnet2
from tests.compat.comparison import assert_same_derivatives, points, squared_distances


@pytest.mark.parametrize("known", [40, 3, 2])
def test_three_nearest(known: int):
    unknown, known = points(2, 9, 3, dtype=torch.float32), points(2, known, 3, seed=1, dtype=torch.float32)
    squared = squared_distances(unknown, known)
    expected = squared.sort(dim=2, stable=True)
    dist, idx = pointnet2.three_nn(unknown, known)
    there = min(3, known.shape[1])
    assert idx.dtype == torch.int32
    assert torch.equal(idx[..., :there].long(), expected.indices[..., :3])
    assert (idx[..., there:] == 0).all()
    torch.testing.assert_close(dist[..., :there], expected.values[..., :3].sqrt())
    assert dist[..., there:].isinf().all()


def test_derivatives_of_distances():
    inputs = {"unknown": points(2, 9, 3), "known": points(2, 20, 3, seed=1)}
    idx = squared_distances(*inputs.values()).argsort(dim=2)[..., :3]

    def by_definition(unknown: Tensor, known: Tensor) -> Tensor:
        return (unknown[:, :, None] - known[torch.arange(2)[:, None, None], idx]).norm(dim=-1)

    assert_same_derivatives(
        lambda unknown, known: pointnet2.three_nn(unknown, known)[0], by_definition, inputs
    )


def test_interpolation_and_all_its_derivatives():
    inputs = {"features": points(2, 5, 20), "weight": points(2, 9, 3, seed=1)}
    idx = torch.randint(20, (2, 9, 3), generator=torch.Generator().manual_seed(2), dtype=torch.int32)

    def by_definition(features: Tensor, weight: Tensor) -> Tensor:
        picked = torch.nn.functional.one_hot(idx.long(), 20).double()
        return torch.einsum("bcm,bnkm,bnk->bcn", features, picked, weight)

    def ours(features: Tensor, weight: Tensor) -> Tensor:
        return pointnet2.three_interpolate(features, idx, weight)

    assert_same_derivatives(ours, by_definition, inputs)


def test_a_feature_propagation_layer_trains_its_positions():
    """As networks write it, with a known point among the unknown ones."""
    unknown, known = points(1, 6, 3).requires_grad_(), points(1, 20, 3, seed=1).requires_grad_()
    with torch.no_grad():
        unknown[0, 2] = known[0, 4]
    dist, idx = pointnet2.three_nn(unknown, known)
    weight = 1.0 / (dist + 1e-8)
    weight = weight / weight.sum(dim=2, keepdim=True)
    pointnet2.three_interpolate(points(1, 4, 20), idx, weight).square().sum().backward()
    assert unknown.grad.isfinite().all()
    assert known.grad.abs().sum() > 0


@pytest.mark.parametrize("nsample", [1, 4, 64])
def test_ball_query_takes_the_first(nsample: int):
    xyz, new_xyz = points(2, 50, 3, dtype=torch.float32), points(2, 7, 3, seed=1, dtype=torch.float32)
    new_xyz[1, 2] = 9.0  # an empty ball
    xyz[0, 3] = new_xyz[0, 0] + torch.tensor([0.0, 0.0, 0.5])  # at the radius, so outside
    inside = squared_distances(new_xyz, xyz) < 0.25
    idx = pointnet2.ball_query(0.5, nsample, xyz, new_xyz)
    assert idx.dtype == torch.int32
    for row, found in zip(inside.flatten(0, 1), idx.flatten(0, 1).tolist(), strict=True):
        first = row.nonzero()[:nsample, 0].tolist()
        assert found == first + [first[0] if first else 0] * (nsample - len(first))


def test_grouping_and_all_its_derivatives():
    inputs = {"xyz": points(2, 20, 3), "new_xyz": points(2, 4, 3, seed=1), "features": points(2, 5, 20)}
    idx = pointnet2.ball_query(0.6, 3, inputs["xyz"], inputs["new_xyz"]).long()
    clouds = torch.arange(2)[:, None, None]

    def by_definition(xyz: Tensor, new_xyz: Tensor, features: Tensor) -> Tensor:
        relative = (xyz[clouds, idx] - new_xyz[:, :, None]).permute(0, 3, 1, 2)
        own = features.mT[clouds, idx].permute(0, 3, 1, 2)
        alone = torch.cat([xyz.mT, features], dim=1)[:, :, None]
        return torch.cat([torch.cat([relative, own], dim=1), alone.expand(-1, -1, 4, -1)], dim=3)

    def ours(xyz: Tensor, new_xyz: Tensor, features: Tensor, **options: bool) -> Tensor:
        alone = pointnet2.GroupAll(**options)(xyz, None, features)
        groups = pointnet2.QueryAndGroup(0.6, 3, **options)(xyz, new_xyz, features)
        return torch.cat([groups, alone.expand(-1, -1, 4, -1)], dim=3)

    assert_same_derivatives(ours, by_definition, inputs)
    assert torch.equal(ours(**inputs, use_xyz=False), ours(**inputs)[:, 3:])


def test_farthest_points_begin_with_the_first():
    xyz = points(2, 30, 3)
    idx = pointnet2.furthest_point_sample(xyz, 9)
    for cloud, rows in zip(xyz, idx.tolist(), strict=True):
        for count in range(1, 9):
            nearest = (cloud[:, None] - cloud[rows[:count]]).norm(dim=2).amin(1)
            assert rows[count] == nearest.argmax()
    assert idx.dtype == torch.int32
    assert (idx[:, 0] == 0).all()
    chosen = pointnet2.gather_operation(xyz.mT.contiguous(), idx)
    assert torch.equal(chosen[1, :, 4], xyz[1, idx[1, 4]])


def test_errors():
    with pytest.raises(ValueError, match="expected features, or use_xyz"):
        pointnet2.GroupAll(use_xyz=False)(points(2, 9, 3))
    with pytest.raises(ValueError, match="idx and weight must have one shape"):
        pointnet2.three_interpolate(points(2, 5, 20), torch.zeros(2, 9, 3).int(), points(2, 8, 3))
    with pytest.raises(ValueError, match="equally many clouds"):
        pointnet2.three_nn(points(2, 9, 3), points(1, 9, 3))

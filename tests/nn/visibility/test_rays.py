"""Visibility past the disks of a cloud: the kernels against every ray and every disk in fp64."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from pointproj.nn.visibility import disk_grid as disk_grid_module
from pointproj.nn.visibility import plain
from pointproj.nn.visibility.constants import Edge, Ray
from pointproj.nn.visibility.disk_grid import DiskGrid
from pointproj.nn.visibility.rays import PAIRS, directions, neighboring, soft_visibility


def disk_grid(points, normals, radii, edges=None):
    if edges is None:
        edges = points.new_zeros(*points.shape[:2], Edge.COUNT, 4)
    return disk_grid_module.disk_grid(points, normals, radii, edges)


def random_disks(clouds, points, seed, largest=0.3):
    generator = torch.Generator().manual_seed(seed)
    centres = torch.rand(clouds, points, 3, generator=generator) * 1.8 - 0.9
    normals = normalize(torch.randn(clouds, points, 3, generator=generator), dim=-1)
    return centres, normals, largest * torch.rand(clouds, points, generator=generator)


def random_points(clouds, points, seed):
    return torch.rand(clouds, points, 3, generator=torch.Generator().manual_seed(seed)) * 3 - 1.5


def expected(points, grid):
    in_double = [tensor.double() if tensor.is_floating_point() else tensor for tensor in grid]
    return plain.soft_visibility(points.double(), *in_double).float()


def ball(points=800, radius=0.7):
    outwards = torch.from_numpy(np.random.default_rng(0).standard_normal((1, points, 3))).float()
    outwards = normalize(outwards, dim=-1)
    return radius * outwards, outwards, torch.full((1, points), 0.14)


@pytest.mark.parametrize(
    ("clouds", "count", "queries", "largest"),
    [(1, 1, 7, 0.5), (3, 37, 65, 0.3), (2, 301, 129, 0.1), (1, 67, 33, 4.0), (1, 500, 40, 0.01)],
)
def test_every_ray_meets_what_it_meets_without_cells(device, clouds, count, queries, largest):
    grid = disk_grid(*(tensor.to(device) for tensor in random_disks(clouds, count, count, largest)))
    points = random_points(clouds, queries, 1).to(device)
    seen = soft_visibility(points, grid)
    torch.testing.assert_close(seen, expected(points, grid), atol=1e-6, rtol=0)
    assert seen.std() > 0


def test_disks_end_at_their_edges(device):
    centres, normals, radii = random_disks(2, 151, 3)
    generator = torch.Generator().manual_seed(4)
    across = torch.randn(2, 151, 3, 3, generator=generator)
    across = normalize(
        across - (across * normals[:, :, None]).sum(-1, keepdim=True) * normals[:, :, None], dim=-1
    )
    edges = torch.cat([across, 0.2 * torch.rand(2, 151, 3, 1, generator=generator)], dim=-1)
    edges[:, ::3] = 0
    inputs = (tensor.to(device) for tensor in (centres, normals, radii, edges))
    grid = disk_grid(*inputs)
    points = random_points(2, 77, 5).to(device)
    seen = soft_visibility(points, grid)
    torch.testing.assert_close(seen, expected(points, grid), atol=1e-6, rtol=0)
    whole = disk_grid(*(tensor.to(device) for tensor in (centres, normals, radii)))
    assert (seen >= soft_visibility(points, whole)).all()
    assert (seen > soft_visibility(points, whole)).any()


def test_beside_the_samples_of_a_closed_surface_one_side_is_open(device):
    centres, normals, radii = (tensor.to(device) for tensor in ball())
    grid = disk_grid(centres, normals, radii)
    points = torch.cat([centres + 0.04 * normals, centres - 0.04 * normals], dim=1)
    seen = soft_visibility(points, grid)
    torch.testing.assert_close(seen, expected(points, grid), atol=1e-6, rtol=0)
    outer, inner = seen[0, :800].mean(0).cpu(), seen[0, 800:].mean(0).cpu()
    assert inner[2] < 0.01 < 0.1 < outer[2]
    middle = soft_visibility(torch.zeros(1, 1, 3, device=device), grid)
    assert middle[0, 0].tolist() == [middle[0, 0, 0], 0, 0, 0]  # small disks leave single holes


def test_a_hole_lets_one_ray_out_and_an_opening_lets_out_neighbours():
    along = normalize(torch.from_numpy(directions), dim=-1).float()[None]
    opening = [5, *np.flatnonzero(neighboring[5])]
    beside = int(neighboring[opening][:, opening].sum()) // 2
    for rays, pairs in (([], 0), ([5], 0), (opening, beside)):
        kept = torch.ones(Ray.COUNT, dtype=torch.bool)
        kept[rays] = False
        one_each = disk_grid(0.7 * along[:, kept], along[:, kept], torch.full((1, int(kept.sum())), 0.05))
        seen = soft_visibility(torch.zeros(1, 1, 3), one_each)[0, 0]
        torch.testing.assert_close(seen, torch.tensor([len(rays) / Ray.COUNT, pairs / PAIRS] * 2))


def test_directions_are_spread_evenly():
    nearest = np.sort(directions @ directions.T, axis=1)[:, -2]
    apart = np.degrees(np.arccos(nearest))
    assert 15 < apart.min() < apart.max() < 30
    assert set(neighboring.sum(1)) <= {4, 5, 6, 7}
    assert np.abs(directions.mean(0)).max() < 0.01


def test_what_is_not_finite_hides_nothing_and_sees_nothing():
    centres, normals, radii = random_disks(1, 50, 0)
    points = random_points(1, 9, 2)
    gone = [3, 7, 11, 19]
    kept = torch.tensor([row for row in range(50) if row not in gone])
    fewer = soft_visibility(points, disk_grid(centres[:, kept], normals[:, kept], radii[:, kept]))
    centres[0, 3, 1], normals[0, 7, 0], radii[0, 11], normals[0, 19] = torch.nan, torch.inf, torch.nan, 0
    grid = disk_grid(centres, normals, radii)
    torch.testing.assert_close(soft_visibility(points, grid), fewer)
    points[0, 4, 2] = torch.nan
    seen = soft_visibility(points, grid)
    assert seen[0, 4].isnan().all()
    assert torch.equal(seen[0, 5:], fewer[0, 5:])


def test_the_sign_of_a_normal_makes_no_difference_and_a_disk_in_a_plane_with_the_point_none():
    centres, normals, radii = random_disks(1, 40, 5)
    points = random_points(1, 20, 6)
    seen = soft_visibility(points, disk_grid(centres, normals, radii))
    assert torch.equal(soft_visibility(points, disk_grid(centres, -normals, radii)), seen)
    flat = torch.tensor([[[0.0, 0, 0]]]), torch.tensor([[[0.0, 0, 1]]]), torch.tensor([[0.5]])
    assert soft_visibility(torch.tensor([[[0.1, 0, 0]]]), disk_grid(*flat))[0, 0].tolist() == [1, 1, 1, 1]


def test_it_is_a_constant_to_autograd_in_the_dtype_of_the_points():
    centres, normals, radii = (tensor.double().requires_grad_() for tensor in random_disks(1, 20, 0))
    points = random_points(1, 5, 1).double().requires_grad_()
    seen = soft_visibility(points, disk_grid(centres, normals, radii))
    assert seen.dtype == torch.float64
    assert not seen.requires_grad


def test_clouds_do_not_hide_each_other_and_no_points_no_rows():
    centres, normals, radii = random_disks(3, 60, 3)
    points = random_points(3, 11, 4)
    together = soft_visibility(points, disk_grid(centres, normals, radii))
    alone = [
        soft_visibility(points[i : i + 1], disk_grid(*(t[i : i + 1] for t in (centres, normals, radii))))
        for i in range(3)
    ]
    assert torch.equal(together, torch.cat(alone))
    assert soft_visibility(points[:, :0], disk_grid(centres, normals, radii)).shape == (3, 0, 4)


def test_registered_operators_pass_opcheck_and_compile_whole():
    centres, normals, radii = random_disks(2, 30, 0)
    points = random_points(2, 9, 1)
    grid = disk_grid(centres, normals, radii)
    torch.library.opcheck(torch.ops.pointproj.soft_visibility.default, (points, *grid))

    def whole(points, centres, normals, radii):
        return soft_visibility(points, disk_grid(centres, normals, radii))

    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(points, centres, normals, radii), soft_visibility(points, grid))


@pytest.mark.gpu
def test_one_cuda_graph_holds_it():
    inputs = [tensor.cuda() for tensor in (random_points(2, 50, 1), *random_disks(2, 300, 0))]

    def whole():
        return soft_visibility(inputs[0], disk_grid(*inputs[1:]))

    whole()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = whole()
    for tensor, other in zip(inputs, (random_points(2, 50, 8), *random_disks(2, 300, 9)), strict=True):
        tensor.copy_(other)
    graph.replay()
    assert torch.equal(captured, whole())
    on_cpu = disk_grid(*(tensor.cpu() for tensor in inputs[1:]))
    torch.testing.assert_close(captured.cpu(), soft_visibility(inputs[0].cpu(), on_cpu), atol=1e-6, rtol=0)
    assert isinstance(on_cpu, DiskGrid)

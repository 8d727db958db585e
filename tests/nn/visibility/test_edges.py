"""Edges of flat pieces: at the planes of other faces, where no sample of the same plane is beyond."""

import torch

from pointproj import knn
from pointproj.nn.visibility import plain
from pointproj.nn.visibility.edges import nearest_edges

RADIUS = 0.09


def box(count=1200, seed=0, clouds=1):
    """Points on the faces of boxes of 1.0 by 0.8 by 0.04, and unit normals."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.tensor([1.0, 0.8, 0.04])
    axis = torch.multinomial(size.prod() / size, clouds * count, replacement=True, generator=generator)
    points = torch.rand(clouds * count, 3, generator=generator) - 0.5
    points[torch.arange(clouds * count), axis] = torch.randint(0, 2, axis.shape, generator=generator) - 0.5
    return (points * size).view(clouds, count, 3), torch.eye(3)[axis].view(clouds, count, 3), size


def around(points):
    return torch.stack([knn(cloud, cloud, 33, backend="torch")[1] for cloud in points])


def radii_of(points):
    return torch.full(points.shape[:2], RADIUS, device=points.device)


def test_faces_of_a_box_end_where_others_begin(device):
    points, normals, size = box()
    inputs = (tensor.to(device) for tensor in (points, around(points), normals, radii_of(points)))
    edges = nearest_edges(*inputs).cpu()[0]
    on_top = normals[0, :, 2] == 1
    to_edge = (size / 2 - points[0].abs())[:, :2]
    distance, axis = to_edge.min(dim=1)
    near = on_top & (distance < 0.03) & (to_edge.amax(1) > 0.2)
    assert near.sum() > 30
    nearest = edges[:, 0]
    torch.testing.assert_close(nearest[near, 3], distance[near], atol=1e-5, rtol=0)
    outwards = torch.eye(3)[axis] * points[0].sign()
    torch.testing.assert_close(nearest[near, :3], outwards[near], atol=1e-5, rtol=0)
    inner = on_top & (distance > 0.2)
    assert not edges[inner].any()
    narrow = (normals[0, :, 0] == 1) & (points[0, :, 1].abs() < 0.2)
    total = edges[narrow][:, :2, 3].sum(1)  # a band ends above and below
    torch.testing.assert_close(total, torch.full_like(total, 0.04), atol=1e-5, rtol=0)


def test_faces_end_at_a_gap_to_another_in_the_same_plane(device):
    points, normals, size = box()
    gap = 0.03  # less than samples are apart
    points, normals = torch.cat([points, points], dim=1), torch.cat([normals, normals], dim=1)
    points[0, :1200, 0] -= size[0] / 2 + gap / 2
    points[0, 1200:, 0] += size[0] / 2 + gap / 2
    inputs = (tensor.to(device) for tensor in (points, around(points), normals, radii_of(points)))
    edges = nearest_edges(*inputs).cpu()[0]
    distance = points[0, :, 0].abs() - gap / 2
    beside = (normals[0, :, 2] == 1) & (distance < 0.03) & (points[0, :, 1].abs() < 0.3)
    assert beside.sum() > 30
    found = (edges[..., 3] - distance[:, None]).abs() < 1e-5
    across = edges[..., 0] * -points[0, :, :1].sign() > 0.999
    assert (found & across).any(1)[beside].float().mean() > 0.8  # where the gap's sides have samples


def test_the_kernel_finds_what_operators_of_torch_find(device):
    points, normals, _ = box(301, seed=1, clouds=2)
    normals[:, ::7] = 0
    rows = around(points)
    rows[0, 3, 5:] = -1
    inputs = [tensor.to(device) for tensor in (points, rows, normals, radii_of(points))]
    found = nearest_edges(*inputs)
    assert found.shape == (2, 301, 3, 4)
    torch.testing.assert_close(found, plain.nearest_edges(*inputs), atol=1e-5, rtol=0)
    assert found[:, ::7].count_nonzero() == 0 < found.count_nonzero()


def test_one_graph_holds_it_and_nothing_has_gradients():
    points, normals, _ = box(100, seed=2)
    inputs = points.double().requires_grad_(), around(points), normals, radii_of(points)
    compiled = torch.compile(nearest_edges, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*inputs), nearest_edges(*inputs))
    assert not nearest_edges(*inputs).requires_grad

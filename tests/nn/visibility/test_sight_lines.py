"""Lines of sight, against every line and every point in double precision."""

import torch

from pointproj.nn.visibility import plain
from pointproj.nn.visibility.constants import SightLine
from pointproj.nn.visibility.sight_lines import nearest_sight_lines


def scan(clouds=2, points=57, queries=23, seed=0):
    generator = torch.Generator().manual_seed(seed)
    samples = torch.rand(clouds, points, 3, generator=generator) * 1.8 - 0.9
    sensors = torch.nn.functional.normalize(torch.randn(clouds, points, 3, generator=generator), dim=-1)
    sensors[:, ::5] = 0
    return torch.rand(clouds, queries, 3, generator=generator) * 2 - 1, samples, sensors


def test_distances_are_those_of_the_nearest_lines(device):
    points, samples, sensors = (tensor.to(device) for tensor in scan())
    beyond = torch.tensor([0.3, 1.1], device=device)
    got = nearest_sight_lines(points, samples, sensors, beyond)
    in_torch = plain.nearest_sight_lines(*(tensor.double() for tensor in (points, samples, sensors, beyond)))
    torch.testing.assert_close(got.double(), in_torch, atol=1e-5, rtol=1e-5)
    away = points.double()[:, :, None] - samples.double()[:, None]
    ahead = (away * sensors.double()[:, None]).sum(-1)
    distance = (away.square().sum(-1) - ahead.square()).clamp(min=0).sqrt()
    for place, least in enumerate((torch.zeros_like(beyond), beyond)):
        expected = torch.where(ahead > least[:, None, None], distance, SightLine.NONE).amin(2)
        torch.testing.assert_close(got[..., place].double(), expected, atol=1e-5, rtol=1e-5)


def test_clouds_without_lines_and_points_that_are_not_finite(device):
    points, samples, sensors = (tensor.to(device) for tensor in scan())
    points[0, 3, 1] = torch.inf
    inputs = points, samples, sensors, torch.tensor([0.0, 0.3], device=device)
    got = nearest_sight_lines(*inputs)
    torch.testing.assert_close(got, plain.nearest_sight_lines(*inputs), equal_nan=True, atol=1e-5, rtol=1e-5)
    others = torch.arange(points.shape[1], device=device) != 3
    assert (got[0, others] == SightLine.NONE).all()
    assert got[0, 3].isnan().all()
    assert (got[1] < SightLine.NONE).any()


def test_the_dtype_is_that_of_the_points_and_nothing_has_gradients():
    points, samples, sensors = (tensor.double().requires_grad_() for tensor in scan())
    got = nearest_sight_lines(points, samples, sensors, torch.ones(2, dtype=torch.float64))
    assert got.dtype == torch.float64
    assert not got.requires_grad


def test_one_graph_holds_it():
    points, samples, sensors = scan()
    beyond = torch.ones(2)
    compiled = torch.compile(nearest_sight_lines, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(points, samples, sensors, beyond), nearest_sight_lines(*scan(), beyond)
    )

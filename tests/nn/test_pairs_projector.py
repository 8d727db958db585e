"""The network of pairs: what holds for every network."""

import torch

from pointproj.nn.pairs_projector import PairsProjector
from tests.nn.test_attention_projector import cloud


def network(**settings):
    torch.manual_seed(0)
    return PairsProjector(**{"k": 5, "wide": 3, "hidden_channels": 8, "backend": "torch", **settings})


def test_batch_equals_the_loop_and_parts_equal_the_whole():
    query_points, reference_points = cloud()
    model = network()
    expected = torch.stack([model(query_points, points) for points in reference_points])
    torch.testing.assert_close(model(query_points, reference_points), expected)
    encoding = model.encode(reference_points)
    parts = [model.decode(part, encoding) for part in query_points.split(4)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)


def test_every_parameter_learns_and_the_whole_is_one_graph():
    query_points, reference_points = cloud()
    model = network()
    expected = model(query_points, reference_points)
    expected.square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.any()] == []
    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(query_points, reference_points)
    torch.testing.assert_close(got, expected)


def test_clouds_of_fewer_points_than_the_larger_scale_spans():
    query_points, reference_points = cloud()
    assert network(k=20)(query_points, reference_points).isfinite().all()

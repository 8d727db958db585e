"""The networks by attention and of pairs: what holds for every network."""

import pytest
import torch

from pointproj.nn.attention_projector import AttentionProjector
from pointproj.nn.pairs_projector import PairsProjector

ATTENTION = AttentionProjector, {"k": 7, "heads": 2}
PAIRS = PairsProjector, {"k": 5, "wide": 3}
FIELDS = {"query_channels": 2, "pool": True, "blocks": 1}
every_network = pytest.mark.parametrize(
    ("of", "more"),
    [(of, more) for of in (ATTENTION, PAIRS) for more in ({}, FIELDS)],
    ids=["attention", "attention-fields", "pairs", "pairs-fields"],
)


def cloud(clouds=2):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(11, 3, generator=generator), torch.rand(clouds, 40, 3, generator=generator)


def network(of, **settings):
    torch.manual_seed(0)
    return of[0](**{"hidden_channels": 8, "backend": "torch", **of[1], **settings})


@every_network
def test_batch_equals_the_loop_and_parts_equal_the_whole(of, more):
    query_points, reference_points = cloud()
    model, known = network(of, **more), torch.rand(2, 11, 2) if more else None
    given = [{} if known is None else {"query_features": each} for each in (known if more else [0, 0])]
    expected = [
        model(query_points, points, **own) for points, own in zip(reference_points, given, strict=True)
    ]
    torch.testing.assert_close(
        model(query_points, reference_points, query_features=known), torch.stack(expected)
    )
    encoding = model.encode(reference_points)
    parts = [
        model.decode(query_points[rows], encoding, query_features=None if known is None else known[:, rows])
        for rows in (slice(0, 4), slice(4, None))
    ]
    torch.testing.assert_close(torch.cat(parts, dim=1), torch.stack(expected))


@every_network
def test_every_parameter_learns_and_the_whole_is_one_graph(of, more):
    query_points, reference_points = cloud()
    model, given = network(of, **more), {"query_features": torch.rand(2, 11, 2)} if more else {}
    expected = model(query_points, reference_points, **given)
    expected.square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.any()] == []
    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend="aot_eager")(query_points, reference_points, **given)
    torch.testing.assert_close(got, expected)


def test_clouds_of_fewer_points_than_the_larger_scale_spans():
    query_points, reference_points = cloud()
    assert network(PAIRS, k=20)(query_points, reference_points).isfinite().all()


def test_moving_and_scaling_a_cloud_leaves_what_is_relative():
    query_points, reference_points = cloud(1)
    model = network(ATTENTION, in_channels=2)
    features = torch.rand(1, 40, 2)
    for parameter in model.query.parameters():
        torch.nn.init.zeros_(parameter)  # the query depends on the position itself
    expected = model(query_points, reference_points, features=features)
    got = model(3 * query_points + 1, 3 * reference_points + 1, features=features)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_distances_begin_as_that_of_the_nearest_point():
    query_points, reference_points = cloud(1)
    query_points.requires_grad_()
    got = network(ATTENTION, predicts="distance")(query_points, reference_points[0])
    torch.testing.assert_close(got, torch.cdist(query_points, reference_points[0]).amin(1, keepdim=True))
    (slope,) = torch.autograd.grad(got.sum(), query_points)
    torch.testing.assert_close(slope.norm(dim=-1), torch.ones(11))


@pytest.mark.parametrize(
    ("settings", "words"), [({"heads": 3}, "of 3 heads, got 8"), ({"predicts": "colour"}, "'colour'")]
)
def test_impossible_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        network(ATTENTION, **settings)

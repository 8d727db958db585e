"""The network of visibility: what holds for every network, and attention to sides by hand."""

import pytest
import torch

from pointproj import build_index, knn
from pointproj.nn.visibility import network as module
from pointproj.nn.visibility import surface
from pointproj.nn.visibility.attention import SideAttention
from pointproj.nn.visibility.network import VisibilityNetwork


def cloud(clouds=2, points=40, queries=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    reference_points = torch.rand(clouds, points, 3, generator=generator, dtype=torch.float64) * 1.8 - 0.9
    query_points = torch.rand(queries, 3, generator=generator, dtype=torch.float64) * 2 - 1
    return query_points, reference_points


def directions(seed=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(2, 40, 3, generator=generator).double(), dim=-1)


def network(**settings):
    torch.manual_seed(0)
    return VisibilityNetwork(**{"hidden_channels": 8, "backend": "torch", **settings}).double()


@pytest.mark.parametrize("clouds", [1, 2])
def test_queries_decoded_in_parts_equal_the_whole(clouds):
    query_points, reference_points = cloud(clouds)
    model = network()
    encoding = model.encode(reference_points)
    parts = [model.decode(part, encoding) for part in query_points.split(4)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(query_points, reference_points))


def test_batch_equals_the_loop_over_clouds():
    query_points, reference_points = cloud()
    model = network()
    one_by_one = torch.stack([model(query_points, points) for points in reference_points])
    torch.testing.assert_close(model(query_points, reference_points), one_by_one)
    torch.testing.assert_close(model(query_points.expand(2, -1, -1), reference_points), one_by_one)


@pytest.mark.parametrize(
    "settings", [{"in_channels": 0, "rounds": 2}, {"sensors": True, "in_channels": 2}], ids=str
)
def test_every_parameter_learns(settings):
    features = torch.rand(2, 40, 2, generator=torch.Generator().manual_seed(5)).double()
    given = torch.cat([features, directions()], dim=-1) if settings["in_channels"] else None
    model = network(**settings)
    model(*cloud(), features=given).square().sum().backward()
    silent = [name for name, parameter in model.named_parameters() if not parameter.grad.any()]
    assert silent == []


@pytest.mark.parametrize("predicts", ["distance", "signed_distance"])
def test_distances_begin_as_the_soft_distance(predicts):
    query_points, reference_points = cloud(1)
    model = network(predicts=predicts)
    distances, rows = knn(query_points, reference_points[0], 13, backend="torch")
    weights = torch.softmax(-distances / model.log_sigma.exp(), -1)
    mean = (weights[..., None] * reference_points[0][rows]).sum(1)
    expected = (mean - query_points).norm(dim=-1, keepdim=True)
    torch.testing.assert_close(model(query_points, reference_points)[0], expected)


def test_second_derivatives_exist_as_the_eikonal_term_needs_them():
    query_points, reference_points = cloud(1, points=33, queries=2)
    model = network()
    encoding = model.encode(reference_points)

    def decoded(query_points):
        return model.decode(query_points, encoding)

    query_points = query_points[None].requires_grad_()
    assert torch.autograd.gradcheck(decoded, query_points)
    assert torch.autograd.gradgradcheck(decoded, query_points)


def test_one_graph_holds_the_whole_model():
    query_points, reference_points = (points.float() for points in cloud())
    model = network().float()
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(query_points, reference_points).graph_break_count == 0


def test_a_query_that_is_not_finite_spoils_its_own_row_alone():
    query_points, reference_points = cloud(1)
    model = network()
    expected = model(query_points, reference_points)[0]
    query_points[3, 1] = torch.nan
    predicted = model(query_points, reference_points)[0]
    assert predicted[3].isnan().all()
    others = torch.arange(len(query_points)) != 3
    torch.testing.assert_close(predicted[others], expected[others])


def test_a_cloud_needs_as_many_points_as_neighbours():
    query_points, reference_points = cloud(1, points=4)
    with pytest.raises(ValueError, match=r"33.*4"):
        network()(query_points, reference_points)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_channels": 12}, "multiple of 8, got 12"),
        ({"neighbors": 12}, "at least 13 neighbours.*got 12"),
        ({"predicts": "colour"}, "'colour'"),
    ],
)
def test_impossible_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        network(**settings)


def test_the_sign_of_normals_makes_no_difference(monkeypatch):
    query_points, reference_points = cloud()
    model, sensors = network(sensors=True), directions()
    expected = model(query_points, reference_points, features=sensors)
    planes = surface.local_planes

    def flipped(*arguments):
        found = planes(*arguments)
        signs = torch.where(torch.arange(found.normals.shape[1]) % 3 == 0, -1.0, 1.0).double()
        return found._replace(normals=found.normals * signs[:, None])

    monkeypatch.setattr(surface, "local_planes", flipped)
    torch.testing.assert_close(model(query_points, reference_points, features=sensors), expected)


def test_sensors_that_are_not_known_are_zeros():
    query_points, reference_points = cloud()
    model = network(sensors=True)
    unknown = torch.zeros_like(reference_points)
    without = model(query_points, reference_points)
    torch.testing.assert_close(model(query_points, reference_points, features=unknown), without)
    assert not torch.allclose(model(query_points, reference_points, features=directions()), without)


def test_attention_is_told_how_far_along_and_beside_sight_lines_points_are():
    query_points, reference_points = cloud(1)
    sensors, units = directions()[:1], torch.full((1, 40, 1), 0.5).double()
    places = torch.cat([reference_points, directions(1)[:1], units, sensors], dim=-1)
    rows = torch.arange(36).view(1, 9, 4)
    pair, _ = SideAttention(1, 1, 8, sensors=True)._pairs(query_points[None], places, rows, None)
    for query, told, nearest in zip(query_points, pair[0], rows[0], strict=True):
        for row, (*_, along, beside, known) in zip(nearest, told, strict=True):
            away = (query - reference_points[0, row]) / 0.5
            foot = (away @ sensors[0, row]) * sensors[0, row]
            torch.testing.assert_close(along, foot @ sensors[0, row])
            torch.testing.assert_close(beside, (away - foot).norm())
            torch.testing.assert_close(known, torch.ones_like(known))


def test_attention_is_a_softmax_over_the_neighbours_by_hand():
    query_points, reference_points = cloud(1)
    generator = torch.Generator().manual_seed(3)
    normals, own_normals = (
        torch.nn.functional.normalize(torch.randn(n, 3, generator=generator).double(), dim=-1)
        for n in (40, 9)
    )
    known, sides = (torch.randn(*s, generator=generator).double() for s in ((9, 2), (40, 2, 3)))
    units = torch.rand(40, generator=generator).double() + 0.1
    torch.manual_seed(0)
    attention = SideAttention(2, 3, 16, own_normals=True).double()
    _, rows = knn(query_points, reference_points[0], 4, backend="torch")
    places = torch.cat([reference_points[0], normals, units[:, None]], dim=1)
    batch = (known, sides, query_points, places, rows, own_normals)
    attended = attention(*(tensor[None] for tensor in batch))[0]
    for query, own, nearest, knows, got in zip(query_points, own_normals, rows, known, attended, strict=True):
        seen = []
        for row in nearest.tolist():
            away = (reference_points[0, row] - query) / units[row]
            height = -away @ normals[row]
            front = 0 if height >= 0 else 1
            facing = normals[row] * (1 - 2 * front)
            along = (away.square().sum() - height**2).sqrt()
            pair = [*away, away.norm(), height.abs(), along, away @ own, facing @ own]
            both = torch.cat([sides[row, front], sides[row, 1 - front]])
            seen.append(attention.side(both) + attention.pair(torch.stack(pair)) + attention.own(knows))
        hidden = attention.hidden(torch.stack(seen).relu()).relu()
        weights = attention.logit(hidden).softmax(0).repeat_interleave(8, dim=1)
        torch.testing.assert_close(got, (weights * attention.value(hidden)).sum(0), atol=1e-6, rtol=1e-6)


def test_one_index_serves_every_search_of_a_forward_pass_and_of_each_decoded_part(monkeypatch):
    built, given = [], []

    def counted(*arguments, **settings):
        built.append(build_index(*arguments, **settings))
        return built[-1]

    def seen(operator):
        def call(*arguments, index=None, **settings):
            given.append(index)
            return operator(*arguments, index=index, **settings)

        return call

    monkeypatch.setattr(module, "build_index", counted)
    monkeypatch.setattr(module, "knn", seen(module.knn))
    query_points, reference_points = cloud()
    model = network()
    encoding = model.encode(reference_points)
    for part in query_points.split(4):
        model.decode(part, encoding)
    assert len(built) == 1
    assert len(given) >= 4
    assert all(index is built[0] for index in given)


def test_points_of_another_dtype_are_refused_with_advice():
    query_points, reference_points = cloud(1)
    with pytest.raises(TypeError, match=r"float16, got torch.float64.*autocast"):
        network().half()(query_points, reference_points)

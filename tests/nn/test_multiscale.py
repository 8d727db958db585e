import pytest
import torch

from pointproj import build_index, knn
from pointproj.nn import multiscale as multiscale_module
from pointproj.nn.attention import NeighborAttention, take_rows
from pointproj.nn.multiscale import Multiscale
from pointproj.nn.refinement import cell_centres, trilinear


def cloud(clouds=2, points=40, queries=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    reference_points = torch.rand(clouds, points, 3, generator=generator, dtype=torch.float64) * 1.8 - 0.9
    query_points = torch.rand(queries, 3, generator=generator, dtype=torch.float64) * 2 - 1
    return query_points, reference_points


def multiscale(**settings):
    torch.manual_seed(0)
    settings = {
        "side": 8,
        "levels": 2,
        "hidden_channels": 16,
        "grid_channels": 8,
        "neighbors": 5,
        "backend": "torch",
        **settings,
    }
    return Multiscale(**settings).double()


@pytest.mark.parametrize("clouds", [1, 2])
def test_queries_decoded_in_parts_equal_the_whole(clouds):
    query_points, reference_points = cloud(clouds)
    model = multiscale()
    encoding = model.encode(reference_points)
    parts = [model.decode(part, encoding) for part in query_points.split(4)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(query_points, reference_points))


def test_batch_equals_the_loop_over_clouds():
    query_points, reference_points = cloud()
    model = multiscale()
    one_by_one = torch.stack([model(query_points, points) for points in reference_points])
    torch.testing.assert_close(model(query_points, reference_points), one_by_one)
    torch.testing.assert_close(model(query_points.expand(2, -1, -1), reference_points), one_by_one)


def test_every_parameter_learns_and_sigmas_are_among_them():
    model = multiscale()
    model(*cloud()).square().sum().backward()
    silent = [name for name, parameter in model.named_parameters() if not parameter.grad.any()]
    assert silent == []
    assert {"radius_log_sigma", "nearest_log_sigma", "query_log_sigma"} <= dict(
        model.named_parameters()
    ).keys()


@pytest.mark.parametrize("predicts", ["distance", "signed_distance"])
def test_distances_begin_as_the_soft_distance(predicts):
    query_points, reference_points = cloud(1)
    model = multiscale(predicts=predicts)
    distances, rows = knn(query_points, reference_points[0], 5, backend="torch")
    weights = torch.softmax(-distances / model.query_log_sigma.exp(), -1)
    mean = (weights[..., None] * reference_points[0][rows]).sum(1)
    expected = (mean - query_points).norm(dim=-1, keepdim=True)
    torch.testing.assert_close(model(query_points, reference_points)[0], expected)


def test_second_derivatives_exist_as_the_eikonal_term_needs_them():
    query_points, reference_points = cloud(1, points=12, queries=2)
    model = multiscale(neighbors=3)
    encoding = model.encode(reference_points)

    def decoded(query_points):
        return model.decode(query_points, encoding)

    query_points = query_points[None].requires_grad_()
    assert torch.autograd.gradcheck(decoded, query_points)
    assert torch.autograd.gradgradcheck(decoded, query_points)


def test_one_graph_holds_the_whole_model():
    query_points, reference_points = (points.float() for points in cloud())
    model = multiscale().float()
    torch._dynamo.reset()
    assert torch._dynamo.explain(model)(query_points, reference_points).graph_break_count == 0


def test_a_query_that_is_not_finite_spoils_its_own_row_alone():
    query_points, reference_points = cloud(1)
    model = multiscale()
    expected = model(query_points, reference_points)[0]
    query_points[3, 1] = torch.nan
    predicted = model(query_points, reference_points)[0]
    assert predicted[3].isnan().all()
    others = torch.arange(len(query_points)) != 3
    torch.testing.assert_close(predicted[others], expected[others])


def test_a_cloud_needs_as_many_points_as_neighbours():
    query_points, reference_points = cloud(1, points=4)
    with pytest.raises(ValueError, match=r"5.*4"):
        multiscale()(query_points, reference_points)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"side": 10, "levels": 3}, "halved 2 times, got 10"),
        ({"hidden_channels": 12}, "multiple of 8, got 12"),
        ({"neighbors": 2}, "at least 3 neighbours.*got 2"),
        ({"predicts": "colour"}, "'colour'"),
    ],
)
def test_impossible_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        multiscale(**settings)


def test_trilinear_is_exact_for_a_linear_function_between_centres():
    side = 6
    centres = cell_centres(side).double()
    torch.testing.assert_close(centres[1] - centres[0], torch.tensor([0, 0, 2 / side], dtype=torch.float64))
    slopes = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-4.0, 0.25]], dtype=torch.float64)
    points = (torch.rand(2, 50, 3, dtype=torch.float64) * 2 - 1) * (1 - 1 / side)
    values = trilinear((centres @ slopes).expand(2, -1, -1), points, side)
    torch.testing.assert_close(values, points @ slopes, atol=1e-6, rtol=1e-6)
    beyond = torch.tensor([[[1.0, 1.0, 1.0]]], dtype=torch.float64)
    torch.testing.assert_close(trilinear((centres @ slopes)[None], beyond, side)[0], (centres @ slopes)[-1:])


def test_attention_is_a_softmax_over_the_neighbours_by_hand():
    query_points, reference_points = cloud(1)
    query_points = query_points[None]
    torch.manual_seed(0)
    attention = NeighborAttention(3, 16, unit=0.1).double()
    features = torch.randn(1, 40, 3, dtype=torch.float64)
    normals = torch.nn.functional.normalize(torch.randn(1, 40, 3, dtype=torch.float64), dim=-1)
    _, rows = knn(query_points[0], reference_points[0], 4, backend="torch")
    attended = attention(query_points, reference_points, normals, features, rows[None])
    for query, nearest, got in zip(query_points[0], rows, attended[0], strict=True):
        away = (reference_points[0, nearest] - query) / 0.1
        height = -(away * normals[0, nearest]).sum(1, keepdim=True)
        known, sided = attention.neighbor(features[0, nearest]).split([16, 8], dim=1)
        pair = torch.cat([away, away.norm(dim=1, keepdim=True), height, sided * height], dim=1)
        hidden = attention.pair(pair) + known
        hidden = attention.hidden(hidden.relu()).relu()
        weights = attention.logit(hidden).softmax(0).repeat_interleave(8, dim=1)
        torch.testing.assert_close(got, (weights * attention.value(hidden)).sum(0), atol=1e-6, rtol=1e-6)


def test_rows_are_taken_within_each_cloud():
    features = torch.arange(12.0).view(2, 3, 2)
    taken = take_rows(features, torch.tensor([[[2, 0]], [[1, 1]]]))
    torch.testing.assert_close(taken, torch.tensor([[[[4.0, 5], [0, 1]]], [[[8.0, 9], [8, 9]]]]))


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

    monkeypatch.setattr(multiscale_module, "build_index", counted)
    for name in ("knn", "knn_aggregate", "radius_aggregate"):
        monkeypatch.setattr(multiscale_module, name, seen(getattr(multiscale_module, name)))
    query_points, reference_points = cloud()
    model = multiscale()
    encoding = model.encode(reference_points)
    for part in query_points.split(4):
        model.decode(part, encoding)
    assert len(built) == 1
    assert len(given) >= 10
    assert all(index is built[0] for index in given)

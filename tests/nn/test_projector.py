import pytest
import torch

from pointproj import Projector, knn
from pointproj.nn.mlp import MLP

K, SIGMA = 4, 0.2


def cloud(points=40, queries=9, clouds=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch = () if clouds is None else (clouds,)
    reference_points = torch.rand(*batch, points, 3, generator=generator, dtype=dtype) * 2 - 1
    query_points = torch.rand(queries, 3, generator=generator, dtype=dtype) * 2 - 1
    return query_points, reference_points


def projector(**settings):
    torch.manual_seed(0)
    settings = {"k": K, "sigma": SIGMA, "hidden_channels": 6, "backend": "torch", **settings}
    return Projector(**settings).double()


def test_parameters_are_the_tutorials_two_mlps():
    shapes = [tuple(parameter.shape) for parameter in Projector().parameters()]
    reference_mlp = [(25, 3), (25,), (25, 25), (25,), (25, 25), (25,)]
    query_mlp = [(25, 25), (25,), (25, 25), (25,), (1, 25), (1,)]
    assert shapes == reference_mlp + query_mlp


def test_mlp_has_relu_between_its_layers_and_none_at_the_end():
    mlp = MLP(2, 3, 2)
    x = torch.randn(5, 2)
    expected = mlp[0](x).clamp(min=0)
    expected = mlp[2](expected).clamp(min=0)
    torch.testing.assert_close(mlp(x), mlp[4](expected))


def weights_and_neighbours(query_points, reference_points):
    distances, indices = knn(query_points, reference_points, K, backend="torch")
    return torch.softmax(-distances / SIGMA, -1), indices


def test_without_context_is_mlp_aggregation_mlp():
    query_points, reference_points = cloud()
    model = projector()
    weights, indices = weights_and_neighbours(query_points, reference_points)
    aggregated = (weights[..., None] * model.reference_mlp(reference_points)[indices]).sum(1)
    torch.testing.assert_close(model(query_points, reference_points), model.query_mlp(aggregated))


def test_context_is_displacement_soft_distance_spread_and_has_neighbour():
    query_points, reference_points = cloud()
    model = projector(context=True)
    seen = []
    model.query_mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(query_points, reference_points)

    weights, indices = weights_and_neighbours(query_points, reference_points)
    neighbours = reference_points[indices]
    mean = (weights[..., None] * neighbours).sum(1)
    variance = (weights * (neighbours - mean[:, None]).square().sum(-1)).sum(1)
    expected = torch.cat(
        [
            (weights[..., None] * model.reference_mlp(reference_points)[indices]).sum(1),
            mean - query_points,
            (mean - query_points).norm(dim=-1, keepdim=True),
            variance.sqrt()[:, None],
            torch.ones(len(query_points), 1),
        ],
        dim=-1,
    )
    torch.testing.assert_close(seen[0], expected)


def test_context_is_zero_where_the_radius_holds_nobody():
    query_points = torch.tensor([[0.0, 0.0, 0.0], [5.0, 0.0, 0.0]], dtype=torch.float64)
    reference_points = torch.tensor([[0.1, 0.0, 0.0]], dtype=torch.float64)
    model = projector(kind="radius", k=None, radius=0.5, context=True)
    seen = []
    model.query_mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(query_points, reference_points)
    context = seen[0][:, -6:]
    torch.testing.assert_close(context[0], torch.tensor([0.1, 0, 0, 0.1, 0, 1], dtype=torch.float64))
    torch.testing.assert_close(seen[0][1], torch.zeros_like(seen[0][1]))


@pytest.mark.parametrize("predicts", ["distance", "signed_distance"])
def test_distances_begin_as_the_soft_distance(predicts):
    query_points, reference_points = cloud()
    model = projector(context=True, predicts=predicts)
    weights, indices = weights_and_neighbours(query_points, reference_points)
    mean = (weights[..., None] * reference_points[indices]).sum(1)
    expected = (mean - query_points).norm(dim=-1, keepdim=True)
    torch.testing.assert_close(model(query_points, reference_points), expected)


def test_a_signed_distance_scales_and_shifts_the_soft_distance():
    query_points, reference_points = cloud()
    model = projector(context=True, predicts="signed_distance")
    soft_distance = model(query_points, reference_points)
    with torch.no_grad():
        model.query_mlp[-1].bias.copy_(torch.tensor([-3.0, 0.5]))
    torch.testing.assert_close(model(query_points, reference_points), -2 * soft_distance + 0.5)


@pytest.mark.parametrize("context", [False, True])
def test_batch_with_shared_queries_equals_the_loop_over_clouds(context):
    query_points, reference_points = cloud(clouds=3)
    model = projector(context=context)
    one_by_one = torch.stack([model(query_points, points) for points in reference_points])
    torch.testing.assert_close(model(query_points, reference_points), one_by_one)
    repeated = query_points.repeat(3, 1, 1)
    torch.testing.assert_close(model(repeated, reference_points), one_by_one)


@pytest.mark.parametrize("clouds", [None, 2])
@pytest.mark.parametrize("settings", [{}, {"kind": "radius", "k": None, "radius": 0.7}])
def test_queries_decoded_in_parts_equal_the_whole(settings, clouds):
    query_points, reference_points = cloud(clouds=clouds)
    model = projector(context=True, **settings)
    encoding = model.encode(reference_points)
    parts = [model.decode(part, encoding) for part in query_points.split(4)]
    torch.testing.assert_close(torch.cat(parts, dim=-2), model(query_points, reference_points))


def test_gradients_are_finite_at_a_query_that_lies_on_a_reference_point():
    reference_points = torch.tensor([[0.3, 0.1, -0.2]], dtype=torch.float64)
    query_points = reference_points.clone().requires_grad_()
    model = projector(k=1, context=True, predicts="distance")
    model(query_points, reference_points).sum().backward()
    gradients = [query_points.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_gradients_agree_with_finite_differences():
    query_points, reference_points = cloud(points=12, queries=4)
    model = projector(context=True)
    inputs = (query_points.requires_grad_(), reference_points.requires_grad_())
    assert torch.autograd.gradcheck(model, inputs)


def test_features_replace_the_points_as_input_of_the_first_mlp():
    query_points, reference_points = cloud()
    features = torch.randn(40, 5, dtype=torch.float64)
    model = projector(in_channels=5)
    weights, indices = weights_and_neighbours(query_points, reference_points)
    aggregated = (weights[..., None] * model.reference_mlp(features)[indices]).sum(1)
    predicted = model(query_points, reference_points, features=features)
    torch.testing.assert_close(predicted, model.query_mlp(aggregated))


def test_autocast_keeps_distances_in_float32():
    query_points, reference_points = cloud(dtype=torch.float32)
    model = projector(context=True, predicts="distance").float()
    expected = model(query_points, reference_points)
    with torch.autocast("cpu", torch.bfloat16):
        predicted = model(query_points, reference_points)
    assert predicted.dtype == torch.float32
    torch.testing.assert_close(predicted, expected)  # before training it is the soft distance


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "ball"}, "'ball'"),
        ({"kind": "radius"}, "needs a radius"),
        ({"predicts": "distance"}, "context=True"),
        ({"predicts": "colour"}, "'colour'"),
    ],
)
def test_impossible_settings_are_named(settings, words):
    with pytest.raises(ValueError, match=words):
        Projector(**settings)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"context": True, "predicts": "distance"}])
def test_a_network_of_half_precision_takes_points_of_single(dtype, settings):
    torch.manual_seed(0)
    query_points, reference_points = torch.rand(20, 3), torch.rand(50, 3)
    model = Projector(backend="torch", **settings)
    expected = model(query_points, reference_points)
    model.to(dtype)
    got = model(query_points, reference_points)
    torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.05)
    got.float().square().sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())

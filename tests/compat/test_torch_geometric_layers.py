"""Convolutions of PyTorch Geometric on edge_mlp: the same results and gradients, and what is left."""

import copy
import itertools
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from pointproj.compat import torch_geometric as searches
from pointproj.compat.torch_geometric_layers import replace

theirs = pytest.importorskip("torch_geometric.nn")
searches.install()

COUNT = 101


def network(*widths: int, last: nn.Module | None = None) -> nn.Sequential:
    layers = [module for pair in pairwise(widths) for module in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1], *([] if last is None else [last]))


class Model(nn.Module):
    """Every layer that is replaced, with each aggregation, and one that cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.edges = theirs.EdgeConv(network(10, 16, 8), aggr="max")
        self.active = theirs.EdgeConv(network(16, 16, last=nn.GELU()), aggr="mean")
        self.dynamic = theirs.DynamicEdgeConv(network(32, 16, 8), k=6, aggr="add")
        self.points = theirs.PointNetConv(network(11, 16, 8), nn.Linear(8, 8))
        self.places = theirs.PointNetConv(network(3, 16, 8), aggr="mean", flow="target_to_source")
        settings = {"norm": None, "plain_last": False, "bias": [True, False]}
        self.mlp = theirs.EdgeConv(theirs.MLP([16, 8, 8], **settings), aggr="max")
        self.attention = theirs.PointTransformerConv(8, 8)
        networks = (theirs.MLP([widths, 9, 8], norm=None, plain_last=False) for widths in (3, 8))
        self.transformer = theirs.PointTransformerConv(8, 8, *networks, add_self_loops=False)
        self.normalised = theirs.EdgeConv(theirs.MLP([16, 8, 8]), aggr="max")

    def forward(self, x: Tensor, pos: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        x = self.active(self.edges(x, edges), edges)
        x = self.points(self.dynamic(x, batch), pos, edges) + self.places(None, pos, edges)
        x = self.transformer(self.attention(self.mlp(x, edges), pos, edges), pos, edges)
        return self.normalised(x, edges)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def inputs(crowded: bool) -> tuple[Tensor, ...]:
    batch = (torch.arange(COUNT) > 40).long()
    x, pos = torch.randn(COUNT, 5).double().requires_grad_(), torch.randn(COUNT, 3).double().requires_grad_()
    edges = searches.knn_graph(pos, 7, batch, loop=True)
    more = torch.tensor([[5], [9]]).expand(2, 90) if crowded else edges[:, 40:43]
    return x, pos, torch.cat([edges[:, 30:], more], dim=1), batch  # no neighbours; some twice


@pytest.mark.parametrize("crowded", [False, True])
def test_replaced_layers_have_the_same_results_and_gradients(model: Model, crowded: bool):
    ours = copy.deepcopy(model)
    found = replace(ours)
    assert " ".join(found.replaced) == "edges active dynamic points places mlp attention transformer"
    assert found.left == {"normalised": "its network cannot run on pairs: its normalisation needs all pairs"}
    assert str(found).endswith(
        "left normalised: its network cannot run on pairs: its normalisation needs all pairs"
    )
    assert [*ours.state_dict()] == [*model.state_dict()]
    results = []
    given = inputs(crowded)
    for of in (model, ours):
        out = of(*given)
        leaves = {"x": given[0], "pos": given[1]} | dict(of.named_parameters())
        gradients = torch.autograd.grad(out.square().sum(), [*leaves.values()], allow_unused=True)
        results.append({"out": out} | dict(zip(leaves, gradients, strict=True)))
    for name, expected in results[0].items():
        if expected is None:
            assert results[1][name] is None, name
        else:
            torch.testing.assert_close(results[1][name], expected, rtol=1e-10, atol=1e-10, msg=name)
    several = torch.stack([given[0], -given[0]])
    torch.testing.assert_close(ours.edges(several, given[2]), model.edges(several, given[2]))


@pytest.mark.parametrize("dims", [1, 4])
def test_other_numbers_of_coordinates(dims: int):
    x, pos, edges, _ = inputs(crowded=False)
    pos = torch.cat([pos, pos], 1)[:, :dims]
    model = nn.ModuleList([theirs.PointNetConv(network(5 + dims, 16, 8))]).double()
    ours = copy.deepcopy(model)
    assert replace(ours).replaced
    results = []
    for (layer,) in (model, ours):
        out = layer(x, pos, edges)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, pos, *layer.parameters()))))
    torch.testing.assert_close(*results)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_hook(layer):
    layer.nn[0].register_forward_hook(lambda module, args, out: 2 * out)
    return layer


def test_parameters_can_be_drawn_anew():
    model = nn.ModuleList([theirs.EdgeConv(network(12, 6)), theirs.PointTransformerConv(6, 6)])
    before = copy.deepcopy(model.state_dict())
    assert replace(model).replaced
    for layer in model:
        layer.reset_parameters()
    assert all(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_edges_of_other_points_are_refused():
    model = nn.ModuleList([theirs.EdgeConv(network(12, 6))])
    replace(model)
    for row, least in itertools.product((0, 1), (-1, 2)):
        edges = torch.arange(3).repeat(2, 1)
        edges[row] += least
        with pytest.raises(IndexError, match=rf"{('sources', 'targets')[row]} from 0 to 2; got {least} to"):
            model[0](torch.rand(3, 6), edges)


def test_layers_that_cannot_be_replaced_say_why():
    unknown = nn.Sequential(nn.Linear(6, 6), nn.Softplus(), nn.Linear(6, 6))
    left = {
        "aggregation": (theirs.EdgeConv(network(6, 6), aggr="min"), "expected aggr max, mean, sum or add"),
        "activation": (theirs.EdgeConv(unknown), "Softplus"),
        "dropout": (theirs.EdgeConv(theirs.MLP([6, 6, 6], norm=None, dropout=0.5)), "dropout"),
        "none": (theirs.PointNetConv(), "expected a network with parameters; it is None"),
        "lazy": (theirs.EdgeConv(theirs.Linear(-1, 6)), "no shape before its first call"),
        "hooks": (with_hook(theirs.EdgeConv(network(6, 6))), "it has hooks"),
        "subclass": (theirs.EdgeConv(nn.Sequential(Scaled(6, 6))), "got Scaled"),
        "dims": (theirs.PointTransformerConv(6, 6, network(4, 6)), "of 2 or 3 coordinates; its pos_nn"),
    }
    model = nn.ModuleDict({name: layer for name, (layer, _) in left.items()})
    found = replace(model)
    assert not found.replaced
    for name, (layer, reason) in left.items():
        assert reason in found.left[name]
        assert model[name] is layer
    with pytest.raises(ValueError, match="expected a model with some of EdgeConv"):
        replace(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="contains a EdgeConv, got the layer itself"):
        replace(theirs.EdgeConv(network(6, 6)))

"""``compat.neuraloperator`` against the library's own modules, in whose place it stands."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from pointproj.compat import neuraloperator as ours

pytestmark = pytest.mark.peers
neuralop = pytest.importorskip("neuralop", reason="neuraloperator is not installed: extra peers")

from neuralop.layers import channel_mlp, gno_weighting_functions, integral_transform, neighbor_search  # noqa: E402
from neuralop.models import GINO  # noqa: E402

RADIUS = 0.25
TRANSFORMS = ("linear_kernelonly", "linear", "nonlinear_kernelonly", "nonlinear")


def _points(count: int, dimension: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(count, dimension, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of very few pairs: several, one longer than it may be, one of rows without pairs."""
    monkeypatch.setitem(ours.ELEMENTS, "cpu", 7 * 12)


@pytest.mark.parametrize("dimension", [2, 3])
@pytest.mark.parametrize("return_norm", [False, True])
def test_search_returns_what_theirs_returns(dimension: int, return_norm: bool):
    data, queries = _points(83, dimension, 0), _points(61, dimension, 1)
    queries[5] = data[7]  # a distance of 0
    queries[9] = 5.0  # no neighbours
    results = []
    for module in (neighbor_search.NeighborSearch, ours.NeighborSearch):
        leaves = {"data": data.clone().requires_grad_(), "queries": queries.clone().requires_grad_()}
        found = module(use_open3d=False, return_norm=return_norm)(**leaves, radius=RADIUS)
        if return_norm:
            gradients = torch.autograd.grad(found["weights"].sin().sum(), leaves.values())
            found |= {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}
        results.append(found)
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, msg=lambda text, name=name: f"{name}: {text}")


def _transforms(**settings) -> tuple[nn.Module, nn.Module]:
    """Theirs and ours with the same parameters."""
    torch.manual_seed(3)
    theirs = integral_transform.IntegralTransform(use_torch_scatter=False, **settings).double()
    mine = ours.IntegralTransform(use_torch_scatter=False, **settings).double()
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


def _list(m: int = 19, n: int = 31) -> dict[str, Tensor]:
    counts = torch.randint(0, 6, (m,), generator=torch.Generator().manual_seed(4))
    counts[3:6], counts[-2] = 0, 17
    row_splits = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    indices = torch.randint(n, (int(row_splits[-1]),), generator=torch.Generator().manual_seed(5))
    return {"neighbors_index": indices, "neighbors_row_splits": row_splits}


CASES = [
    pytest.param(transform, batch, reduction, weighted, id=f"{transform}-{batch}-{reduction}-{weighted}")
    for transform, batch, reduction, weighted in itertools.product(
        TRANSFORMS, (None, 0, 2), ("sum", "mean"), (False, True)
    )
    if not (weighted and (reduction == "mean" or not batch))  # theirs fails on weights without a batch
    and not (batch is None and transform != "linear")  # without a function all are the same
]


@pytest.mark.parametrize(("transform", "batch", "reduction", "weighted"), CASES)
def test_transform_gives_their_values_and_gradients(few_at_once, transform, batch, reduction, weighted):
    n, m, channels, columns = 31, 19, 4, {"y": 3, "x": 5}
    neighbors = _list(m, n)
    inputs = {"y": _points(n, 3, 6), "x": _points(m, 5, 7)}
    if batch is not None:
        inputs["f_y"] = _points(max(batch, 1) * n, channels, 8).view(*[batch] * bool(batch), n, channels)
    if weighted:
        inputs["weights"] = _points(len(neighbors["neighbors_index"]), 1, 9).squeeze(1)
    reads = batch is not None and transform.startswith("nonlinear")
    layers = [sum(columns.values()) + channels * reads, 12, 9, channels]
    weighting = gno_weighting_functions.quartic_cutoff if weighted else None
    settings = {"transform_type": transform, "reduction": reduction, "weighting_fn": weighting}
    results = []
    for module in _transforms(channel_mlp_layers=layers, **settings):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in inputs.items()}
        values = module(neighbors=dict(neighbors), **leaves)
        leaves |= dict(module.named_parameters())
        gradients = torch.autograd.grad(values.double().sin().sum(), leaves.values())
        results.append({"values": values.double(), **dict(zip(leaves, gradients, strict=True))})
    for name, expected in results[0].items():  # their sums are float32
        torch.testing.assert_close(
            results[1][name], expected, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_transform_can_be_differentiated_twice(few_at_once):
    _, mine = _transforms(channel_mlp_layers=[8, 6, 4], transform_type="linear")
    neighbors = _list(7, 11)
    weights = _points(len(neighbors["neighbors_index"]), 1, 1).squeeze(1)
    inputs = [_points(11, 3, 6), _points(7, 5, 7), _points(2 * 11, 4, 8).view(2, 11, 4), weights]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    parameters = [*mine.parameters()]

    def values(y, x, f_y, weights, *_):
        return mine(y, neighbors, x, f_y, weights)

    assert torch.autograd.gradgradcheck(values, (*inputs, *parameters), atol=1e-6)


def test_autocast_computes_as_precisely_as_theirs(few_at_once):
    results = {}
    for name in ("exact", "theirs", "ours"):
        module = _transforms(channel_mlp_layers=[8, 12, 9, 4])[name == "ours"].float()
        function = _points(62, 4, 8, torch.float32).view(2, 31, 4).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=name != "exact"):
            points = _points(31, 3, 6, torch.float32), _list(), _points(19, 5, 7, torch.float32)
            values = module(*points, function)
        leaves = [function, *module.parameters()]
        results[name] = [values, *torch.autograd.grad(values.sin().sum(), leaves)]
    for exact, theirs, mine in zip(*results.values(), strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - exact).norm() < 2 * (theirs - exact).norm() + 1e-3 * exact.norm()


def test_other_kernels_are_called_as_theirs_are():
    torch.manual_seed(0)
    kernel = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    inputs = {"y": _points(31, 3, 6), "x": _points(19, 5, 7), "f_y": _points(62, 4, 8).view(2, 31, 4)}
    theirs, mine = _transforms(channel_mlp=kernel, reduction="mean")
    expected = theirs(neighbors=_list(), **inputs)
    torch.testing.assert_close(mine(neighbors=_list(), **inputs).float(), expected)
    dropout = channel_mlp.LinearChannelMLP([8, 9, 4], dropout=0.5).double()
    _, mine = _transforms(channel_mlp=dropout)
    assert mine(neighbors=_list(), **inputs).isfinite().all()


def test_errors_are_theirs():
    for module in (integral_transform.IntegralTransform, ours.IntegralTransform):
        with pytest.raises(ValueError, match="linear_kernelonly"):
            module(channel_mlp_layers=[6, 1], transform_type="quadratic")
        with pytest.raises(AssertionError):
            module()
        wants = module(channel_mlp_layers=[8, 4], weighting_fn=torch.sin).double()
        with pytest.raises(KeyError, match="weights"):
            wants(_points(31, 3, 6), _list(), _points(19, 5, 7))
    with pytest.raises(ValueError, match="NeighborSearch or IntegralTransform"):
        ours.replace_search(nn.Linear(1, 1))


def _away_from_the_radius(points: Tensor, grid: Tensor) -> Tensor:
    """The points whose distance to no grid point is nearly the radius: theirs rounds there by 1e-4."""
    near = (torch.cdist(points.double(), grid.double()) - RADIUS).abs() < 1e-3
    return points[~near.any(1)]


@pytest.mark.parametrize("weighting", [None, "half_cos"])
def test_gino_gives_the_same_output_and_gradients(weighting: str | None):
    side = torch.linspace(0, 1, 8)
    grid = torch.stack(torch.meshgrid(side, side, side, indexing="ij"), dim=-1)
    points = _away_from_the_radius(_points(150, 3, 0, torch.float32), grid.view(-1, 3))
    assert len(points) > 60
    function = torch.randn(2, len(points), 3, generator=torch.Generator().manual_seed(1))
    results = []
    for replace in (False, True):
        torch.manual_seed(0)
        model = GINO(
            in_channels=3,
            out_channels=2,
            in_gno_radius=RADIUS,
            out_gno_radius=RADIUS,
            gno_weighting_function=weighting,
            fno_n_modes=(4, 4, 4),
            fno_hidden_channels=8,
            gno_use_open3d=False,
            gno_use_torch_scatter=False,
        )
        names = model.state_dict().keys()
        if replace:
            ours.replace_search(model)
        assert model.state_dict().keys() == names
        leaves = {"points": points.clone().requires_grad_(), "function": function.clone().requires_grad_()}
        values = model(leaves["points"][None], grid[None], leaves["points"][None], x=leaves["function"])
        leaves |= dict(model.named_parameters())
        gradients = torch.autograd.grad(values.square().mean(), leaves.values())
        results.append({"output": values, **dict(zip(leaves, gradients, strict=True))})
    for name, expected in results[0].items():
        error = (results[1][name] - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < 1e-5, (name, error.item())

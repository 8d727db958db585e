"""``compat.pytorch3d`` against PyTorch3D's documentation, written out for all pairs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pointproj.compat import pytorch3d
from tests.compat.comparison import assert_same_derivatives, points, squared_distances

LENGTHS1, LENGTHS2 = torch.tensor([11, 0, 5]), torch.tensor([20, 7, 2])


def _clouds(dims: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return points(3, 11, dims, seed=1, dtype=dtype), points(3, 20, dims, seed=2, dtype=dtype)


def _real(lengths: Tensor | None, size: int) -> Tensor:
    rows = torch.arange(size).expand(3, -1)
    return torch.ones_like(rows, dtype=torch.bool) if lengths is None else rows < lengths[:, None]


def _padded(values: Tensor, size: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, size - values.shape[-1]), value=fill)


def _knn(p1: Tensor, p2: Tensor, lengths1: Tensor | None, lengths2: Tensor | None, k: int) -> Tensor:
    """Indices (B, P1, K), -1 for padding."""
    squared = squared_distances(p1, p2).masked_fill(~_real(lengths2, 20)[:, None], torch.inf)
    order = squared.argsort(dim=2, stable=True)[..., :k]
    order = torch.where(squared.gather(2, order).isfinite(), order, -1)
    return _padded(order, k, -1).masked_fill(~_real(lengths1, 11)[..., None], -1)


def _ball(p1: Tensor, p2: Tensor, lengths1: Tensor | None, lengths2: Tensor | None, k: int) -> Tensor:
    """Indices (B, P1, K) of the first K nearer than 0.5, -1 for padding."""
    inside = (
        (squared_distances(p1, p2) < 0.25) & _real(lengths2, 20)[:, None] & _real(lengths1, 11)[..., None]
    )
    rows = torch.where(inside, torch.arange(20), 20).sort(dim=2).values[..., :k]
    return _padded(torch.where(rows < 20, rows, -1), k, -1)


def _ours(name: str, k: int, lengths: tuple, **options) -> Callable[[Tensor, Tensor], tuple]:
    radius = {"radius": 0.5} if name == "ball_query" else {}
    return lambda p1, p2: getattr(pytorch3d, name)(p1, p2, *lengths, K=k, **radius, **options)


CASES = [
    pytest.param(
        name,
        definition,
        padding,
        k,
        lengths,
        id=f"{name}-{k}-{'ragged' if lengths[0] is not None else 'full'}",
    )
    for name, definition, padding in (("knn_points", _knn, 0), ("ball_query", _ball, -1))
    for k in (1, 4, 25)
    for lengths in ((None, None), (LENGTHS1, LENGTHS2))
]


@pytest.mark.parametrize(("name", "definition", "padding", "k", "lengths"), CASES)
def test_values_by_definition(name: str, definition: Callable, padding: int, k: int, lengths: tuple):
    for dims, dtype in ((3, torch.float32), (2, torch.float64), (1, torch.float64)):
        p1, p2 = _clouds(dims, dtype)
        expected = definition(p1, p2, *lengths, k)
        absent = expected < 0
        dists, idx, nn = _ours(name, k, lengths, return_nn=True)(p1, p2)
        assert torch.equal(idx, expected.masked_fill(absent, padding))
        gathered = p2[torch.arange(3)[:, None, None], idx.clamp(min=0)]
        squared = (p1[:, :, None] - gathered).square().sum(-1).masked_fill(absent, 0.0)
        torch.testing.assert_close(dists, squared)
        if name == "knn_points":  # as knn_gather: padding of p1 holds the point 0 of p2
            beyond = torch.arange(k) >= (torch.tensor([20] * 3) if lengths[1] is None else LENGTHS2)[:, None]
            absent = beyond[:, None].expand_as(absent)
        assert torch.equal(nn, gathered.masked_fill(absent[..., None], 0.0))


@pytest.mark.parametrize(("name", "definition", "padding", "k", "lengths"), CASES)
def test_derivatives_of_squared_distances(name, definition, padding, k, lengths):
    p1, p2 = _clouds()
    p1[0, 3] = p2[0, 5]  # a distance of 0
    chosen = definition(p1, p2, *lengths, k)

    def by_definition(p1: Tensor, p2: Tensor) -> Tensor:
        found = p2[torch.arange(3)[:, None, None], chosen.clamp(min=0)]
        return torch.where(chosen >= 0, (p1[:, :, None] - found).square().sum(-1), 0.0)

    ours = _ours(name, k, lengths)
    assert_same_derivatives(lambda p1, p2: ours(p1, p2).dists, by_definition, {"p1": p1, "p2": p2})


def test_points_found_have_gradients():
    p1, p2 = _clouds()
    p2.requires_grad_()
    idx = pytorch3d.knn_points(p1, p2, K=2).idx
    for found in (pytorch3d.knn_points(p1, p2, K=2, return_nn=True).knn, pytorch3d.knn_gather(p2, idx)):
        (gradient,) = torch.autograd.grad(found.sum(), p2)
        counts = torch.stack([row.flatten().bincount(minlength=20) for row in idx])
        torch.testing.assert_close(gradient, counts[..., None].double().expand_as(p2))


def test_what_is_returned_when_points_are_not_asked_for():
    p1, p2 = _clouds()
    assert pytorch3d.knn_points(p1, p2).knn is None
    assert pytorch3d.knn_points(p1, p2).dists.shape == (3, 11, 1)
    assert pytorch3d.ball_query(p1, p2).knn.shape == (3, 11, 500, 3)
    assert pytorch3d.ball_query(p1, p2, return_nn=False).knn is None
    assert pytorch3d.KNN._fields == ("dists", "idx", "knn")


def test_a_point_at_the_radius_is_outside():
    p2 = torch.tensor([[[1.0, 0, 0], [0, 0.999, 0]]])
    assert pytorch3d.ball_query(torch.zeros(1, 1, 3), p2, K=2, radius=1.0).idx.tolist() == [[[1, -1]]]


def test_errors():
    p1, p2 = _clouds()
    for function in (pytorch3d.knn_points, pytorch3d.ball_query):
        with pytest.raises(ValueError, match="pts1 and pts2 must have the same batch dimension"):
            function(p1[:2], p2)
        with pytest.raises(ValueError, match="pts1 and pts2 must have the same point dimension"):
            function(p1, p2[..., :2])
        with pytest.raises(ValueError, match="p1 must have shape"):
            function(p1[0], p2[0])
    with pytest.raises(ValueError, match="norm must be 2"):
        pytorch3d.knn_points(p1, p2, norm=1)
    with pytest.raises(ValueError, match="x and idx must have same batch dimension"):
        pytorch3d.knn_gather(p2, torch.zeros(2, 4, 1, dtype=torch.int64))

"""``compat.scipy`` against ``scipy.spatial.cKDTree`` itself."""

import numpy as np
import pytest
import torch
from scipy.spatial import KDTree, cKDTree
from torch import Tensor

from pointproj.compat import scipy
from tests.compat.comparison import assert_same_call, assert_same_derivatives, points, squared_distances

BOXES = {1: 1.0, 2: (1.0, 1.5), 3: (1.0, 0.0, 2.0)}
boxes = pytest.mark.parametrize("periodic", [False, True], ids=["open", "periodic"])


def _trees(dims: int, periodic: bool) -> tuple[cKDTree, scipy.cKDTree]:
    data = points(60, dims)
    box = {"boxsize": BOXES[dims]} if periodic else {}
    return cKDTree(data.numpy(), **box), scipy.cKDTree(data, **box)


@pytest.mark.parametrize("name", ["query", "query_ball_point"])
def test_signatures(name: str):
    """Those of cKDTree, which is compiled, hide what is optional."""
    assert_same_call(getattr(scipy.cKDTree, name), getattr(KDTree, name))


@boxes
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("shape", [(), (7,), (2, 3)])
def test_nearest(shape: tuple, dims: int, periodic: bool):
    theirs, ours = _trees(dims, periodic)
    x = points(*shape, dims, seed=1)
    for asked in (1, 4, 70, [1], [2, 5], [3, 70]):
        for bound in (np.inf, 0.3):
            expected = theirs.query(x.numpy(), asked, distance_upper_bound=bound)
            for name, got, value in zip(
                "di", ours.query(x, asked, distance_upper_bound=bound), expected, strict=True
            ):
                assert got.shape == np.shape(value), name
                np.testing.assert_allclose(got.numpy(), value, rtol=1e-12, err_msg=f"{name}, k = {asked}")


@boxes
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_balls(dims: int, periodic: bool):
    theirs, ours = _trees(dims, periodic)
    x = points(2, 4, dims, seed=1)
    radii = points(2, 4, seed=2) * 0.4
    for r in (0.3, radii):
        plain = r.numpy() if isinstance(r, Tensor) else r
        expected = theirs.query_ball_point(x.numpy(), plain, return_sorted=True)
        got = ours.query_ball_point(x, r)
        assert got.shape == expected.shape
        assert [found.tolist() for found in got.flat] == list(expected.flat)
        lengths = ours.query_ball_point(x, r, return_length=True)
        assert lengths.tolist() == theirs.query_ball_point(x.numpy(), plain, return_length=True).tolist()
    alone = ours.query_ball_point(x[0, 0], 0.3)
    assert alone.tolist() == sorted(theirs.query_ball_point(x[0, 0].numpy(), 0.3))


@pytest.mark.parametrize("r", [0.0, 0.1, 0.2, 0.3, 0.1 * 3**0.5])
def test_points_at_the_radius_itself(r: float):
    """A lattice, where rounding decides."""
    axis = torch.arange(5, dtype=torch.float64) * 0.1
    data = torch.cartesian_prod(axis, axis, axis)
    expected = cKDTree(data.numpy()).query_ball_point(data.numpy(), r, return_length=True)
    assert scipy.KDTree(data).query_ball_point(data, r, return_length=True).tolist() == expected.tolist()


@boxes
def test_derivatives_of_distances(periodic: bool):
    x, data = points(9, 3, seed=1), points(60, 3)
    box = torch.tensor([1.0, torch.inf, 2.0]) if periodic else torch.full((3,), torch.inf)

    def apart(x: Tensor, data: Tensor) -> Tensor:
        delta = x[:, None] - data
        return torch.where(
            box.isinf(), delta, delta - torch.where(box.isinf(), 1.0, box) * (delta / box).round()
        )

    chosen = squared_distances(apart(x, data), torch.zeros(1, 3).double())[..., 0].argsort(dim=1)[:, :4]

    def by_definition(x: Tensor, data: Tensor) -> Tensor:
        return apart(x, data).norm(dim=-1).gather(1, chosen)

    def ours(x: Tensor, data: Tensor) -> Tensor:
        return scipy.cKDTree(data, boxsize=BOXES[3] if periodic else None).query(x, 4)[0]

    assert_same_derivatives(ours, by_definition, {"x": x, "data": data})


def test_balls_of_equally_many_points():
    found = scipy.cKDTree(points(20, 3)).query_ball_point(points(4, 3), 9.0)
    assert [rows.tolist() for rows in found] == [list(range(20))] * 4


def test_attributes_dtype_and_points_that_are_not_finite():
    data = points(20, 3, dtype=torch.float32)
    tree = scipy.cKDTree(data)
    assert (tree.n, tree.m, tree.boxsize) == (20, 3, None)
    assert tree.data is data
    d, i = tree.query(torch.tensor([[0.5, torch.nan, 0.5]]), 2)
    assert d.dtype == torch.float32
    assert d.isnan().all()
    assert (i == 20).all()


def test_errors():
    data = points(20, 3)
    tree = scipy.cKDTree(data)
    with pytest.raises(ValueError, match="data must be finite"):
        scipy.cKDTree(data / 0)
    with pytest.raises(ValueError, match="data must be 2 dimensions"):
        scipy.cKDTree(data[0])
    with pytest.raises(ValueError, match="greater than the size of the periodic box"):
        scipy.cKDTree(data, boxsize=0.5)
    with pytest.raises(ValueError, match="outside of the periodic box"):
        scipy.cKDTree(-data, boxsize=1.0)
    with pytest.raises(ValueError, match="x must consist of vectors of length 3"):
        tree.query(data[:, :2])
    with pytest.raises(ValueError, match="k must be an integer"):
        tree.query(data, 0)
    with pytest.raises(ValueError, match="p must be 2"):
        tree.query(data, p=1)
    with pytest.raises(ValueError, match="r must not be negative"):
        tree.query_ball_point(data, -1.0)

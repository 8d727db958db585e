"""``compat.sklearn`` against ``sklearn.neighbors.NearestNeighbors`` itself."""

import numpy as np
import pytest
import torch

from pointproj.compat import sklearn
from tests.compat.comparison import assert_same_call, assert_same_derivatives, points

pytestmark = pytest.mark.peers
neighbors = pytest.importorskip("sklearn.neighbors", reason="scikit-learn is not installed")


@pytest.fixture(params=[1, 2, 3])
def both(request: pytest.FixtureRequest) -> tuple:
    data = points(50, request.param)
    options = {"n_neighbors": 4, "radius": 0.3}
    theirs = neighbors.NearestNeighbors(**options).fit(data.numpy())
    return theirs, sklearn.NearestNeighbors(**options).fit(data), points(9, request.param, seed=1)


def test_signatures():
    assert_same_call(sklearn.NearestNeighbors, neighbors.NearestNeighbors)
    for name in ("fit", "kneighbors", "radius_neighbors"):
        assert_same_call(getattr(sklearn.NearestNeighbors, name), getattr(neighbors.NearestNeighbors, name))


@pytest.mark.parametrize("themselves", [False, True], ids=["others", "themselves"])
def test_nearest(both: tuple, themselves: bool):
    theirs, ours, x = both
    given = (None, None) if themselves else (x.numpy(), x)
    for k in (None, 1, 9):
        for expected, got in zip(theirs.kneighbors(given[0], k), ours.kneighbors(given[1], k), strict=True):
            np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)
        alone = ours.kneighbors(given[1], k, return_distance=False)
        assert np.array_equal(alone.numpy(), theirs.kneighbors(given[0], k, return_distance=False))


@pytest.mark.parametrize("themselves", [False, True], ids=["others", "themselves"])
def test_within(both: tuple, themselves: bool):
    theirs, ours, x = both
    given = (None, None) if themselves else (x.numpy(), x)
    for radius in (None, 0.1):
        expected = theirs.radius_neighbors(given[0], radius, sort_results=True)
        for theirs_one, got in zip(
            expected, ours.radius_neighbors(given[1], radius, sort_results=True), strict=True
        ):
            assert got.shape == theirs_one.shape
            for row, values in zip(got, theirs_one, strict=True):
                np.testing.assert_allclose(row.numpy(), values, rtol=1e-12)
        rows = theirs.radius_neighbors(given[0], radius, return_distance=False)
        got = ours.radius_neighbors(given[1], radius, return_distance=False)
        assert [found.tolist() for found in got] == [sorted(found) for found in rows]


def test_derivatives_of_distances():
    inputs = {"x": points(9, 3, seed=1), "data": points(50, 3)}
    chosen = torch.cdist(*inputs.values()).argsort(dim=1)[:, :4]
    assert_same_derivatives(
        lambda x, data: sklearn.NearestNeighbors(n_neighbors=4).fit(data).kneighbors(x)[0],
        lambda x, data: (x[:, None] - data[chosen]).norm(dim=-1),
        inputs,
    )


def test_coincident_points_leave_one_out_and_all_others_in():
    rows = sklearn.NearestNeighbors(n_neighbors=3).fit(torch.zeros(6, 3)).kneighbors()[1]
    assert rows.tolist() == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2], [0, 1, 2], [0, 1, 2]]


def test_errors():
    for module in (sklearn, neighbors):
        fitted = module.NearestNeighbors().fit(points(5, 3).numpy() if module is neighbors else points(5, 3))
        with pytest.raises(ValueError, match="Expected n_neighbors <= n_samples_fit"):
            fitted.kneighbors(points(2, 3), 6)
        with pytest.raises(ValueError, match="not fitted yet"):
            module.NearestNeighbors().kneighbors(points(2, 3))
        with pytest.raises(ValueError, match="return_distance must be True if sort_results is True"):
            fitted.radius_neighbors(return_distance=False, sort_results=True)
    with pytest.raises(ValueError, match="the metric must be Euclidean"):
        sklearn.NearestNeighbors(metric="cosine")

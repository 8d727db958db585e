"""Neighbours that are known are searched once for each shape."""

import torch

import pointproj
from pointproj.training.loader import NeighborCache


def test_each_shape_is_searched_once(monkeypatch):
    clouds, query_points = torch.rand(5, 30, 3), torch.rand(11, 3)
    searches = []
    search = pointproj.training.loader.knn

    def counted(query_points, reference_points, *others, **named):
        searches.append(len(reference_points))
        return search(query_points, reference_points, *others, **named)

    monkeypatch.setattr(pointproj.training.loader, "knn", counted)
    kept = NeighborCache(4, "torch")
    for shapes in ([0, 1, 2], [2, 0, 1], [3, 4], [4, 0, 2, 1, 3]):
        batch = {"query_points": query_points, "reference_points": clouds[shapes], "identity": shapes}
        rows = kept(batch)["neighbor_indices"]
        expected = [search(query_points, clouds[shape], 4, backend="torch")[1] for shape in shapes]
        assert torch.equal(rows.long(), torch.stack(expected))
    assert searches == [3, 2]

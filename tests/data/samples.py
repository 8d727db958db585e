"""Meshes and samples of prepared shapes, and whether two sets of these are the same."""

import torch

from pointproj.data import preparation
from pointproj.data.batches import batches

SHEET = "OFF\n4 2 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n3 0 1 2\n3 0 2 3\n"


def forbid_making(monkeypatch):
    def fail(*arguments):
        raise AssertionError("made again instead of read from the cache")

    monkeypatch.setattr(preparation, "_make", fail)


def names(dataset):
    return [shape.name for shape in dataset.shapes]


def all_batches(*arguments, **keywords):
    return list(batches(*arguments, **keywords))


def assert_equal_batches(ones, others):
    assert len(ones) == len(others) > 0
    for one, other in zip(ones, others, strict=True):
        assert (one["name"], one["class_name"]) == (other["name"], other["class_name"])
        for key in ("reference_points", "normals", "target", "query_points"):
            assert torch.equal(one[key], other[key])

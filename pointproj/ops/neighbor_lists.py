"""Aggregation over given neighbour lists: what a backend that only searches needs besides."""

from collections.abc import Iterator
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops.bridge.torch_op import torch_op
from pointproj.ops.gradients import (
    DIFFERENTIABLE,
    Block,
    Chunk,
    ListedNeighbors,
    aggregate,
    aggregate_backward,
    aggregate_second_backward,
)

VALUES_AT_ONCE = 2**26  # gathered feature values a chunk may hold


def aggregate_neighbors(
    query_points: Float[Tensor, "q 3"],
    reference_points: Float[Tensor, "n 3"],
    features: Float[Tensor, "n c"],
    sigma: Float[Tensor, ""],
    neighbor_indices: Int[Tensor, "q k"],
) -> Float[Tensor, "q c"]:
    """Mean of the listed neighbours' features, weighted by exp(-distance / sigma).

    Differentiable twice in the points, the features and sigma; the lists are constants. An index
    of -1 is no neighbour; a row without any is 0.
    """
    return _aggregate_neighbors(query_points, reference_points, features, sigma, neighbor_indices)


def listed_chunks(inputs: dict[str, Any]) -> Iterator[Chunk]:
    """The chunks of an operator whose inputs hold ``neighbor_indices`` (Q, k)."""
    lists = inputs["neighbor_indices"]
    rows = max(1, VALUES_AT_ONCE // max(1, lists.shape[1] * inputs["features"].shape[1]))
    for first in range(0, len(lists), rows):
        query = slice(first, first + rows)
        neighbors = ListedNeighbors(lists[query].clamp(min=0).long(), lists[query] >= 0)
        points = inputs["query_points"][query], inputs["reference_points"]
        yield Chunk(query, slice(None), Block(*points, inputs["sigma"], neighbors))


def _forward(
    query_points: Tensor, reference_points: Tensor, features: Tensor, sigma: Tensor, neighbor_indices: Tensor
) -> tuple[Tensor]:
    return (aggregate(locals(), listed_chunks),)


_aggregate_neighbors = torch_op(
    "pointproj::aggregate_neighbors",
    _forward,
    lambda query_points, reference_points, features, sigma, neighbor_indices: (
        ((query_points.shape[0], features.shape[1]), features.dtype),
    ),
    differentiable=DIFFERENTIABLE,
    backward=lambda grads, needs, saved: aggregate_backward(grads[0], needs, saved.inputs, listed_chunks),
    second_backward=lambda directions, grads, saved: aggregate_second_backward(
        directions, grads[0], saved.inputs, listed_chunks
    ),
)

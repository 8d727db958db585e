"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the operators.

A formula sees only shapes, but the pairs that a search evaluates depend on the positions. So the counts are
nominal, for each pair of a query and a neighbour; multiplication and addition are one operation each:

- search: the squared distance (8) of each of the k neighbours, the least that any search evaluates;
- aggregation: squared distance (8) and weighted sum (2 C);
- its first backward: 2 C for the gradient of features; for those of positions and sigma 2 C for products of
  upstream gradients and features, and 8 for the distance;
- its second backward: five products or sums over channels, 10 C, and 8.

kNN has k pairs a query. For a radius all pairs of a cloud are counted, as in a dense masked softmax: an upper
bound. Clouds of different sizes are counted as if they had equal sizes.

A counter knows only the formulas that exist when it is made: use the backend once before.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

DISTANCE = 8  # three differences, three products, two sums

Shape = Sequence[int]


def count_search(operator: str) -> None:
    """Register the formula of a search ``(query_points, ..., k)``."""

    @register_flop_formula(getattr(torch.ops.pointproj, operator))
    def search(query_points: Shape, *others: Any, out_shape: Any = None, **_: Any) -> int:
        return query_points[0] * others[-1] * DISTANCE


def count_aggregation(operator: str, inputs: Sequence[str]) -> None:
    """Register the formulas of an aggregation and of its first and second backward.

    ``inputs`` names the arguments that all three have: ``features``, and ``neighbor_indices`` or the clouds.
    """

    def register(suffix: str, first: int, per_pair: Any) -> None:
        @register_flop_formula(getattr(torch.ops.pointproj, operator + suffix))
        def formula(*args: Any, out_shape: Any = None, **_: Any) -> int:
            given = dict(zip(inputs, args[first:], strict=False))
            return _pairs(given) * per_pair(given["features"][1], args)

    register("", 0, lambda channels, args: DISTANCE + 2 * channels)
    register("_backward", 2, lambda channels, args: _of_backward(channels, args[1]))
    register("_second_backward", 6, lambda channels, args: DISTANCE + 10 * channels)


def _of_backward(channels: int, needs: Sequence[bool]) -> int:
    query_points, reference_points, features, sigma = needs
    through_logits = query_points or reference_points or sigma
    return 2 * channels * features + (2 * channels + DISTANCE) * through_logits


def _pairs(given: dict[str, Any]) -> int:
    if "neighbor_indices" in given:
        queries, k = given["neighbor_indices"]
        return queries * k
    return given["query_points"][0] * given["reference_points"][0] // given["clouds"]

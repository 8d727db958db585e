"""What ``torch.utils.flop_counter.FlopCounterMode`` counts for the operators.

A formula sees only shapes, but the pairs that a search evaluates depend on the positions. So the counts are
nominal, for each pair of a query and a neighbour; multiplication and addition are one operation each:

- search: the squared distance (8) of each of the k neighbours, the least that any search evaluates; a list
  has as many pairs as places;
- aggregation: squared distance (8) and weighted sum (2 C), and 8 more if it searches itself;
- its first backward: 2 C for the gradient of features; for those of positions and sigma 2 C for products of
  upstream gradients and features, and 8 for the distance;
- its second backward: five products or sums over channels, 10 C, and 8.

kNN has k pairs a query. For a radius all pairs of a cloud are counted, as in a dense masked softmax: an upper
bound. Clouds of different sizes are counted as if they had equal sizes.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pointproj.ops.torch_internals import registries_of_active_counters

DISTANCE = 8  # three differences, three products, two sums

Given = dict[str, Any]  # arguments by name, of tensors their shapes
_formulas: dict[str, Callable[..., int]] = {}


def announce(name: str) -> None:
    """Tell torch the formula of an operator, for the counter that counts just now and those made later.

    torch's module of counters is not imported, since that takes longer than most programs' first result.
    """
    counters = sys.modules.get("torch.utils.flop_counter")
    if counters is None or name not in _formulas:
        return
    target = getattr(torch.ops.pointproj, name.partition("::")[2])
    if target not in counters.flop_registry:
        counters.register_flop_formula(target)(_formulas[name])
    for registry in registries_of_active_counters():
        registry.setdefault(target, counters.flop_registry[target])


def count_search(operator: str, inputs: Iterable[str], places: str) -> None:
    """Give a search its formula; ``inputs`` names all arguments, ``places`` that of its neighbours."""
    names = [*inputs]

    def formula(*args: Any, out_shape: Any = None, **_: Any) -> int:
        given = dict(zip(names, args, strict=False))
        return given["query_points"][0] * given[places] * DISTANCE

    _formulas[f"pointproj::{operator}"] = formula


def count_aggregation(operator: str, inputs: Iterable[str], *, searches: bool = False) -> None:
    """Give an aggregation, its first and its second backward their formulas.

    ``inputs`` names the arguments that all three have: ``features``, and ``neighbor_indices`` or the clouds.
    ``searches`` says that it searches k neighbours where ``neighbor_indices`` are None.
    """
    names = [*inputs]

    def register(suffix: str, first: int, per_pair: Callable[[int, Sequence, Given], int]) -> None:
        def formula(*args: Any, out_shape: Any = None, **_: Any) -> int:
            given = dict(zip(names, args[first:], strict=False))
            return _pairs(given) * per_pair(given["features"][1], args, given)

        _formulas[f"pointproj::{operator}{suffix}"] = formula
        announce(f"pointproj::{operator}{suffix}")  # autograd in C++ does not, before it calls a backward

    def of_forward(channels: int, args: Sequence, given: Given) -> int:
        found = searches and given["neighbor_indices"] is None
        return DISTANCE * (1 + found) + 2 * channels

    register("", 0, of_forward)
    register("_backward", 2, lambda channels, args, _: _of_backward(channels, args[1]))
    register("_second_backward", 6, lambda channels, *_: DISTANCE + 10 * channels)


def _of_backward(channels: int, needs: Sequence[bool]) -> int:
    query_points, reference_points, features, sigma = needs
    through_logits = query_points or reference_points or sigma
    return 2 * channels * features + (2 * channels + DISTANCE) * through_logits


def _pairs(given: Given) -> int:
    queries, listed = given["query_points"][0], given.get("neighbor_indices")
    if listed is not None:
        return queries * listed[1]
    return queries * given["k"] if "k" in given else queries * given["reference_points"][0] // given["clouds"]

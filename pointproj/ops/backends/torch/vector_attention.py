"""Grouped vector attention over neighbour lists, in chunks of pairs.

The scores of pairs are kept, one number for each group. What they are computed from is not.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from pointproj.ops.backends.torch.edge_mlp import LAYERS, linear_places, relative_places
from pointproj.ops.backends.torch.listed_pairs import ListedPairs
from pointproj.ops.backends.torch.pair_chunks import PairFunction
from pointproj.ops.specification.activations import activated
from pointproj.ops.specification.clouds import linear_rows

POSITION = tuple((f"position_{weight}", f"position_{bias}") for weight, bias in LAYERS)
SCORE = tuple((f"score_{weight}", f"score_{bias}") for weight, bias in LAYERS)
OPTIONS = {
    "position_activation": str,
    "position_slope": float,
    "score_activation": str,
    "score_slope": float,
}


def vector_attend(
    reference_points: Tensor,
    keys: Tensor,
    values: Tensor,
    query_points: Tensor,
    queries: Tensor,
    position_layers: list[Tensor],
    score_layers: list[Tensor],
    rows: Tensor,
    row_splits: Tensor | None,
    activations: tuple[str, float, str, float],
) -> Tensor:
    """See :meth:`pointproj.ops.registry.Backend.vector_attend`."""
    first, further = score_layers[:2], score_layers[2:]
    # The score's first layer is linear: of keys, of queries, and of what the last layer of positions gives.
    *before, weight, bias = position_layers
    empty = weight.new_empty(0, 0), weight.new_empty(0)
    folded = [first[0] @ weight, linear(bias, *first)]
    lists = rows, row_splits, *activations, False
    scores, _ = _scores(
        reference_points, linear_rows(keys, first[0]), query_points, linear_rows(queries, first[0]),
        *_four([*before, *folded], empty), *_four([*empty, *further], empty), *lists,
    )  # fmt: skip
    weights = softmax_of_lists(scores, ListedPairs(rows, row_splits, len(reference_points)))
    return _sums(reference_points, values, query_points, weights, *_four(position_layers, empty), *lists)[0]


def softmax_of_lists(scores: Tensor, pairs: ListedPairs) -> Tensor:
    """Softmax (..., G) over each query's pairs, 0 where there is none."""
    made = []
    for score in scores.split(1, dim=-1):
        known = torch.where(pairs.exists, score.detach(), -torch.inf)
        largest = pairs.of_pairs(pairs.extreme("amax", known).nan_to_num(nan=torch.nan, neginf=0.0)[:, 0])
        weights = torch.where(pairs.exists, torch.where(pairs.exists, score, largest).sub(largest).exp(), 0.0)
        total = pairs.summed(weights)
        made.append(weights / pairs.of_pairs(torch.where(total != 0, total, 1.0)[:, 0]))
    return torch.cat(made, dim=-1)


def _four(layers: list[Tensor], empty: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Weights and biases of four layers, those that are not given without elements."""
    return [*layers, *empty * (len(LAYERS) - len(layers) // 2)]


def _positions(inputs: dict[str, Any], exists: Tensor) -> Tensor:
    """The position layers of each pair's relative position."""
    given = [(inputs[w], inputs[b]) for w, b in POSITION if inputs[w].numel()]
    places = relative_places(inputs, exists, given[0][0].dtype)
    values = linear_places(places, *given[0], places.new_empty(0))
    for weight, bias in given[1:]:
        values = activated(values, inputs["position_activation"], inputs["position_slope"])
        values = linear(values, weight, bias)
    return values


def _score_values(inputs: dict[str, Any], exists: Tensor) -> Tensor:
    """Of pairs: the score layers, whose first one is in the keys, the queries and the last of positions."""
    values = _positions(inputs, exists) - inputs["keys"] + inputs["queries"]
    for weight, bias in SCORE[1:]:
        if inputs[weight].numel():
            values = activated(values, inputs["score_activation"], inputs["score_slope"])
            values = linear(values, inputs[weight], inputs[bias])
    return values


def _summed_values(inputs: dict[str, Any], exists: Tensor) -> Tensor:
    values, weights = _positions(inputs, exists) + inputs["values"], inputs["weights"]
    return (values.unflatten(-1, (weights.shape[-1], -1)) * weights[..., None]).flatten(-2)


def _last(inputs: dict[str, Any], layers: tuple[tuple[str, str], ...]) -> int:
    """Outputs of the last layer, 0 without one."""
    return [0, *(inputs[weight].shape[0] for weight, _ in layers if inputs[weight].shape[0])][-1]


def _width(inputs: dict[str, Any]) -> int:
    return max(len(inputs[weight]) for weight, _ in (*POSITION, *SCORE) if weight in inputs)


_SCORES = PairFunction(
    _score_values,
    references=("reference_points", "keys"),
    queries=("query_points", "queries"),
    pairs=(),
    shared=tuple(name for layer in (*POSITION, *SCORE) for name in layer),
    options=OPTIONS,
    channels=lambda inputs: _last(inputs, SCORE) or _last(inputs, POSITION),
    width=_width,
    dtype_like="position_weight_1",
    reduced=False,
)
_SUMS = _SCORES._replace(
    values=_summed_values,
    references=("reference_points", "values"),
    queries=("query_points",),
    pairs=("weights",),
    shared=tuple(name for layer in POSITION for name in layer),
    channels=lambda inputs: _last(inputs, POSITION),
    reduced=True,
)
_scores = _SCORES.operator("pointproj::torch_vector_scores")
_sums = _SUMS.operator("pointproj::torch_vector_sums")

"""Grouped vector attention over neighbour lists, in chunks of pairs.

Of padded lists, a chunk has all pairs of its queries, so that nothing of a pair is kept. Of others the scores
are kept, one number of a pair for each group. What they are computed from is not.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from pointproj.ops.backends.torch.edge_mlp import LAYERS, linear_places, relative_places
from pointproj.ops.backends.torch.listed_pairs import ListedPairs
from pointproj.ops.backends.torch.pair_chunks import PairFunction
from pointproj.ops.specification.activations import activated
from pointproj.ops.specification.clouds import rows_of

NETWORKS = ("position", "score")
LAYERS_OF = {part: [tuple(f"{part}_{name}" for name in layer) for layer in LAYERS] for part in NETWORKS}
KIND = {"activation": str, "slope": float, "at_end": bool}


def vector_attend(*args: Any) -> Tensor:
    """See :meth:`pointproj.ops.registry.Backend.vector_attend`."""
    return attended(inputs_of(*args))


def inputs_of(
    reference_points: Tensor,
    keys: Tensor,
    values: Tensor,
    query_points: Tensor,
    queries: Tensor,
    position_layers: list[Tensor],
    score_layers: list[Tensor],
    rows: Tensor,
    row_splits: Tensor | None,
    activations: tuple[str, float, bool, str, float, bool],
) -> dict[str, Any]:
    """The arguments of :func:`vector_attend` as the inputs of :data:`ATTENDED`."""
    pairs = reference_points, keys, values, query_points, queries
    layers = *_four(position_layers), *_four(score_layers)
    lists = rows, row_splits, *activations, False
    return dict(zip(ATTENDED.parameters, (*pairs, *layers, *lists), strict=True))


def attended(inputs: dict[str, Any]) -> Tensor:
    """The result for inputs of :data:`ATTENDED`, differentiable twice."""
    if inputs["row_splits"] is None:
        return _attended(*inputs.values())[0]
    scores, _ = _scores(*(inputs[name] for name in _SCORES.parameters))
    pairs = ListedPairs(inputs["rows"], inputs["row_splits"], inputs["reference_points"].shape[0])
    inputs = inputs | {"weights": softmax_of_lists(scores, pairs)}
    return _sums(*(inputs[name] for name in _SUMS.parameters))[0]


def softmax_of_lists(scores: Tensor, pairs: ListedPairs) -> Tensor:
    """Softmax (M, G) over each query's pairs, 0 in slots without one; of lists that follow one another."""
    known = torch.where(pairs.exists, scores.detach(), -torch.inf)
    largest = pairs.extreme("amax", known).nan_to_num(nan=torch.nan, neginf=0.0)
    largest = rows_of(largest, pairs.query)
    weights = torch.where(pairs.exists, torch.where(pairs.exists, scores, largest).sub(largest).exp(), 0.0)
    total = pairs.summed(weights)
    return weights / rows_of(torch.where(total != 0, total, 1.0), pairs.query)


def _four(layers: list[Tensor]) -> list[Tensor]:
    """Weights and biases of four layers, those that are not given without elements."""
    empty = layers[0].new_empty(0, 0), layers[0].new_empty(0)
    return [*layers, *empty * (len(LAYERS) - len(layers) // 2)]


def _positions(inputs: dict[str, Any], exists: Tensor) -> Tensor:
    """The position layers of each pair's relative position."""
    places = relative_places(inputs, exists, inputs["position_weight_1"].dtype)
    first = (inputs[name] for name in LAYERS_OF["position"][0])
    return _further(inputs, "position", linear_places(places, *first, places.new_empty(0)))


def _further(inputs: dict[str, Any], part: str, values: Tensor) -> Tensor:
    """What is behind the first layer of a network."""
    kind = inputs[f"{part}_activation"], inputs[f"{part}_slope"]
    for weight, bias in LAYERS_OF[part][1:]:
        if inputs[weight].numel():
            values = linear(activated(values, *kind), inputs[weight], inputs[bias])
    return activated(values, *kind) if inputs[f"{part}_at_end"] else values


def _score_values(inputs: dict[str, Any], exists: Tensor) -> Tensor:
    return _scores_of(inputs, _positions(inputs, exists))


def _scores_of(inputs: dict[str, Any], moved: Tensor) -> Tensor:
    weight, bias = (inputs[name] for name in LAYERS_OF["score"][0])
    return _further(inputs, "score", linear(moved - inputs["keys"] + inputs["queries"], weight, bias))


def _summed_values(inputs: dict[str, Any], exists: Tensor) -> Tensor:
    return _weighted(inputs["values"] + _positions(inputs, exists), inputs["weights"])


def _attended_values(inputs: dict[str, Any], exists: Tensor) -> Tensor:
    moved = _positions(inputs, exists)
    scores = _scores_of(inputs, moved)
    # Not of -inf alone: a query without neighbours would have NaN.
    scores = torch.where(exists[..., None], scores, torch.finfo(scores.dtype).min)
    return _weighted(inputs["values"] + moved, scores.softmax(1))


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    """Each group of channels times its weight."""
    return (values.unflatten(-1, (weights.shape[-1], -1)) * weights[..., None]).flatten(-2)


def last_width(inputs: dict[str, Any], part: str) -> int:
    """Outputs of the last layer."""
    return [inputs[weight].shape[0] for weight, _ in LAYERS_OF[part] if inputs[weight].shape[0]][-1]


def _width(inputs: dict[str, Any]) -> int:
    return 2 * max(len(inputs[name]) for name in inputs if "weight_" in name)  # two networks hold tensors


ATTENDED = PairFunction(
    _attended_values,
    references=("reference_points", "keys", "values"),
    queries=("query_points", "queries"),
    pairs=(),
    shared=tuple(name for part in NETWORKS for layer in LAYERS_OF[part] for name in layer),
    options={f"{part}_{name}": kind for part in NETWORKS for name, kind in KIND.items()},
    channels=lambda inputs: last_width(inputs, "position"),
    width=_width,
    dtype_like="position_weight_1",
    reduced=True,
    masks=True,
)
_SCORES = ATTENDED._replace(
    values=_score_values,
    references=("reference_points", "keys"),
    channels=lambda inputs: last_width(inputs, "score"),
    reduced=False,
    masks=False,
)
_SUMS = ATTENDED._replace(
    values=_summed_values,
    references=("reference_points", "values"),
    queries=("query_points",),
    pairs=("weights",),
    shared=tuple(name for layer in LAYERS_OF["position"] for name in layer),
    masks=False,
)
_attended = ATTENDED.operator("pointproj::torch_vector_attend")
_scores = _SCORES.operator("pointproj::torch_vector_scores")
_sums = _SUMS.operator("pointproj::torch_vector_sums")

"""Edge networks in plain torch, in chunks of pairs.

What a pair needs of the first layer's products with features is computed before, one row a reference point
(``hidden``) and one a query (``of_queries``). With a bias, the relative position r_ij, and its length if
asked, are multiplied here; without one, W r_ij + b is in those two:

    v_ij = [further layers of] act(hidden_j + of_queries_i [+ W r_ij + b])    out_i = sum_j w_ij v_ij factor_j

or for each channel the largest w_ij v_ij factor_j: in the derivatives, that is the sum over the chosen pairs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from pointproj.ops.backends.torch.pair_chunks import PairFunction
from pointproj.ops.backends.torch.pair_lists import PairLists
from pointproj.ops.bridge.torch_op import torch_op
from pointproj.ops.specification.activations import activated
from pointproj.ops.specification.reference import safe_sqrt

LAYERS = tuple((f"weight_{number}", f"bias_{number}") for number in (1, 2, 3, 4))


def edge_mlp(*args: Any) -> Tensor:
    """The sums or the largest: see :meth:`pointproj.ops.registry.Backend.edge_mlp`."""
    inputs = dict(zip(EDGE_MLP.parameters, args, strict=True))
    further = ("bias_1", "weight_2", "factors", "weights")  # the first: relative positions of pairs
    if inputs["active_at_end"] or any(inputs[name].numel() for name in further):
        return _edge_mlp(*args)[0]
    has_pairs = inputs["rows"].numel() and inputs["hidden"].numel()
    if not inputs["largest"] or inputs["row_splits"] is not None or not has_pairs:
        return _edge_mlp(*args)[0]
    return _largest_sums(inputs["hidden"], inputs["of_queries"], inputs["rows"])


def _largest_sums(hidden: Tensor, of_queries: Tensor, rows: Tensor) -> Tensor:
    """The largest of ``hidden_j + of_queries_i``: what a query adds does not change which it is."""
    row = _largest_rows(hidden.detach(), rows)
    made = hidden.gather(0, row.clamp(max=len(hidden) - 1)) + of_queries
    return torch.where(row < len(hidden), made, 0.0)


def _find_largest(values: Tensor, rows: Tensor) -> tuple[Tensor]:
    """The row of the largest value of each query and channel, the first of several; N or more for none."""
    lists = PairLists(rows, None, len(values))
    found = rows.new_empty(len(rows), values.shape[1])
    padded = lists.with_spare(values, -torch.inf)
    for at in lists.chunks(values.shape[1]):
        found[at] = lists.rows[at].gather(1, lists.of_references(at, padded).max(1).indices)
    return (found,)


_largest_rows = torch_op(
    "pointproj::torch_largest_rows",
    _find_largest,
    lambda values, rows: (((rows.shape[0], values.shape[1]), rows.dtype),),
)


def _values(inputs: dict[str, Any], exists: Tensor) -> Tensor:
    values = _first_layer(inputs, exists)
    activation = inputs["activation"], inputs["slope"]
    for weight, bias in LAYERS[1:]:
        if inputs[weight].numel():
            values = linear(activated(values, *activation), inputs[weight], inputs[bias])
    if inputs["active_at_end"]:
        values = activated(values, *activation)
    for name in ("factors", "weights"):
        if inputs[name].numel():
            values = values * inputs[name]
    return values


def _first_layer(inputs: dict[str, Any], exists: Tensor) -> Tensor:
    if not inputs["bias_1"].numel():
        return inputs["hidden"] + inputs["of_queries"]
    places = relative_places(inputs, exists, inputs["weight_1"].dtype)
    if inputs["with_distance"]:
        places = torch.cat([places, safe_sqrt(places.square().sum(-1, keepdim=True))], dim=-1)
    values = linear_places(places, inputs["weight_1"], inputs["bias_1"], inputs["hidden"])
    return values + inputs["of_queries"] if inputs["of_queries"].numel() else values


def relative_places(inputs: dict[str, Any], exists: Tensor, dtype: torch.dtype) -> Tensor:
    """Reference minus query point of each pair (..., D), 0 where there is none."""
    places = inputs["reference_points"] - inputs["query_points"]
    return torch.where(exists[..., None], places, 0.0).to(dtype)


def linear_places(places: Tensor, weight: Tensor, bias: Tensor, more: Tensor) -> Tensor:
    """A linear layer of the few coordinates of each pair, plus ``more``, unless that has no elements."""
    rows = torch.cat([places, torch.ones_like(places[..., :1])], dim=-1).flatten(0, -2)
    # Contiguous after the transposition: torch then takes the faster product for the weight's gradient.
    weight = torch.cat([weight, bias[:, None]], dim=1).t().contiguous()
    if more.numel():
        values = torch.addmm(more.flatten(0, -2).to(weight.dtype), rows, weight)
    else:
        values = rows @ weight
    return values.view(*places.shape[:-1], -1)


def _channels(inputs: dict[str, Any]) -> int:
    return [inputs[weight].shape[0] for weight, _ in LAYERS if inputs[weight].shape[0]][-1]


EDGE_MLP = PairFunction(
    _values,
    references=("reference_points", "hidden", "factors"),
    queries=("query_points", "of_queries"),
    pairs=("weights",),
    shared=tuple(name for layer in LAYERS for name in layer),
    options={"activation": str, "slope": float, "active_at_end": bool, "with_distance": bool},
    channels=_channels,
    width=lambda inputs: max(len(inputs[weight]) for weight, _ in LAYERS),
    dtype_like="weight_1",
    reduced=True,
)
_edge_mlp = EDGE_MLP.operator("pointproj::torch_edge_mlp")

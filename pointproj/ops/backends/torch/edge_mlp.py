"""Edge networks in plain torch: chunks of pairs, which the derivatives compute once more.

What a pair needs of the first layer's products with features is computed before, one row a reference point
(``hidden``) and one a query (``of_queries``). The relative position is multiplied here: its rounding does not
depend on where the cloud is. With the relative position r_ij, and its length if asked,

    v_ij = [further layers of] act(hidden_j + of_queries_i + W r_ij + b)          out_i = sum_j w_ij v_ij factor_j

or for each channel the largest w_ij v_ij factor_j: in the derivatives, that is the sum over the chosen pairs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from pointproj.ops.backends.torch.pair_lists import PairLists
from pointproj.ops.bridge.torch_op import signed, torch_op
from pointproj.ops.specification.activations import activated
from pointproj.ops.specification.gradients import first_gradients, second_gradients
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors
from pointproj.ops.specification.reference import safe_sqrt

OF_REFERENCES = ("hidden", "reference_points", "factors")
OF_QUERIES = ("of_queries", "query_points")
LAYERS = tuple((f"weight_{number}", f"bias_{number}") for number in (1, 2, 3, 4))
DIFFERENTIABLE = (*OF_REFERENCES, *OF_QUERIES, "weights", *(name for layer in LAYERS for name in layer))
PARAMETERS: dict[str, Any] = dict.fromkeys((*DIFFERENTIABLE, "rows"), Tensor) | {
    "row_splits": Tensor | None,
    "activation": str,
    "slope": float,
    "active_at_end": bool,
    "with_distance": bool,
    "largest": bool,
}


def edge_mlp(*args: Any) -> Tensor:
    """The sums or the largest: see :meth:`pointproj.ops.registry.Backend.edge_mlp`."""
    return _edge_mlp(*args)[0]


def pair_values(inputs: dict[str, Any], exists: Tensor) -> Tensor:
    """Results (..., C) of the network for pairs, whose inputs have a row for each pair; any value for none."""
    place = inputs["reference_points"] - inputs["query_points"]
    place = torch.where(exists[..., None], place, 0.0).to(inputs["weight_1"].dtype)
    if inputs["with_distance"]:
        place = torch.cat([place, safe_sqrt(place.square().sum(-1, keepdim=True))], dim=-1)
    activation = inputs["activation"], inputs["slope"]
    values = linear(place, inputs["weight_1"], inputs["bias_1"])
    for name in ("hidden", "of_queries"):
        if inputs[name].numel():
            values = values + inputs[name]
    for weight, bias in LAYERS[1:]:
        if inputs[weight].numel():
            values = linear(activated(values, *activation), inputs[weight], inputs[bias])
    if inputs["active_at_end"]:
        values = activated(values, *activation)
    for name in ("factors", "weights"):
        if inputs[name].numel():
            values = values * inputs[name]
    return values


class _Pairs:
    """The pairs of a call in chunks: what their network needs, and where its gradients belong."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs
        self.lists = PairLists(inputs["rows"], inputs["row_splits"], len(inputs["reference_points"]))
        self.width = max(len(inputs[weight]) for weight, _ in LAYERS)
        self.given = [name for name in DIFFERENTIABLE if inputs[name].numel()]

    def prepared(self, values: dict[str, Any]) -> dict[str, Any]:
        """Tensors like the differentiable inputs, as :meth:`of` takes them."""
        made = {name: values[name] for name in DIFFERENTIABLE}
        made |= {n: self.lists.with_spare(values[n]) for n in OF_REFERENCES if n in self.given}
        if "of_queries" in self.given:  # what is not finite must not reach pairs that are none
            made["of_queries"] = torch.where(self.lists.has_pairs[:, None], values["of_queries"], 0.0)
        return made

    def of(self, at: slice, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same of the pairs of a chunk."""
        made = {}
        for name in self.given:
            made[name] = values[name]
            if name in OF_REFERENCES:
                made[name] = self.lists.of_references(at, values[name])
            elif name in OF_QUERIES:
                made[name] = self.lists.of_queries(at, values[name])
            elif name == "weights":
                made[name] = values[name][at, ..., None]
        return made

    def values(self, at: slice, *given: Tensor) -> Tensor:
        """Results for the pairs of a chunk, of the inputs that are given."""
        return pair_values(self.inputs | dict(zip(self.given, given, strict=True)), self.lists.exists[at])

    def masked(self, at: slice, values: Tensor, winners: Tensor) -> Tensor:
        """Zeros in pairs that are none, or that are not the largest."""
        if winners.numel():
            return torch.where(self.lists.is_chosen(at, winners), values, 0.0)
        return self.lists.masked(at, values)

    def add(self, at: slice, totals: dict[str, Tensor], values: dict[str, Tensor | None]) -> None:
        """Add what pairs of a chunk give to tensors like the inputs, those of references with spare rows."""
        for name, value in values.items():
            if value is None:
                continue
            if name in OF_REFERENCES:
                self.lists.add_to_references(at, totals[name], value)
            elif name in OF_QUERIES:
                self.lists.add_to_queries(at, totals[name], value)
            elif name == "weights":
                totals[name][at] = value[..., 0]
            else:
                totals[name] += value

    def totals(self, needed: list[str]) -> dict[str, Tensor]:
        """Zeros like the inputs, in the dtype of sums."""
        made = {}
        for name in needed:
            like = self.inputs[name]
            dtype = torch.promote_types(like.dtype, torch.float32)
            made[name] = torch.zeros(like.shape, dtype=dtype, device=like.device)
            if name in OF_REFERENCES and name in self.given:
                made[name] = self.lists.with_spare(made[name])
        return made

    def finished(self, name: str, total: Tensor) -> Tensor:
        like = self.inputs[name]
        return total[: len(like)].to(like.dtype)


def _in_own_dtype(function: Any) -> Any:
    """The same without autocast, which would round what this operator computes in its own dtypes."""

    def run(*args: Any) -> Any:
        device = next(a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, Tensor)).device
        with torch.autocast(device.type, enabled=False):
            return function(*args)

    return run


def _chunks(pairs: _Pairs, prepared: dict[str, Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
    for at in pairs.lists.chunks(pairs.width):
        yield at, list(pairs.of(at, prepared).values())


@_in_own_dtype
def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = dict(zip(PARAMETERS, args, strict=True))
    pairs, ((shape, dtype), _) = _Pairs(inputs), _outputs(*args)
    sums = inputs["weight_1"].new_zeros(shape, dtype=dtype)
    prepared = pairs.prepared(inputs)
    if not inputs["largest"]:
        for at, given in _chunks(pairs, prepared):
            pairs.lists.add_to_queries(at, sums, pairs.lists.masked(at, pairs.values(at, *given)))
        return sums, inputs["rows"].new_empty(0, dtype=torch.int32)
    return pairs.lists.largest(
        lambda: ((at, pairs.values(at, *g)) for at, g in _chunks(pairs, prepared)), sums
    )


def _outputs(*args: Any) -> tuple:
    inputs = dict(zip(PARAMETERS, args, strict=True))
    rows, splits = inputs["rows"], inputs["row_splits"]
    queries = rows.shape[0] if splits is None else splits.shape[0] - 1
    channels = [inputs[weight].shape[0] for weight, _ in LAYERS if inputs[weight].shape[0]][-1]
    winners = (queries, channels) if inputs["largest"] else (0,)
    return ((queries, channels), inputs["weight_1"].dtype), (winners, torch.int32)


@_in_own_dtype
def _backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    pairs, winners = _Pairs(saved.inputs), saved.outputs[1]
    totals = pairs.totals([name for name in DIFFERENTIABLE if needs[name]])
    wanted = [needs[name] for name in pairs.given]
    for at, given in _chunks(pairs, pairs.prepared(saved.inputs)):
        upstream = pairs.masked(at, pairs.lists.of_queries_expanded(at, grads[0]), winners)
        own = first_gradients(lambda *values, at=at: pairs.values(at, *values), given, upstream, wanted)
        pairs.add(at, totals, dict(zip(pairs.given, own, strict=True)))
    return tuple(pairs.finished(name, totals[name]) if needs[name] else None for name in DIFFERENTIABLE)


@_in_own_dtype
def _second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
    pairs, winners = _Pairs(saved.inputs), saved.outputs[1]
    totals, d_grad = pairs.totals(list(DIFFERENTIABLE)), torch.zeros_like(grads[0])
    along = pairs.prepared(dict(zip(DIFFERENTIABLE, directions, strict=True)))
    for at, given in _chunks(pairs, pairs.prepared(saved.inputs)):
        upstream = pairs.masked(at, pairs.lists.of_queries_expanded(at, grads[0]), winners)
        function = lambda *values, at=at: pairs.values(at, *values)  # noqa: E731
        of_grad, *own = second_gradients(function, given, upstream, list(pairs.of(at, along).values()))
        pairs.lists.add_to_queries(at, d_grad, pairs.masked(at, of_grad, winners))
        pairs.add(at, totals, dict(zip(pairs.given, own, strict=True)))
    return (d_grad, *(pairs.finished(name, totals[name]) for name in DIFFERENTIABLE))


_edge_mlp = torch_op(
    "pointproj::torch_edge_mlp",
    signed(_forward, PARAMETERS, tuple[Tensor, Tensor]),
    _outputs,
    differentiable=DIFFERENTIABLE,
    backward=_backward,
    second_backward=_second_backward,
)

"""Grouped vector attention of networks of one or two layers, without pairs' tensors in memory.

Between the positions' last layer, ``moved = W a + c``, and the first of the scores, ``S (query - key + moved)
+ d``, there is no activation. So queries and keys are multiplied by ``S`` before they are paired, and a pair
has two products of the same ``a``, which is computed in blocks:

    a = act(V r + b)    u = S W a + (S query + S c + d) - S key    score = T act(u)    moved = W a + c

A forward program's softmax takes neighbours as they come, relative to the largest score so far. It keeps the
logarithm of each query's sum, so that a backward program needs no more than its own pairs. Narrow layers are
bound by gathers and atomics, wide ones by the products. Other networks, and all in deterministic mode, run in
plain torch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from pointproj.ops.backends.torch import vector_attention as plain
from pointproj.ops.backends.triton import pairs
from pointproj.ops.backends.triton.pairs import COPIES, IDENTITY, NUMBER_OF, OF_LAYER
from pointproj.ops.backends.triton.vector_kernels import attend_gradient_kernel, attend_kernel
from pointproj.ops.bridge.torch_op import signed, torch_op
from pointproj.ops.bridge.triton_op import cdiv, launch, runs_kernels
from pointproj.ops.specification.clouds import linear_rows
from pointproj.ops.specification.gradients import first_gradients, recording, second_gradients
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors

_WEIGHTS = [f"{part}_{name}_{i}" for part in plain.NETWORKS for i in (1, 2) for name in ("weight", "bias")]
_MERGED = ("keys", "values", "queries", *_WEIGHTS)


def vector_attend(*args: Any) -> Tensor:
    """See :meth:`pointproj.ops.registry.Backend.vector_attend`."""
    inputs = plain.inputs_of(*args)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic or not runs_kernels(inputs["rows"]) or not _is_served(inputs):
        return plain.attended(inputs)
    return _attended(*inputs.values())[0]


def _is_served(inputs: dict[str, Any]) -> bool:
    """Whether there is at most one product before and one behind the addition of queries and keys."""
    groups, channels = plain.last_width(inputs, "score"), inputs["queries"].shape[1]
    width = pairs.power_of_two(groups) * pairs.power_of_two(channels // groups)
    width = max(pairs.width_of(inputs["score_weight_1"].shape[0]), width)
    fewer = all(
        not inputs[f"{part}_weight_3"].numel()
        and not (inputs[f"{part}_weight_2"].numel() and inputs[f"{part}_at_end"])
        for part in plain.NETWORKS
    )
    return fewer and inputs["query_points"].shape[1] <= 3 and pairs.fits(inputs["queries"], width)


class _Merged(NamedTuple):
    """The tensors of the formula above; layers are (out, in)."""

    keys: Tensor  # S key
    values: Tensor
    queries: Tensor  # S query + S c + d
    first: Tensor  # (5, H): V, rows of zeros, b
    score: Tensor  # S W
    place: Tensor  # W
    shift: Tensor  # c
    last: Tensor  # T; its bias has no influence


def _merged(inputs: dict[str, Any], tensors: dict[str, Any]) -> _Merged:
    """Made of the tensors named in ``_MERGED``. The identity stands for a layer that is missing."""
    first, bias, place, shift, score, offset, last, _ = (tensors[name] for name in _WEIGHTS)

    def identity(size: int) -> Tensor:
        return torch.eye(size, dtype=first.dtype, device=first.device)

    if not place.numel() and inputs["position_at_end"]:
        place, shift = identity(len(first)), torch.zeros_like(bias)
    elif not place.numel():
        place, shift, first = first, bias, identity(first.shape[1])
        bias = torch.zeros_like(first[0])
    last = last if last.numel() else identity(len(score))
    unused = first.new_zeros(len(first), OF_LAYER.value - 1 - first.shape[1])
    rows = torch.cat([first, unused, bias[:, None]], dim=1).t()
    queries = linear_rows(tensors["queries"], score) + linear(shift, score, offset)
    keys = linear_rows(tensors["keys"], score)
    merged = _Merged(keys, tensors["values"], queries, rows, score @ place, place, shift, last)
    return _Merged(*(tensor.contiguous() for tensor in merged))


class _Sizes(NamedTuple):
    """Numbers of channels, as kernels take them."""

    inputs: int  # of ``a``
    scores: int  # of ``u``
    groups: int
    depth: int  # of a group


def _constants(inputs: dict[str, Any], sizes: _Sizes) -> dict[str, Any]:
    """Constants of kernels: powers of two for the channels, activations, how to multiply."""
    groups = pairs.power_of_two(sizes.groups)
    depth = max(pairs.power_of_two(sizes.depth), 16 // groups)
    made = {
        "SCORES": pairs.width_of(sizes.scores),
        "GROUPS": groups,
        "DEPTH": depth,
        "EXACT": (groups, depth) == (sizes.groups, sizes.depth),
        "LASTS": max(16, groups),
        "PRECISION": pairs.precision(),
    }
    for part in plain.NETWORKS:
        is_active = inputs[f"{part}_weight_2"].numel() or inputs[f"{part}_at_end"]
        made[f"{part.upper()}_ACT"] = NUMBER_OF[inputs[f"{part}_activation"]] if is_active else IDENTITY
        made[f"{part.upper()}_SLOPE"] = inputs[f"{part}_slope"]
    return made


def _prepared(inputs: dict[str, Any], merged: _Merged, backward: bool) -> tuple:
    """Lists, sizes, constants and options of a launch."""
    groups = len(merged.last)
    sizes = _Sizes(merged.first.shape[1], len(merged.score), groups, len(merged.place) // groups)
    constants, of = _constants(inputs, sizes), pairs.lists(inputs, backward)
    width = max(constants["SCORES"], constants["GROUPS"] * constants["DEPTH"])
    options = pairs.launch_options(width, of, backward)
    return of, sizes, constants | options


def _outputs(*args: Any) -> tuple:
    """The result, and each query's logarithm of the sum of its weights, -inf without pairs."""
    inputs = dict(zip(plain.ATTENDED.parameters, args, strict=True))
    (shape, dtype), _ = plain.ATTENDED.outputs(*args)
    return (shape, dtype), ((shape[0], plain.last_width(inputs, "score")), dtype)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = dict(zip(plain.ATTENDED.parameters, args, strict=True))
    (shape, dtype), (kept, _) = _outputs(*args)
    result, sums = (inputs["keys"].new_empty(size, dtype=dtype) for size in (shape, kept))
    if not inputs["rows"].numel() or not shape[0]:
        return result.zero_(), sums.fill_(-torch.inf)
    with torch.autocast(result.device.type, enabled=False):
        merged = _merged(inputs, inputs)
    of, sizes, constants = _prepared(inputs, merged, backward=False)
    grid = (cdiv(of.items, constants["TILE"]),)
    launch(attend_kernel, grid, *of, *merged, *sizes, result, sums, **constants)
    return result, sums


def _backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    """Gradients of all differentiable inputs, None where not needed."""
    inputs, names = saved.inputs, plain.ATTENDED.differentiable
    if torch.are_deterministic_algorithms_enabled():
        tensors = [inputs[name] for name in names]
        return first_gradients(_plainly(inputs, names), tensors, grads[0], [*needs.values()])
    wanted = [name for name in _MERGED if needs[name]]
    with torch.autocast(grads[0].device.type, enabled=False), recording():
        leaves = {name: inputs[name].detach().requires_grad_(needs[name]) for name in _MERGED}
        merged = _merged(inputs, leaves)
        made, upstream = _gradients(inputs, merged, grads[0], needs, saved.outputs)
        ways = [pair for pair in zip(merged, upstream, strict=True) if pair[0].requires_grad]
        if ways:
            tensors, upstream = zip(*ways, strict=True)
            of = [leaves[name] for name in wanted]
            found = torch.autograd.grad(tensors, of, upstream, allow_unused=True)
            made |= dict(zip(wanted, found, strict=True))

    def finished(name: str) -> Tensor | None:
        if not needs[name]:
            return None
        found = made.get(name)
        return torch.zeros_like(inputs[name]) if found is None else found.to(inputs[name].dtype).contiguous()

    return tuple(map(finished, names))


def _gradients(
    inputs: dict[str, Any], merged: _Merged, grad: Tensor, needs: dict[str, bool], outputs: Tensors
) -> tuple[dict[str, Tensor], _Merged]:
    """Gradients of the points that need one, and of the merged tensors."""
    of, sizes, constants = _prepared(inputs, merged, backward=True)
    result, sums = outputs
    known = _Merged(*(tensor.detach() for tensor in merged))
    makes_places = needs["query_points"] or needs["reference_points"]
    points = [p.new_zeros(p.shape if makes_places else (0,), dtype=grad.dtype) for p in of[2:4]]
    rows = [torch.zeros_like(tensor) for tensor in known[:3]]
    is_stored = max(constants["SCORES"], constants["GROUPS"] * constants["DEPTH"]) > pairs.NARROW
    copies = [known.score, known.place, known.last, known.first]
    copies = [grad.new_zeros(COPIES.value, *tensor.shape) for tensor in copies[2 * is_stored :]]
    layers = [torch.zeros_like(known.score), torch.zeros_like(known.place)] if is_stored else copies[:2]
    shares = (grad * result).view(-1, sizes.groups, sizes.depth).sum(-1)
    widths = [sizes.inputs, sizes.scores, sizes.groups * sizes.depth]
    for first, last, grid in pairs.chunks(of, constants, sum(widths) * is_stored * grad.element_size()):
        slots = (last - first) * of.k if is_stored else 0
        kept = [grad.new_empty(slots, width) for width in widths]
        launch(
            attend_gradient_kernel, grid, *of, *known, *sizes, first, last, sums, grad, shares,
            *points, *rows, *layers, *copies[-2:], *kept,
            PLACES=makes_places, FIRST=merged.first.requires_grad, STORED=is_stored, **constants,
        )  # fmt: skip
        if is_stored:
            for layer, values in zip(layers, kept[1:], strict=True):
                layer.addmm_(values.t(), kept[0])
    if not is_stored:
        layers = [copy.sum(0) for copy in layers]
    shift = torch.where(sums[:, :1] != -torch.inf, grad, 0.0).sum(0)
    d_last, d_first = (copy.sum(0) for copy in copies[-2:])
    dims = inputs["query_points"].shape[1]
    made = (
        dict(zip(("query_points", "reference_points"), (p[:, :dims] for p in points), strict=True))
        if makes_places
        else {}
    )
    keys, values, queries = rows
    return made, _Merged(keys, values, queries, d_first, *layers, shift, d_last)


def _second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
    inputs, names = saved.inputs, plain.ATTENDED.differentiable
    return second_gradients(_plainly(inputs, names), [inputs[name] for name in names], grads[0], directions)


def _plainly(inputs: dict[str, Any], names: Sequence[str]) -> Callable[..., Tensor]:
    """The plain form as a function of the inputs of these names."""
    return lambda *tensors: plain.attended(inputs | dict(zip(names, tensors, strict=True)))


_attended = torch_op(
    "pointproj::triton_vector_attend",
    signed(_forward, plain.ATTENDED.parameters, tuple[Tensor, Tensor]),
    _outputs,
    differentiable=plain.ATTENDED.differentiable,
    backward=_backward,
    second_backward=_second_backward,
)

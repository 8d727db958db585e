"""Edge networks of one activation: a gather, an addition, the activation and a sum for each pair.

The products of the first layer with features are made before, and those of the last layer after, see
:mod:`pointproj.ops.edge_mlp`. A program has a tile of queries and a block of channels. The backward computes
the pairs once more. It adds to the gradients of reference points by atomics, and to those of the layer in
several copies. Other networks, and all in deterministic mode, run in chunks of plain torch.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pointproj.ops.backends.torch import edge_mlp as plain
from pointproj.ops.backends.torch.pair_lists import PairLists
from pointproj.ops.backends.triton.activations import IDENTITY, NUMBER_OF
from pointproj.ops.backends.triton.edge_kernels import gradient_kernel, sum_kernel
from pointproj.ops.backends.triton.pairs import (
    COPIES,
    OF_LAYER,
    in_space,
    precision,
    rows_of_places,
    weight_of_places,
)
from pointproj.ops.bridge.torch_op import signed
from pointproj.ops.bridge.triton_op import cdiv, launch, runs_kernels, triton_op
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors

# A thread has four numbers of a tile, which it reads at once; of narrow ones, where none are added up by
# atomics, eight.
LAUNCH = {"sum_kernel": {"num_warps": 4}, "gradient_kernel": {"num_warps": 4}}
OF_THREAD, OF_THREAD_NARROW, MOST_BLOCK = 4, 8, 32
OPTIONS = {"mean": bool, "dtype": torch.dtype}
PARAMETERS = {name: kind for name, kind in plain.EDGE_MLP.parameters.items() if name != "largest"} | OPTIONS


def _runs(inputs: dict[str, Any]) -> bool:
    return runs_kernels(inputs["rows"]) and inputs["query_points"].shape[1] <= 3


def _outputs(*args: Any) -> tuple:
    """Sums or means, and how many pairs each query has."""
    inputs = dict(zip(PARAMETERS, args, strict=True))
    (shape, real), _ = plain.EDGE_MLP.outputs(*args[: -len(OPTIONS)], False)
    return (shape, inputs["dtype"]), (shape[:1], real)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    inputs = dict(zip(PARAMETERS, args, strict=True))
    if not _runs(inputs):
        sums, _ = plain.EDGE_MLP.forward(*args[: -len(OPTIONS)], False)
        lists = PairLists(inputs["rows"], inputs["row_splits"], len(inputs["reference_points"]))
        counts = lists.counts.to(sums.dtype)
        return _divided(sums, counts, inputs).to(inputs["dtype"]), counts
    sums, counts = (inputs["rows"].new_empty(shape, dtype=dtype) for shape, dtype in _outputs(*args))
    _launch(sum_kernel, inputs, counts, sums)
    return sums, counts


def _divided(values: Tensor, counts: Tensor, inputs: dict[str, Any]) -> Tensor:
    """By the number of pairs, for means."""
    return values / counts.clamp(min=1.0)[:, None] if inputs["mean"] else values


def _of_sums(grads: Tensors, saved: Saved) -> tuple[Tensors, Saved]:
    """Upstream gradients and what was saved, as plain torch has them of sums."""
    grad = grads[0].to(saved.inputs["weight_1"].dtype)
    return (_divided(grad, saved.outputs[1], saved.inputs),), Saved(
        saved.inputs | {"largest": False}, saved.outputs
    )


def _second_backward(directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
    d_grad, *others = plain.EDGE_MLP.second_backward(directions, *_of_sums(grads, saved))
    return _divided(d_grad, saved.outputs[1], saved.inputs).to(grads[0].dtype), *others


def _backward(grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
    """Gradients of all differentiable inputs, None where not needed."""
    inputs = saved.inputs
    if not _runs(inputs) or torch.are_deterministic_algorithms_enabled():
        grads, saved = _of_sums(grads, saved)
        return plain.EDGE_MLP.backward(grads, needs, saved)
    layer = inputs["weight_1"]
    channels, dims = layer.shape[0], inputs["query_points"].shape[1]

    def zeros(name: str, *shape: int) -> Tensor:
        return layer.new_zeros(shape if needs[name] else (0,))

    queries, references = grads[0].shape[0], inputs["reference_points"].shape[0]
    made = {
        "reference_points": zeros("reference_points", references, 3),
        "hidden": zeros("hidden", references, channels),
        "query_points": zeros("query_points", queries, 3),
        "of_queries": zeros("of_queries", queries, channels),
        "weights": zeros("weights", *inputs["weights"].shape),
    }
    of_layer = layer.new_zeros(COPIES.value, OF_LAYER.value, channels)
    flags = [needs[name] for name in made] + [needs["weight_1"] or needs["bias_1"]]
    if not inputs["bias_1"].numel():  # points and layer are in hidden and of_queries
        flags[0] = flags[2] = flags[5] = False
    _launch(
        gradient_kernel, inputs, saved.outputs[1], grads[0], *made.values(), of_layer, FLAGS=_packed(flags)
    )
    columns = of_layer.sum(0)
    made |= {"weight_1": weight_of_places(columns, inputs), "bias_1": columns[-1]}
    made |= {name: made[name][:, :dims] for name in ("reference_points", "query_points") if needs[name]}

    def finished(name: str) -> Tensor | None:
        given = inputs[name]
        if not needs[name]:
            return None
        if not given.numel() or name not in made:
            return torch.zeros_like(given)
        return made[name].to(given.dtype).contiguous()

    return tuple(finished(name) for name in plain.EDGE_MLP.differentiable)


def _is_rough(inputs: dict[str, Any]) -> bool:
    """Whether the first layer's products are no more exact than TF32."""
    narrow = inputs["hidden"].dtype in (torch.float16, torch.bfloat16)
    return narrow or (inputs["weight_1"].dtype == torch.float32 and precision() == "tf32")


def _packed(flags: list[bool]) -> int:
    """A bit for each flag, from the lowest."""
    return sum(1 << place for place, flag in enumerate(flags) if flag)


class _Network(NamedTuple):
    """The first arguments of both kernels."""

    rows: Tensor
    row_splits: Tensor
    query_points: Tensor  # (Q, 3)
    reference_points: Tensor  # (N, 3)
    hidden: Tensor
    of_queries: Tensor
    weights: Tensor
    layer: Tensor  # (OF_LAYER, H)
    queries: int
    references: int
    k: int
    channels: int


def _launch(kernel: Any, inputs: dict[str, Any], *args: Any, **options: Any) -> None:
    """Launch a kernel over tiles of queries, and blocks of channels."""
    rows, splits, layer = inputs["rows"], inputs["row_splits"], inputs["weight_1"]
    channels = layer.shape[0]
    points = [inputs["query_points"], inputs["reference_points"]]
    if inputs["bias_1"].numel():
        points = [in_space(given) for given in points]
        layer = rows_of_places(inputs)
    queries = rows.shape[0] if splits is None else splits.shape[0] - 1
    network = _Network(
        rows, rows if splits is None else splits, *points, inputs["hidden"], inputs["of_queries"],
        inputs["weights"], layer, queries, inputs["reference_points"].shape[0],
        rows.shape[1] if splits is None else 1, channels,
    )  # fmt: skip
    block = min(MOST_BLOCK, max(16, triton.next_power_of_2(channels)))
    options |= LAUNCH[kernel.__name__]
    of_thread = OF_THREAD_NARROW if kernel is sum_kernel and inputs["hidden"].itemsize == 2 else OF_THREAD
    tile = of_thread * 32 * options["num_warps"] // block
    launch(
        kernel, (cdiv(queries, tile), cdiv(channels, block)), *network, *args,
        PADDED=splits is None, HIDDEN=inputs["hidden"].numel() > 0,
        OF_QUERIES=inputs["of_queries"].numel() > 0,
        WEIGHTED=inputs["weights"].numel() > 0,
        PLACES=inputs["bias_1"].numel() > 0, DISTANCE=inputs["with_distance"], MEAN=inputs["mean"],
        ACTIVATION=NUMBER_OF[inputs["activation"]] if inputs["active_at_end"] else IDENTITY,
        SLOPE=inputs["slope"], ROUGH=_is_rough(inputs), BLOCK=block, TILE=tile, **options,
    )  # fmt: skip


edge_sums = triton_op(
    "pointproj::triton_edge_sums",
    signed(_forward, PARAMETERS, tuple[Tensor, Tensor]),
    _outputs,
    differentiable=plain.EDGE_MLP.differentiable,
    backward=_backward,
    second_backward=_second_backward,
)

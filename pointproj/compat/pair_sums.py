"""Sums over neighbour lists of what a network makes of each pair, a chunk of pairs at a time.

A list of M pairs and a network of width W need M x W numbers for each of its layers when all pairs go through
it at once, and autograd keeps them. Here a chunk of whole rows goes through at a time; the backward computes
each chunk again. What is held is the list, the sums, and the layers of one chunk.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pointproj.ops.clouds import queries_of

ELEMENTS = {"cpu": 2**20, "cuda": 2**26}  # numbers of the widest layer in one chunk


class Inputs(NamedTuple):
    """What the network takes: tensors, or None for what it does not read."""

    of_queries: Tensor  # (Q, E)
    of_points: Tensor  # (..., N, H)
    features: Tensor | None  # (..., N, C)
    of_pairs: Tensor | None  # (M, 1)
    parameters: tuple[Tensor, ...]


# Takes the inputs of a chunk of R queries and P pairs, (R, E), (..., P, H), (..., P, C), (P, 1) and the
# parameters, and the query of each pair, (P,) rows of the R. Gives (..., P, C).
Network = Callable[[Inputs, Tensor], Tensor]


class Chunk(NamedTuple):
    """Whole rows of the list, and their pairs."""

    rows: slice
    pairs: slice


def sum_pairs(network: Network, inputs: Inputs, row_splits: Tensor, indices: Tensor, width: int) -> Tensor:
    """For each query, the sum of ``network`` over its pairs.

    Parameters
    ----------
    network : callable
        A :data:`Network` whose result for a pair depends on that pair alone, and is the same each time.
    inputs : Inputs
        Of all queries, points and pairs. Each tensor gets its gradient; differentiable twice, where the
        second derivative holds all pairs at once.
    row_splits : (Q + 1,) int64 tensor
        The pairs of query i are ``row_splits[i]:row_splits[i + 1]``. Copied to the host, which waits for it.
    indices : (M,) int64 tensor
        The point of each pair.
    width : int
        Numbers that the widest layer of the network holds for each pair, all batches together.

    Returns
    -------
    (..., Q, C) float tensor
        In float32 or wider; 0 for a query without pairs.
    """
    pairs_at_once = max(1, ELEMENTS.get(indices.device.type, ELEMENTS["cuda"]) // width)
    chunks = [*_chunks(row_splits.tolist(), pairs_at_once)]
    if len(chunks) <= 1:
        return sum_all_pairs(network, inputs, row_splits, indices)
    return _PairSum.apply(network, chunks, row_splits, indices, *_flattened(inputs))


def _chunks(splits: list[int], pairs_at_once: int) -> Iterator[Chunk]:
    """Cut the rows where the pairs, or the rows themselves, would be more than ``pairs_at_once``."""
    first = 0
    for row in range(1, len(splits)):
        full = splits[row] - splits[first] > pairs_at_once or row - first > pairs_at_once
        if full and row - 1 > first:
            yield Chunk(slice(first, row - 1), slice(splits[first], splits[row - 1]))
            first = row - 1
    if len(splits) - 1 > first:
        yield Chunk(slice(first, len(splits) - 1), slice(splits[first], splits[-1]))


def sum_all_pairs(network: Network, inputs: Inputs, row_splits: Tensor, indices: Tensor) -> Tensor:
    """The same with all pairs at once, for a network that is not to be called twice."""
    queries = queries_of(row_splits, len(indices))
    return _row_sums(network(_gathered(inputs, indices), queries), queries, len(row_splits) - 1)


def _row_sums(values: Tensor, queries: Tensor, rows: int) -> Tensor:
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    sums = values.new_zeros(*values.shape[:-2], rows, values.shape[-1])
    return sums.index_add(-2, queries, values)


def _gathered(inputs: Inputs, indices: Tensor) -> Inputs:
    of_points, features = (
        None if tensor is None else tensor.index_select(-2, indices)
        for tensor in (inputs.of_points, inputs.features)
    )
    return inputs._replace(of_points=of_points, features=features)


def _flattened(inputs: Inputs) -> tuple[Tensor | None, ...]:
    return (*inputs[:-1], *inputs.parameters)


def _unflattened(tensors: tuple[Tensor | None, ...]) -> Inputs:
    return Inputs(*tensors[:4], tuple(tensors[4:]))


class _PairSum(torch.autograd.Function):
    """The sums chunk by chunk, of which the backward computes each again."""

    @staticmethod
    def forward(ctx, network: Network, chunks: list[Chunk], row_splits: Tensor, indices: Tensor, *tensors):
        ctx.network, ctx.chunks, ctx.precision = network, chunks, _autocast_of(indices.device.type)
        ctx.save_for_backward(row_splits, indices, *tensors)
        parts = [
            _row_sums(network(some, queries), queries, chunk.rows.stop - chunk.rows.start)
            for chunk, some, queries in _by_chunk(chunks, row_splits, indices, _unflattened(tensors))
        ]
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx, grad: Tensor):
        row_splits, indices, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        with torch.autocast(indices.device.type, **ctx.precision):
            if torch.is_grad_enabled():  # create_graph
                gradients = _with_graph(ctx.network, row_splits, indices, tensors, wanted, grad)
            else:
                gradients = _accumulated(ctx, row_splits, indices, tensors, wanted, grad)
        return None, None, None, None, *gradients


def _autocast_of(device_type: str) -> dict:
    return {"enabled": torch.is_autocast_enabled(device_type), "dtype": torch.get_autocast_dtype(device_type)}


def _by_chunk(
    chunks: list[Chunk], row_splits: Tensor, indices: Tensor, inputs: Inputs
) -> Iterator[tuple[Chunk, Inputs, Tensor]]:
    """Each chunk with its inputs and the query of each pair, counted from the chunk's first."""
    for chunk in chunks:
        rows, pairs = chunk
        of_pairs = None if inputs.of_pairs is None else inputs.of_pairs[pairs]
        some = inputs._replace(of_queries=inputs.of_queries[rows], of_pairs=of_pairs)
        splits = row_splits[rows.start : rows.stop + 1] - pairs.start
        queries = queries_of(splits, pairs.stop - pairs.start)
        yield chunk, _gathered(some, indices[pairs]), queries


def _accumulated(
    ctx, row_splits: Tensor, indices: Tensor, tensors: list, wanted: tuple, grad: Tensor
) -> list:
    """The first derivative: each chunk again, its gradients added to those of the whole."""
    whole = [
        torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) if want else None
        for t, want in zip(tensors, wanted, strict=True)
    ]
    totals = _unflattened(tuple(whole))
    detached = _unflattened(tuple(None if t is None else t.detach() for t in tensors))
    for chunk, some, queries in _by_chunk(ctx.chunks, row_splits, indices, detached):
        leaves = [
            t.detach().requires_grad_(want) if t is not None else None
            for t, want in zip(_flattened(some), wanted, strict=True)
        ]
        with torch.enable_grad():
            values = ctx.network(_unflattened(tuple(leaves)), queries)
        upstream = grad[..., chunk.rows, :].index_select(-2, queries).to(values.dtype)
        asked = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
        found = iter(torch.autograd.grad(values, asked, upstream, materialize_grads=True))
        parts = _unflattened(tuple(next(found) if want else None for want in wanted))
        _add(totals, parts, chunk, indices[chunk.pairs])
    return [None if total is None else total.to(t.dtype) for total, t in zip(whole, tensors, strict=True)]


def _add(totals: Inputs, parts: Inputs, chunk: Chunk, indices: Tensor) -> None:
    for total, part, where in (
        (totals.of_queries, parts.of_queries, chunk.rows),
        (totals.of_pairs, parts.of_pairs, chunk.pairs),
    ):
        if total is not None:
            total[where] += part
    for total, part in ((totals.of_points, parts.of_points), (totals.features, parts.features)):
        if total is not None:
            total.index_add_(-2, indices, part.to(total.dtype))
    for total, part in zip(totals.parameters, parts.parameters, strict=True):
        if total is not None:
            total += part


def _with_graph(
    network: Network, row_splits: Tensor, indices: Tensor, tensors: list, wanted: tuple, grad: Tensor
) -> list:
    """The first derivative as a function that can be differentiated again: all pairs at once."""
    # Of aliases: a tensor here may depend on another one, and each is to get the direct gradient alone.
    aliases = [None if t is None else t.view_as(t) for t in tensors]
    sums = sum_all_pairs(network, _unflattened(tuple(aliases)), row_splits, indices)
    asked = [alias for alias, want in zip(aliases, wanted, strict=True) if want]
    found = iter(torch.autograd.grad(sums, asked, grad, create_graph=True, materialize_grads=True))
    return [next(found) if want else None for want in wanted]

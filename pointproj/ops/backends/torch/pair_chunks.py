"""Operators of a function of pairs, in chunks of neighbour lists, which the derivatives compute once more."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pointproj.ops.backends.torch.pair_lists import PairLists
from pointproj.ops.bridge.torch_op import signed, torch_op
from pointproj.ops.specification.gradients import first_gradients, second_gradients
from pointproj.ops.specification.records import OptionalTensors, Saved, Tensors


class PairFunction(NamedTuple):
    """A function of pairs, by what its tensors have a row for.

    ``values(inputs, exists)`` gets the rows of some pairs, (m, K, C) or (m, C), of queries also (m, 1, C),
    and what is the same for all pairs, by name; it returns a row for each pair, any where none exists.
    Tensors without elements stand for what is not given.
    """

    values: Callable[[dict[str, Any], Tensor], Tensor]
    references: Sequence[str]  # (N, C)
    queries: Sequence[str]  # (Q, C)
    pairs: Sequence[str]  # like the rows, or with an axis of channels
    shared: Sequence[str]
    options: dict[str, type]
    channels: Callable[[dict[str, Any]], int]  # of the values
    width: Callable[[dict[str, Any]], int]  # most numbers of a pair in one tensor
    dtype_like: str  # the tensor that has the dtype of sums
    reduced: bool  # whether the result is the sum over each query's pairs, or with ``largest`` the largest
    masks: bool = False  # whether values of pairs that do not exist are 0, but for queries without pairs

    @property
    def differentiable(self) -> tuple[str, ...]:
        return (*self.references, *self.queries, *self.pairs, *self.shared)

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of the operator: tensors, rows of the lists as :class:`PairLists` takes them, options."""
        lists = {"rows": Tensor, "row_splits": Tensor | None}
        return dict.fromkeys(self.differentiable, Tensor) | lists | self.options | {"largest": bool}

    def outputs(self, *args: Any) -> tuple:
        """The values, and for the largest the slot that has it."""
        inputs = dict(zip(self.parameters, args, strict=True))
        rows, splits = inputs["rows"], inputs["row_splits"]
        queries = rows.shape[0] if splits is None else splits.shape[0] - 1
        shape = *((queries,) if self.reduced else rows.shape), self.channels(inputs)
        return (shape, inputs[self.dtype_like].dtype), (shape if inputs["largest"] else (0,), torch.int32)

    def operator(self, name: str) -> Callable[..., tuple[Tensor, Tensor]]:
        """The torch operator, differentiable twice in all tensors but the lists."""
        return torch_op(
            name,
            signed(lambda *args: self.forward(*args), self.parameters, tuple[Tensor, Tensor]),
            self.outputs,
            differentiable=self.differentiable,
            backward=self.backward,
            second_backward=self.second_backward,
        )

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        inputs = dict(zip(self.parameters, args, strict=True))
        with _Call(self, inputs) as call:
            return call.forward(*self.outputs(*args)[0])

    def backward(self, grads: Tensors, needs: dict[str, bool], saved: Saved) -> OptionalTensors:
        with _Call(self, saved.inputs) as call:
            return call.backward(grads[0], needs, saved.outputs[1])

    def second_backward(self, directions: Tensors, grads: Tensors, saved: Saved) -> Tensors:
        with _Call(self, saved.inputs) as call:
            return call.second_backward(directions, grads[0], saved.outputs[1])


class _Call:
    """One call of an operator, in a context without autocast: its own dtypes decide."""

    def __init__(self, function: PairFunction, inputs: dict[str, Any]) -> None:
        self.function, self.inputs = function, inputs
        self.lists = PairLists(inputs["rows"], inputs["row_splits"], len(inputs[function.references[0]]))
        self.given = [name for name in function.differentiable if inputs[name].numel()]

    def __enter__(self) -> "_Call":
        self._context = torch.autocast(self.inputs["rows"].device.type, enabled=False)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def forward(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows, result = self.inputs["rows"], None
        if self.inputs["largest"]:
            return self.lists.largest(self._all_values, rows.new_zeros(shape, dtype=dtype))
        for at, values in self._all_values():
            result = self._put(at, result, self._masked(at, values))
        none = rows.new_empty(0, dtype=torch.int32)
        return (rows.new_zeros(shape, dtype=dtype) if result is None else self._with_pairs(result)), none

    def backward(self, grad: Tensor, needs: dict[str, bool], winners: Tensor) -> OptionalTensors:
        totals = self._totals([name for name in self.function.differentiable if needs[name]])
        wanted = [needs[name] for name in self.given]
        for at, given in self._chunks(self._prepared(self.inputs)):
            upstream = self._upstream(at, grad, winners)
            own = first_gradients(lambda *values, at=at: self._values(at, values), given, upstream, wanted)
            self._add(at, totals, own)
        names = self.function.differentiable
        return tuple(self._finished(name, totals[name]) if needs[name] else None for name in names)

    def second_backward(self, directions: Tensors, grad: Tensor, winners: Tensor) -> Tensors:
        names = self.function.differentiable
        totals, d_grad = self._totals(names), None
        along = self._chunks(self._prepared(dict(zip(names, directions, strict=True))))
        for (at, given), (_, by) in zip(self._chunks(self._prepared(self.inputs)), along, strict=True):
            upstream = self._upstream(at, grad, winners)
            of_grad, *own = second_gradients(
                lambda *values, at=at: self._values(at, values), given, upstream, by
            )
            d_grad = self._put(at, d_grad, self._masked(at, of_grad, winners))
            self._add(at, totals, own)
        d_grad = torch.zeros_like(grad) if d_grad is None else self._with_pairs(d_grad)
        return (d_grad, *(self._finished(name, totals[name]) for name in names))

    def _prepared(self, values: dict[str, Any]) -> dict[str, Tensor]:
        """Tensors like the inputs, with rows of zeros for what has no neighbour: it must not be NaN."""
        made = {name: values[name] for name in self.given}
        for name in self.given:
            if name in self.function.references:
                made[name] = self.lists.with_spare(values[name])
            elif name in self.function.queries:
                made[name] = torch.where(self.lists.has_pairs[:, None], values[name], 0.0)
        return made

    def _chunks(self, prepared: dict[str, Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        """Parts of the lists, and what their pairs take of each tensor."""
        for at in self.lists.chunks(self.function.width(self.inputs)):
            yield at, [self._taken(at, name, prepared[name]) for name in self.given]

    def _taken(self, at: slice, name: str, values: Tensor) -> Tensor:
        if name in self.function.references:
            return self.lists.of_references(at, values)
        if name in self.function.queries:
            return self.lists.of_queries(at, values)
        if name in self.function.pairs:
            values = values[at]
            return values if values.ndim > self.lists.rows.ndim else values[..., None]
        return values

    def _all_values(self) -> Iterator[tuple[slice, Tensor]]:
        for at, given in self._chunks(self._prepared(self.inputs)):
            yield at, self._values(at, given)

    def _values(self, at: slice, given: Sequence[Tensor]) -> Tensor:
        inputs = self.inputs | dict(zip(self.given, given, strict=True))
        return self.function.values(inputs, self.lists.exists[at])

    def _upstream(self, at: slice, grad: Tensor, winners: Tensor) -> Tensor:
        own = self.lists.of_queries(at, self._with_pairs(grad)) if self.function.reduced else grad[at]
        return self._masked(at, own.expand(*self.lists.rows[at].shape, -1), winners)

    def _with_pairs(self, values: Tensor) -> Tensor:
        """Values of queries, 0 for those without pairs if the function does not see to it."""
        return torch.where(self.lists.has_pairs[:, None], values, 0.0) if self.function.masks else values

    def _masked(self, at: slice, values: Tensor, winners: Tensor | None = None) -> Tensor:
        """Zeros in pairs that are none, or that are not the largest."""
        if self.inputs["largest"]:
            return torch.where(self.lists.is_chosen(at, winners), values, 0.0)
        return values if self.function.masks else self.lists.masked(at, values)

    def _put(self, at: slice, result: Tensor | None, values: Tensor) -> Tensor:
        if self.function.reduced:
            return self.lists.add_to_queries(at, result, values)
        if result is None:
            result = values.new_zeros(*self.lists.rows.shape, values.shape[-1])
        result[at] = values
        return result

    def _add(self, at: slice, totals: dict[str, Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Add what pairs of a chunk give to tensors like the inputs, those of references with spare rows."""
        for name, values in zip(self.given, gradients, strict=True):
            if values is None:
                continue
            if name in self.function.references:
                self.lists.add_to_references(at, totals[name], values)
            elif name in self.function.queries:
                totals[name] = self.lists.add_to_queries(at, totals[name], values)
            elif name in self.function.pairs:
                totals[name][at] = values.view(totals[name][at].shape)
            else:
                totals[name] = values if totals[name] is None else totals[name] + values

    def _totals(self, names: Sequence[str]) -> dict[str, Tensor | None]:
        """Zeros like the inputs of references, with spare rows, and of pairs, in the dtype of sums."""
        made = dict.fromkeys(names)
        for name in names:
            like = self.inputs[name]
            dtype = torch.promote_types(like.dtype, torch.float32)
            if name in self.given and name in self.function.references:
                made[name] = like.new_zeros(len(like) + self.lists.spare, like.shape[1], dtype=dtype)
            elif name in self.function.pairs:
                made[name] = torch.zeros(like.shape, dtype=dtype, device=like.device)
        return made

    def _finished(self, name: str, total: Tensor | None) -> Tensor:
        like = self.inputs[name]
        if total is None:
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        return total[: len(like)].to(like.dtype).contiguous()

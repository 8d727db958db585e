"""The records that operators work with, and functions of them as torch takes operators: field by field."""

import functools
import inspect
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.reference import Weighting

Tensors = tuple[Tensor, ...]
OptionalTensors = tuple[Tensor | None, ...]
Tables = tuple[Tensor, ...]  # of an index


class Saved(NamedTuple):
    """What a backward works with: the forward's inputs by name, and its outputs in order."""

    inputs: dict[str, Any]
    outputs: Tensors


class Summands(NamedTuple):
    """What an aggregation sums up; the features and sigma are in the dtype that sums run in."""

    features: Float[Tensor, "n c"]
    sigma: Float[Tensor, ""]
    weighting: Weighting


FIELDS: dict[type, dict[str, Any]] = {
    Clouds: {
        "query_points": Tensor,
        "query_offsets": Tensor | None,
        "reference_points": Tensor,
        "reference_offsets": Tensor | None,
        "clouds": int,
    },
    Weighting: Weighting.__annotations__,
}


def record_of(record: type, inputs: dict[str, Any]) -> Any:
    """A record of an operator's inputs, which hold its fields."""
    return record(*(inputs[name] for name in FIELDS[record]))


def fields_apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with the fields of arguments that are annotated as records of :data:`FIELDS` one by one."""
    signature, parameters = inspect.signature(function, eval_str=True), []
    for p in signature.parameters.values():
        fields = FIELDS.get(p.annotation, {p.name: p.annotation})
        parameters += [inspect.Parameter(name, p.kind, annotation=of) for name, of in fields.items()]
    positional = [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    records = [p.annotation if p.annotation in FIELDS else None for p in positional]

    @functools.wraps(function)
    def flat(*args: Any, **others: Any) -> Any:
        rest = iter(args)
        made = [next(rest) if r is None else r(*islice(rest, len(FIELDS[r]))) for r in records]
        return function(*made, **others)

    flat.__signature__ = signature.replace(parameters=parameters)
    return flat


def nearest_specs(*dtypes: torch.dtype | None) -> Callable[..., tuple]:
    """The outputs (Q, k) of an operator ``(query_points, ..., k)``; None is the dtype of the points."""

    def outputs(query_points: Tensor, *others: Any) -> tuple:
        shape = query_points.shape[0], others[-1]
        return tuple((shape, dtype or query_points.dtype) for dtype in dtypes)

    return outputs

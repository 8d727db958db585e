"""Functions of records as torch takes operators: with the records' fields as arguments of their own."""

import functools
import inspect
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from pointproj.ops.clouds import Clouds
from pointproj.ops.reference import Weighting

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

"""One value of the schema: its default, what it means and what it may be, written in one place."""

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import OmegaConf, ValidationError

BOUNDS = {  # in words, and what a value has to be in relation to each
    "least": ("of at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("of at most", operator.le),
    "below": ("below", operator.lt),
}
LEAST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of float32, at full precision


def value(
    default: Any,
    meaning: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a field of a config section.

    ``default`` is ``MISSING`` where a choice must be made. ``meaning`` is for the reference of all values
    (``docs/config_reference.py``). ``choices`` are what a word may be; empty if it is not one of few. The
    bounds ``least`` and ``most`` may be reached, ``above`` and ``below`` not.
    """
    bounds = {"least": least, "most": most, "above": above, "below": below}
    return dataclasses.field(default=default, metadata={"meaning": meaning, "choices": choices, **bounds})


def value_problems(section: Any, prefix: str) -> Iterator[str]:
    """Yield what is wrong with single values of a section and of the sections in it.

    ``prefix`` stands before each key: ``"data."``, or nothing for the whole config.
    """
    for entry in dataclasses.fields(section):
        key, given = prefix + entry.name, getattr(section, entry.name)
        if dataclasses.is_dataclass(given):
            yield from value_problems(given, f"{key}.")
        for place, part in enumerate(given if isinstance(given, list) else []):
            if dataclasses.is_dataclass(part):
                yield from value_problems(part, f"{key}[{place}].")
        if given is not None and (expected := _expected(given, entry)):
            yield f"{key}={given}: expected {expected}"


def type_problem(config: Any, key: str, given: Any) -> str | None:
    """Say what was expected in place of a value of the wrong type; None if its type is right.

    ``key`` is a value or section of the schema ``config``, and ``given`` what Hydra parsed.
    """
    try:
        OmegaConf.update(OmegaConf.structured(config), key, given)
    except ValidationError:
        *sections, name = key.split(".")
        for section in sections:
            config = getattr(config, section)
        return type_words(type(config).__dataclass_fields__[name])
    return None


def type_words(entry: dataclasses.Field, thousands: str = ",") -> str:
    """What a value may be, in words; ``thousands`` are separated by a comma or nothing."""
    kinds = typing.get_args(entry.type) if isinstance(entry.type, types.UnionType) else (entry.type,)
    kind, allowed = kinds[0], entry.metadata
    null = ", or null" if type(None) in kinds else ""
    if allowed.get("choices"):
        return f"one of {', '.join(allowed['choices'])}{null}"
    if dataclasses.is_dataclass(kind):
        return f"values of the section: {entry.name}.{dataclasses.fields(kind)[0].name}=... and so on"
    if typing.get_origin(kind) in (list, tuple):
        part = typing.get_args(kind)[0]
        if dataclasses.is_dataclass(part):
            names = ", ".join(part_entry.name for part_entry in dataclasses.fields(part))
            return f"a list of {{{names}}}{null}"
        return f"a list of {'words' if part is str else 'numbers'}{null}"
    limits = [(words, allowed.get(name)) for name, (words, _) in BOUNDS.items()]
    bounds = [f"{words} {limit:{thousands}}" for words, limit in limits if limit is not None]
    named = {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a word")
    return " ".join([named, " and ".join(bounds)]).strip() + null


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean ...?"`` for the candidates that look like ``word``, else nothing."""
    close = difflib.get_close_matches(word, dict.fromkeys(candidates), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _expected(given: Any, entry: dataclasses.Field) -> str | None:
    """Say what was expected in place of a value, or None if it is fine."""
    allowed, expected = entry.metadata, type_words(entry, thousands="")
    if choices := allowed.get("choices"):
        return None if given in choices else expected + nearest(given, choices)
    if not isinstance(given, int | float) or isinstance(given, bool):
        return None
    if isinstance(given, float) and not math.isfinite(given):
        return f"{expected}, and finite"
    if isinstance(given, float) and given != 0 and not LEAST_FLOAT <= abs(given) <= LARGEST_FLOAT:
        return f"0 or a number of size {LEAST_FLOAT:.2g} to {LARGEST_FLOAT:.2g}, as float32 holds it"
    bounds = [(name, allowed[name]) for name in BOUNDS if allowed.get(name) is not None]
    return None if all(BOUNDS[name][1](given, bound) for name, bound in bounds) else expected

"""The declaration of one value of the schema: default, meaning and allowed values in one place."""

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf import OmegaConf, ValidationError

BOUNDS = {  # words for each bound, and the comparison of a value with it
    "least": ("of at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("of at most", operator.le),
    "below": ("below", operator.lt),
}
SWITCHES = bool, bool | None
LARGEST_WHOLE = 2**63 - 1  # of 64 bits, in which checkpoints, seeds and counts are stored
LEAST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of float32, for normal numbers


def value(
    default: Any,
    meaning: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    words: tuple[str, ...] = (),
) -> Any:
    """Declare a field of a config section.

    ``default`` is ``MISSING`` if the user must choose. ``meaning`` is shown in the reference of all values
    (``docs/config_reference.py``). ``choices`` lists the allowed words; it is empty if any word is allowed.
    ``least`` and ``most`` are allowed values themselves, ``above`` and ``below`` are not. ``words`` are
    allowed instead of a number.
    """
    bounds = {"least": least, "most": most, "above": above, "below": below}
    return dataclasses.field(
        default=default, metadata={"meaning": meaning, "choices": choices, "words": words, **bounds}
    )


def value_problems(section: Any, prefix: str) -> Iterator[str]:
    """Yield the problems of single values of a section and of the sections in it.

    ``prefix`` is written before each key: ``"data."``, or an empty string for the whole config.
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
    """Return words for the expected type of a value; None if the type of ``given`` is right.

    ``key`` names a value or section of the schema ``config``, and ``given`` is the value that Hydra parsed.
    """
    *sections, name = key.split(".")
    section = config
    for each in sections:
        section = getattr(section, each)
    entry = type(section).__dataclass_fields__[name]
    if entry.type in SWITCHES and isinstance(given, int | float) and given not in (0, 1):
        return type_words(entry)  # OmegaConf takes every number but 0 for true
    try:
        OmegaConf.update(OmegaConf.structured(config), key, given)
    except ValidationError:
        return type_words(entry)
    return None


def type_words(entry: dataclasses.Field, thousands: str = ",") -> str:
    """Return words for the allowed values; ``thousands`` is the separator, a comma or an empty string."""
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
    words = "".join(f", or {word}" for word in allowed.get("words", ()))
    return " ".join([named, " and ".join(bounds)]).strip() + words + null


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean ...?"`` with the candidates similar to ``word``, else an empty string."""
    close = difflib.get_close_matches(word, dict.fromkeys(candidates), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _expected(given: Any, entry: dataclasses.Field) -> str | None:
    """Return words for the expected value, or None if the value is allowed."""
    allowed, expected = entry.metadata, type_words(entry, thousands="")
    if choices := allowed.get("choices"):
        return None if given in choices else expected + nearest(given, choices)
    if isinstance(given, str) and (words := allowed.get("words")):
        return None if given in words else expected
    if not isinstance(given, int | float) or isinstance(given, bool):
        return None
    if isinstance(given, float) and not math.isfinite(given):
        return f"{expected}, and finite"
    if isinstance(given, float) and given != 0 and not LEAST_FLOAT <= abs(given) <= LARGEST_FLOAT:
        return f"0 or a number of size {LEAST_FLOAT:.2g} to {LARGEST_FLOAT:.2g}, as float32 holds it"
    if isinstance(given, int) and abs(given) > LARGEST_WHOLE:
        return f"{expected}, and of at most {LARGEST_WHOLE}"
    bounds = [(name, allowed[name]) for name in BOUNDS if allowed.get(name) is not None]
    return None if all(BOUNDS[name][1](given, bound) for name, bound in bounds) else expected

"""One command line: every program takes ``KEY=VALUE`` and ``--KEY VALUE`` for the same thing."""

import argparse
from collections.abc import Container, Sequence


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments; each option may be written ``KEY=VALUE`` too, several values with commas."""
    actions = {name[2:]: action for name, action in parser._option_string_actions.items() if name[:2] == "--"}
    options, others = [], []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        action = actions.get(key) if equals else None
        if action is None:
            others.append(argument)
        elif action.nargs == 0:
            if value not in ("true", "false"):
                parser.error(f"{argument}: expected true or false")
            options += [f"--{key}"] * (value == "true")
        elif action.nargs in ("+", "*"):
            options += [f"--{key}", *filter(None, value.split(","))]
        else:
            options.append(f"--{key}={value}")
    return parser.parse_args([*others, *options])


def overrides(arguments: Sequence[str], keys: Container[str]) -> list[str]:
    """Return arguments with ``--KEY VALUE`` and ``--KEY=VALUE`` of these keys as ``KEY=VALUE``."""
    left, made = list(arguments), []
    while left:
        word = left.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or key not in keys:
            made.append(word)
        elif equals:
            made.append(f"{key}={value}")
        else:
            made.append(f"{key}={left.pop(0) if left else ''}")
    return made

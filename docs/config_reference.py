"""The whole schema as a page of Markdown, so that defaults and meanings are written once."""

import html
import typing
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from pointproj.config.networks import NETWORKS
from pointproj.config.schema import Config
from pointproj.config.values import type_words


def reference(conf: Path) -> str:
    """Render every value of the schema, and every choice of every group, as Markdown.

    That is a heading and a table for each section, for ``projector`` one for each network. ``conf`` is the
    folder with the groups; the first comment of a file says what its choice is.
    """
    config = Config()
    plain = [entry for entry in fields(config) if not is_dataclass(getattr(config, entry.name))]
    parts = [_table(plain, "", config)]
    for entry in fields(config):
        section = getattr(config, entry.name)
        if entry.name == "projector":
            parts += [_network(name, conf) for name in NETWORKS]
        elif is_dataclass(section):
            about = type(section).__doc__.partition("\n")[0].replace("``", "`")
            parts += [f"## `{entry.name}`\n\n{about}", *_choices(conf / entry.name)]
            parts.append(_table(fields(section), f"{entry.name}.", section))
    return "\n\n".join(parts) + "\n"


def _network(name: str, conf: Path) -> str:
    network = NETWORKS[name]()
    about = _about(conf / "projector" / f"{name}.yaml")
    shown = [entry for entry in fields(network) if entry.name != "name"]
    return f"## `projector={name}`\n\n{about}\n\n{_table(shown, 'projector.', network)}"


def _choices(folder: Path) -> Iterator[str]:
    """Yield the list of a group's choices, each with the values that it sets."""
    if folder.is_dir():
        lines = []
        for file in sorted(folder.glob("*.yaml")):
            values = OmegaConf.to_container(OmegaConf.load(file))
            sets = ", ".join(f"`{key}={_written(value)}`" for key, value in values.items() if key != "name")
            lines.append(f"- `{folder.name}={file.stem}`: {_about(file)}{sets and f' Sets {sets}.'}")
        yield "\n".join(lines)


def _about(file: Path) -> str:
    """Return the comment that a file begins with, as one line of Markdown."""
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    return html.escape(" ".join(line.removeprefix("#").strip() for line in comment), quote=False)


def _table(entries: typing.Iterable[Field], prefix: str, section: Any) -> str:
    rows = ["| value | type | default | meaning |", "|---|---|---|---|"]
    for entry in entries:
        default = getattr(section, entry.name)
        written = "chosen by group" if default == MISSING else f"`{_written(default)}`"
        cells = [f"`{prefix}{entry.name}`", type_words(entry), written, entry.metadata["meaning"]]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _written(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(_written(each) for each in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(each)}" for key, each in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)

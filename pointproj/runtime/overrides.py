"""Hydra overrides of the command line, checked against the schema before Hydra composes a config.

For an unknown key, Hydra proposes to add it. The check proposes the most similar known key instead.
"""

import functools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString, Sweep
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from pointproj.config import NETWORKS, Config, ConfigError, MixtureConfig, flat, nearest, type_problem
from pointproj.config.values import SWITCHES
from pointproj.runtime.run_folder import require_writable

MULTIRUN = {"-m", "--multirun"}


def check_arguments(
    arguments: list[str], conf: Path | None, schema: Any = None, program: str = "train.py"
) -> None:
    """Raise ConfigError for overrides that name a key, a group or a choice that does not exist.

    ``conf`` is the folder with the groups; None if the program has none. ``schema`` is an instance of the
    program's config, by default :class:`~pointproj.config.Config`. ``program`` is its name in messages.
    """
    overrides = _overrides(arguments)
    folders = {} if conf is None else {each.name: each for each in sorted(conf.iterdir()) if each.is_dir()}
    folders.pop("hydra", None)
    groups = {name: sorted(file.stem for file in each.glob("*.yaml")) for name, each in folders.items()}
    schemas = [Config(projector=network()) for network in NETWORKS.values()] if schema is None else [schema]
    keys = {key: each for each in schemas for key in (*vars(each), *flat(asdict(each)))}
    problems = [problem for override in overrides for problem in _problems(override, groups, keys, program)]
    if schema is None:
        networks = _networks(overrides, conf)
        problems += [problem for override in overrides for problem in _not_read(override, networks)]
    if problems:
        raise ConfigError("\n".join(problems))


def check_files(runtime: Any) -> None:
    """Raise ConfigError for numbers in Hydra's config files where true or false is expected.

    OmegaConf composes every number but 0 to true. ``runtime`` is ``hydra.runtime``: folders and choices.
    """
    folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
    chosen = [(f"{group}/{name}.yaml", f"{group}.") for group, name in runtime.choices.items()]
    problems = []
    for file, prefix in [("train.yaml", ""), *chosen]:
        for path in [folder / file for folder in folders if (folder / file).is_file()]:
            values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
            prefix = "" if "@package _global_" in path.read_text(encoding="utf-8") else prefix
            for key, value in flat(values if isinstance(values, dict) else {}, prefix).items():
                if key in _switches() and isinstance(value, int | float) and value not in (0, 1):
                    problems.append(f"{path}: {key}={value}: expected true or false")
    if problems:
        raise ConfigError("\n".join(problems))


@functools.cache
def _switches() -> frozenset[str]:
    """The keys of all values that are true or false."""
    configs = [Config(projector=network()) for network in NETWORKS.values()]
    sections = [("", config) for config in configs]
    sections += [(f"{name}.", part) for c in configs for name, part in vars(c).items() if is_dataclass(part)]
    found = [(prefix, entry) for prefix, section in sections for entry in fields(section)]
    return frozenset(prefix + entry.name for prefix, entry in found if entry.type in SWITCHES)


def check_output(arguments: list[str]) -> None:
    """Raise :class:`RunError` if the folder for runs or sweeps cannot be written to."""
    if not _runs(arguments):
        return
    kind = "hydra.run.dir" if MULTIRUN.isdisjoint(arguments) else "hydra.sweep.dir"
    folders = ["outputs", *(each.value() for each in _overrides(arguments) if each.key_or_group == kind)]
    require_writable(Path(str(folders[-1]).partition("${")[0]))  # Hydra fills in the rest when the run begins


def _runs(arguments: list[str]) -> bool:
    """Return whether the command runs jobs: no option of Hydra prints something or reads another config."""
    return all(word in MULTIRUN or not word.startswith("-") for word in arguments)


def _overrides(arguments: list[str]) -> list[Override]:
    """Parse overrides; return none if there are options of Hydra, whose values may look like overrides."""
    words = [word for word in arguments if word not in MULTIRUN] if _runs(arguments) else []
    try:
        return OverridesParser.create().parse_overrides(words)
    except OverrideParseException as error:
        key, equals, value = error.override.partition("=")
        expected = f"expected KEY=VALUE or GROUP=CHOICE ({error.message})"
        if equals:
            quoted = shlex.quote(f"{key}={json.dumps(value, ensure_ascii=False)}")
            expected = f"the value cannot be read. If it is a path or a text, quote it: {quoted}"
        raise ConfigError(f"{error.override}: {expected}") from None


def _networks(overrides: list[Override], conf: Path) -> list[Any]:
    """Return the networks of the jobs that the overrides describe."""
    chosen = {override.key_or_group: _values(override) for override in overrides}
    if "projector" in chosen:
        return chosen["projector"]
    files = [conf / "experiment" / f"{name}.yaml" for name in chosen.get("experiment", [])]
    texts = [file.read_text(encoding="utf-8") for file in files if file.exists()] or [""]
    default = (conf / "train.yaml").read_text(encoding="utf-8")
    return [re.search(r"\bprojector: (\w+)", text + default)[1] for text in texts]


def _not_read(override: Override, networks: list[Any]) -> Iterator[str]:
    """Yield a problem for each chosen network that does not read this value of another network."""
    section, _, key = override.key_or_group.partition(".")
    readers = [name for name, network in NETWORKS.items() if key in vars(network())]
    for name in networks if section == "projector" and readers else []:
        if name in NETWORKS and name not in readers:
            values = ", ".join(entry for entry in vars(NETWORKS[name]()) if entry != "name")
            yield (
                f"{override.input_line} has no meaning for projector={name}, which reads {values}: write "
                f"projector={readers[0]} {override.input_line}, or leave it out"
            )


def _problems(
    override: Override, groups: dict[str, list[str]], keys: dict[str, Any], program: str
) -> Iterator[str]:
    key, line, values = override.key_or_group, override.input_line, _values(override)
    if key == "hydra" or override.is_hydra_override():
        return
    if key in groups:
        for choice in values:
            if (
                isinstance(choice, list) and key != "experiment"
            ):  # Hydra merges them, so that the last one counts
                both = "; write profiler=torch profiler.lines=true" if "line_profile" in choice else ""
                yield f"{line}: expected one of {', '.join(groups[key])}, got {len(choice)} at once{both}"
            if isinstance(choice, str) and choice not in groups[key]:
                options = ", ".join(groups[key])
                yield f"{key}={choice}: expected one of {options}{nearest(choice, groups[key])}"
        return
    if key not in keys:
        known = [*groups, *keys]
        hint = nearest(key, known) or _same_ending(key, known)
        yield f"{line}: there is no {key}{hint} ('python {program} --help' lists all)"
        return
    parts = values[0] if key == "data.mixture" and values and isinstance(values[0], list) else []
    known = vars(MixtureConfig())
    misspelt = [name for part in parts if isinstance(part, dict) for name in part if name not in known]
    for name in misspelt:
        yield f"{line}: there is no {name}, only {', '.join(known)}{nearest(name, known)}"
    for value in [] if misspelt or override.is_delete() else values:
        if expected := type_problem(keys[key], key, value):
            yield f"{line}: expected {expected}"
            return


def _values(override: Override) -> list[Any]:
    """Return the value of an override, or the plain values of a list of choices; none for other sweeps."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        items = (item.text if isinstance(item, QuotedString) else item for item in value.list)
        return [item for item in items if isinstance(item, int | float | str | list)]
    return [] if isinstance(value, Sweep) else [value]


def _same_ending(key: str, known: list[str]) -> str:
    """Propose keys whose last word is like the given key, for example optimizer.lr for lr."""
    match = nearest(key.rpartition(".")[2], (name.rpartition(".")[2] for name in known))
    found = [name for name in known if match and name.rpartition(".")[2] in match]
    return f"; did you mean {' or '.join(found)}?" if found else ""

"""Hydra overrides of the command line, checked against the schema before anything is composed.

Hydra says that a key is unknown and proposes to add it; here the nearest known one is proposed instead.
"""

from collections import ChainMap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString, Sweep
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from pointproj.config import NETWORKS, Config, ConfigError, MixtureConfig, nearest, type_problem
from pointproj.runtime.run_folder import require_writable

MULTIRUN = {"-m", "--multirun"}


def check_arguments(
    arguments: list[str], conf: Path | None, schema: Any = None, program: str = "train.py"
) -> None:
    """Refuse overrides that name a key, a group or a choice that does not exist.

    ``conf`` is the folder with the groups; None if the program has none. ``schema`` is what the program's
    config may hold, :class:`~pointproj.config.Config` by default; messages name the ``program``.

    Raises
    ------
    ConfigError
        With what was given, what exists and what is nearest.
    """
    overrides = _overrides(arguments)
    groups = {} if conf is None else _groups(conf)
    schemas = [Config(projector=network()) for network in NETWORKS.values()] if schema is None else [schema]
    keys = {key: each for each in schemas for key in _keys(each)}
    problems = [problem for override in overrides for problem in _problems(override, groups, keys, program)]
    if schema is None:
        networks = _networks(overrides, conf)
        problems += [problem for override in overrides for problem in _not_read(override, networks)]
    if problems:
        raise ConfigError("\n".join(problems))


def check_output(arguments: list[str]) -> None:
    """Refuse a folder for runs or sweeps that cannot be written to, with :class:`RunError`."""
    if not _runs(arguments):
        return
    kind = "hydra.run.dir" if MULTIRUN.isdisjoint(arguments) else "hydra.sweep.dir"
    named = [override.value() for override in _overrides(arguments) if override.key_or_group == kind]
    folder = str(named[-1]) if named else "outputs"
    require_writable(Path(folder.partition("${")[0]))  # what comes after is made up when the run begins


def _runs(arguments: list[str]) -> bool:
    """Whether there is no option of Hydra's that prints something instead, or reads another config."""
    return all(word in MULTIRUN or not word.startswith("-") for word in arguments)


def _overrides(arguments: list[str]) -> list[Override]:
    """Parse overrides; none beside options of Hydra's, whose words may look like overrides."""
    words = [word for word in arguments if word not in MULTIRUN] if _runs(arguments) else []
    try:
        return OverridesParser.create().parse_overrides(words)
    except OverrideParseException as error:
        raise ConfigError(f"{error.override}: expected KEY=VALUE or GROUP=CHOICE ({error.message})") from None


def _groups(conf: Path) -> dict[str, list[str]]:
    """Return the choices of each group, from the files that are there."""
    folders = (folder for folder in conf.iterdir() if folder.is_dir() and folder.name != "hydra")
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in sorted(folders)}


def _keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every value and section of a dataclass."""
    for entry in fields(section):
        key = prefix + entry.name
        yield key
        value = getattr(section, entry.name)
        if is_dataclass(value):
            yield from _keys(value, f"{key}.")


def _networks(overrides: list[Override], conf: Path) -> list[str]:
    """Return the networks of the jobs that the overrides describe."""
    chosen = {override.key_or_group: _choices(override) for override in overrides}
    if "projector" in chosen:
        return chosen["projector"]
    files = [conf / "experiment" / f"{name}.yaml" for name in chosen.get("experiment", [])]
    files = [file for file in files if file.exists()] or [conf / "train.yaml"]
    return [_network_of(file) or _network_of(conf / "train.yaml") for file in files]


def _network_of(file: Path) -> str | None:
    """Return the network that a file's defaults name, if they name one."""
    entries = OmegaConf.to_container(OmegaConf.load(file)).get("defaults", [])
    chosen = ChainMap(*(entry for entry in entries if isinstance(entry, dict)))
    return chosen.get("projector", chosen.get("override /projector"))


def _not_read(override: Override, networks: list[str]) -> Iterator[str]:
    """Yield the networks that do not read a value of another network."""
    section, _, key = override.key_or_group.partition(".")
    readers = [name for name, network in NETWORKS.items() if key in _keys(network())]
    if section != "projector" or not readers:
        return
    for name in networks:
        if name in NETWORKS and name not in readers:
            values = ", ".join(entry for entry in _keys(NETWORKS[name]()) if entry != "name")
            yield (
                f"{override.input_line} has no meaning for projector={name}, which reads {values}: write "
                f"projector={readers[0]} {override.input_line}, or leave it out"
            )


def _problems(
    override: Override, groups: dict[str, list[str]], keys: dict[str, Any], program: str
) -> Iterator[str]:
    key = override.key_or_group
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return
    if key in groups:
        for choice in _choices(override):
            if choice not in groups[key]:
                options = ", ".join(groups[key])
                yield f"{key}={choice}: expected one of {options}{nearest(choice, groups[key])}"
    elif key not in keys:
        known = [*groups, *keys]
        hint = nearest(key, known) or _same_ending(key, known)
        yield f"{override.input_line}: there is no {key}{hint} ('python {program} --help' lists all)"
    elif key == "data.mixture" and (misspelt := [*_mixture_problems(override)]):
        yield from misspelt
    elif not override.is_delete():
        expected = next(
            filter(None, (type_problem(keys[key], key, value) for value in _values(override))), None
        )
        if expected:
            yield f"{override.input_line}: expected {expected}"


def _mixture_problems(override: Override) -> Iterator[str]:
    """Yield keys that no kind of clouds has."""
    known = [*_keys(MixtureConfig())]
    listed = override.value()
    for kind in listed if isinstance(listed, list) else []:
        for key in kind if isinstance(kind, dict) else []:
            if key not in known:
                options = ", ".join(known)
                yield f"{override.input_line}: there is no {key}, only {options}{nearest(key, known)}"


def _values(override: Override) -> Iterator[Any]:
    """Yield the value of an override, or the plain ones of a list of choices; nothing of other sweeps."""
    value = override.value()
    if isinstance(value, ChoiceSweep):
        items = (item.text if isinstance(item, QuotedString) else item for item in value.list)
        yield from (item for item in items if isinstance(item, int | float | str))
    elif not isinstance(value, Sweep):
        yield value


def _choices(override: Override) -> list[str]:
    """Return the words that an override names."""
    return [value for value in _values(override) if isinstance(value, str)]


def _same_ending(key: str, known: list[str]) -> str:
    """Propose the keys whose last word is the one asked for, as optimizer.lr for lr."""
    last = key.rpartition(".")[2]
    endings = {name.rpartition(".")[2] for name in known}
    match = nearest(last, endings)
    found = [name for name in known if match and name.rpartition(".")[2] in match]
    return f"; did you mean {' or '.join(found)}?" if found else ""

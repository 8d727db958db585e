"""The typed schema of the whole configuration, and the checks that need no data.

Hydra composes ``conf/``; :func:`to_config` turns the result into the dataclasses of
:mod:`pointproj.config.schema` once, at the door. Everything after that is plain Python. No torch here:
``--help`` and ``--cfg job`` answer at once.
"""

from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from pointproj.config.checks import CHOICES, nearest, problems_of
from pointproj.config.schema import (
    AllocatorConfig,
    AugmentationConfig,
    BackendConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ProfilerConfig,
    TargetConfig,
)
from pointproj.config.targets import TARGETS, Target

__all__ = [
    "CHOICES",
    "TARGETS",
    "AllocatorConfig",
    "AugmentationConfig",
    "BackendConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProfilerConfig",
    "Target",
    "TargetConfig",
    "flat",
    "nearest",
    "register_schema",
    "to_config",
]


class ConfigError(ValueError):
    """A config that cannot run; the message holds every problem with what to write instead."""


def register_schema() -> None:
    """Make :class:`Config` known to Hydra as ``schema``, the first of the defaults in ``conf/train.yaml``."""
    ConfigStore.instance().store(name="schema", node=Config)


def to_config(composed: Any) -> Config:
    """Turn what Hydra composed into a checked :class:`Config`.

    Parameters
    ----------
    composed : DictConfig
        A config whose schema is :class:`Config`, without Hydra's own node.

    Returns
    -------
    Config
        Plain dataclasses; ``projector.context``, ``data.queries`` and ``model.normals`` are settled (never
        null).

    Raises
    ------
    ConfigError
        If a group has no choice, or values are out of range or do not go together. All problems at once.
    """
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        choices = ", ".join(f"{key.removesuffix('.name').removesuffix('.kind')}=..." for key in missing)
        raise ConfigError(f"no choice was made for {', '.join(missing)}: write {choices}")
    config = OmegaConf.to_object(composed)
    problems = [*problems_of(config)]
    if problems:
        lines = problems if len(problems) == 1 else ["", *(f"  - {problem}" for problem in problems)]
        raise ConfigError("this config cannot run: " + "\n".join(lines))
    if config.projector.context is None:
        config.projector.context = TARGETS[config.target.name].of_mesh
    if config.data.queries is None:
        config.data.queries = _default_queries(config)
    if config.model.normals is None:  # real meshes have faces of either orientation; multiscale needs none
        tells_inside = TARGETS[config.target.name].inside_sign is not None
        oriented = config.data.name == "furniture"
        config.model.normals = tells_inside and oriented and config.model.name == "projector"
    return config


def _default_queries(config: Config) -> int:
    """Random queries for multiscale, whose grid is not that of the queries; the projector has the grid."""
    return 1024 if config.model.name == "multiscale" and TARGETS[config.target.name].of_mesh else 0


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, keyed as on the command line: ``{"optimizer.lr": 0.001, ...}``."""
    values = {}
    for name, value in tree.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return values

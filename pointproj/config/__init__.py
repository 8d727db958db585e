"""The typed schema of the whole configuration, and the checks that need no data.

Hydra composes ``conf/``. At the start, :func:`to_config` converts the result once into the dataclasses of
:mod:`pointproj.config.schema`; all other code uses these. torch is not imported here, so that ``--help`` and
``--cfg job`` answer at once.
"""

from collections.abc import Mapping
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

# ruff: noqa: F401 - other modules import the schema's names from here
from pointproj.config.checks import problems_of
from pointproj.config.networks import NETWORKS, KnnConfig, VisibilityConfig
from pointproj.config.schema import (
    AllocatorConfig,
    AugmentationConfig,
    Config,
    DataConfig,
    MixtureConfig,
    OptimizerConfig,
    ProfilerConfig,
    ProjectorConfig,
    TargetConfig,
)
from pointproj.config.targets import TARGETS
from pointproj.config.values import nearest, type_problem

_IS_1_3 = hydra.__version__.startswith("1.3.")
HYDRA_BASE = {"version_base": "1.3"} if _IS_1_3 else {}
"""Arguments of ``initialize_config_dir``: Hydra 1.3 warns without them, 1.4 with them."""
HYDRA_MAIN = HYDRA_BASE if _IS_1_3 else {"execution_whitelist": ["pointproj.runtime.sweep.SweepFolder"]}
"""Arguments of ``hydra.main``: Hydra 1.4 warns unless it is told which classes a config may name."""


class ConfigError(ValueError):
    """A config that cannot run; the message lists every problem, with what to write instead."""


def register(schemas: Mapping[str, type]) -> None:
    """Register dataclasses with Hydra under these names; a name may be registered again."""
    replace = {} if _IS_1_3 else {"replace": True}  # Hydra 1.3 replaces without the argument
    for name, schema in schemas.items():
        ConfigStore.instance().store(name=name, node=schema, **replace)


def register_schema() -> None:
    """Register the dataclasses with Hydra.

    :class:`Config` is registered as ``schema``, which is the first of the defaults in ``conf/train.yaml``.
    Each network is registered as ``NAME_schema``, the first of the defaults in ``conf/projector/NAME.yaml``.
    """
    register({"schema": Config} | {f"{name}_schema": network for name, network in NETWORKS.items()})


def to_config(composed: Any) -> Config:
    """Convert Hydra's composed DictConfig into a checked :class:`Config`.

    In the result, ``data.queries`` and the values of ``projector`` are not null. Raises ConfigError, which
    lists all values that are missing, out of range, or in conflict with others.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            choices = ", ".join(f"{key.removesuffix('.name')}=..." for key in missing)
            raise ConfigError(f"no choice was made for {', '.join(missing)}: write {choices}")
        config = OmegaConf.to_object(composed)
    except InterpolationResolutionError as error:
        reason = str(error.msg or error).strip().splitlines()[0]
        raise ConfigError(
            f"{error.full_key} has no value, as ${{...}} in it cannot be filled in: {reason}"
        ) from error
    if config.data.queries is None:  # random points, unless target or neighbours need the grid
        target = TARGETS.get(config.target.name)
        of_mesh = target is not None and (target.of_mesh or target.is_measured)
        config.data.queries = 1024 if of_mesh and config.projector.kept_neighbors is None else 0
    problems = [*problems_of(config)]
    if problems:
        lines = problems if len(problems) == 1 else ["", *(f"  - {problem}" for problem in problems)]
        raise ConfigError("this config cannot run: " + "\n".join(lines))
    config.projector.fill_in(config)
    return config


def from_saved(values: Mapping[str, Any]) -> Config:
    """Make a checked :class:`Config` from nested mappings, as ``dataclasses.asdict`` returns them.

    If they are not from a config of this version, raises ConfigError, omegaconf's OmegaConfBaseException,
    AttributeError, KeyError, TypeError or ValueError.
    """
    schema = OmegaConf.structured(Config(projector=NETWORKS[values["projector"]["name"]]()))
    return to_config(OmegaConf.merge(schema, values))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, keyed as on the command line: ``{"optimizer.lr": 0.001, ...}``."""
    values = {}
    for name, value in tree.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return values

"""Configs as the command line composes them."""

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from pointproj.config import Config, register_schema, to_config
from tests.processes import PROJECT

CONF = PROJECT / "conf"


def composed(*overrides: str) -> DictConfig:
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", list(overrides))


def config_of(*overrides: str) -> Config:
    return to_config(composed(*overrides))

"""Configs as the command line composes them."""

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from pointproj.benchmark import config as benchmark
from pointproj.config import HYDRA_BASE, Config, register_schema, to_config
from tests.processes import PROJECT

CONF = PROJECT / "conf"


def composed(*overrides: str, program: str = "train") -> DictConfig:
    register_schema()
    benchmark.register_schema()
    with initialize_config_dir(str(CONF), **HYDRA_BASE):
        return compose(program, list(overrides))


def config_of(*overrides: str) -> Config:
    return to_config(composed(*overrides))


def bench_config_of(*overrides: str) -> benchmark.BenchConfig:
    return benchmark.to_bench_config(composed(*overrides, program="bench"))

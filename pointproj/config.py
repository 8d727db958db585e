"""The typed schema of the whole configuration, and the checks that need no data.

Hydra composes ``conf/``; :func:`to_config` turns the result into these dataclasses once, at the door.
Everything after that is plain Python. No torch here: ``--help`` and ``--cfg job`` answer at once.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class BackendConfig:
    """Which implementation of the operators runs (``conf/backend/``)."""

    name: str = MISSING  # a module of pointproj.backends, or auto


@dataclass
class ProjectorConfig:
    """How features travel from reference points to query points (``conf/projector/``)."""

    kind: str = MISSING  # knn | radius
    k: int | None = None  # neighbours, for kind=knn
    radius: float | None = None  # cut-off in units of the query cube, for kind=radius
    sigma: float = 0.1  # softmax temperature, in units of the query cube
    context: bool | None = None  # give the second MLP displacement and soft distance; null: unless target=random


@dataclass
class ModelConfig:
    """Size of the network (``conf/model/``)."""

    name: str = MISSING
    hidden_channels: int = 25


@dataclass
class DataConfig:
    """Where shapes come from and how they are sampled (``conf/data/``)."""

    name: str = MISSING  # furniture | modelnet10 | gaussian
    root: str | None = None  # folder with <class>/{train,test}/*.off; null: data/<name>
    download: bool = False  # modelnet10 only: fetch the official archive into root
    strict: bool = False  # stop at the first unusable mesh instead of leaving it out
    classes: list[str] | None = None  # null: all that are found
    limit: int | None = None  # at most this many meshes a class and split
    train_meshes: int = 6  # furniture only: meshes made a class
    test_meshes: int = 2
    points: int = 2048  # reference points a shape
    resample: bool = True  # fresh points every epoch; false: the same points
    grid: int = 30  # query points a side, on [-1, 1]^3
    cache: str = "data/cache"  # prepared samples, by content and settings
    workers: int = 0  # processes that sample batches ahead


@dataclass
class TargetConfig:
    """What is learned on the query points (``conf/target/``)."""

    name: str = MISSING  # udf | sdf | occupancy | random


@dataclass
class OptimizerConfig:
    """Optimizer and learning-rate schedule (``conf/optimizer/``)."""

    name: str = MISSING  # adam | adamw
    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: float = 0.0  # fraction of all steps with a linearly rising rate
    schedule: str = "constant"  # constant | cosine
    clip: float | None = None  # largest gradient norm; null: no clipping


@dataclass
class TrainingConfig:
    """The loop (section ``training``)."""

    epochs: int = 30
    batch_size: int = 4  # shapes a step
    amp: bool = False  # bf16 autocast
    validate_every: int = 5  # epochs between validations
    log_every: int = 10  # steps between progress lines
    pictures: int = 4  # test shapes drawn at the end


@dataclass
class AllocatorConfig:
    """Who owns GPU memory (``conf/allocator/``)."""

    name: str = MISSING  # torch
    expandable_segments: bool = False


@dataclass
class ProfilerConfig:
    """PhysicsNeMo's profiler around a bounded number of steps (``conf/profiler/``)."""

    name: str = MISSING  # none | torch | line_profile
    skip: int = 3  # steps before recording starts
    steps: int = 5  # steps recorded


@dataclass
class LoggerConfig:
    """Where metrics go besides metrics.jsonl (``conf/logger/``)."""

    name: str = MISSING  # none | tensorboard | mlflow


@dataclass
class Config:
    """Everything a run can be told."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    projector: ProjectorConfig = field(default_factory=ProjectorConfig)
    data: DataConfig = field(default_factory=DataConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    device: str = "auto"  # auto | cpu | cuda
    compile: bool = False
    seed: int = 0
    resume: str | None = None  # auto: newest checkpoint of this config; or a path


def to_config(composed: Any) -> Config:
    """Turn what Hydra composed into a checked :class:`Config`."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return config

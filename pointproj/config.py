"""The typed schema of the whole configuration, and the checks that need no data.

Hydra composes ``conf/``; :func:`to_config` turns the result into these dataclasses once, at the door.
Everything after that is plain Python. No torch here: ``--help`` and ``--cfg job`` answer at once.
"""

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

# What a value may be where it is one of few. Backends are not here: whoever adds one adds a module and a
# file in conf/backend/, and nothing else.
CHOICES = {
    "projector.kind": ("knn", "radius"),
    "data.name": ("furniture", "modelnet10", "mixed", "gaussian"),
    "target.name": ("udf", "sdf", "occupancy", "random"),
    "model.name": ("projector", "multiscale"),
    "augmentation.turn": ("none", "right", "any"),
    "optimizer.name": ("adam", "adamw"),
    "optimizer.schedule": ("constant", "cosine"),
    "training.on_nan": ("stop", "skip"),
    "allocator.name": ("torch", "rmm"),
    "allocator.resource": ("pool", "async", "arena", "managed"),
    "backend.algorithm": ("auto", "brute", "rbc"),
    "profiler.name": ("none", "torch", "line_profile"),
    "logger.name": ("none", "tensorboard", "mlflow"),
    "device": ("auto", "cpu", "cuda"),
}

LOSSES = ("absolute", "smooth", "squared", "cross_entropy", "overlap")

# Smallest whole number that makes sense.
MINIMA = {
    "projector.k": 1,
    "data.limit": 1,
    "data.train_meshes": 1,
    "data.test_meshes": 1,
    "data.points": 1,
    "data.grid": 2,
    "data.queries": 0,
    "data.pool": 1,
    "data.repeats": 1,
    "data.variants": 0,
    "data.workers": 0,
    "model.hidden_channels": 1,
    "model.grid_channels": 1,
    "model.side": 1,
    "model.levels": 1,
    "model.neighbors": 1,
    "training.epochs": 1,
    "training.batch_size": 1,
    "training.validate_every": 1,
    "training.log_every": 1,
    "training.pictures": 0,
    "training.checkpoint_every": 1,
    "training.time_steps": 0,
    "profiler.skip": 0,
    "profiler.steps": 1,
    "seed": 0,
}

# Largest that anything here was made for; a config may come with a checkpoint from anybody.
MAXIMA = {
    "data.points": 1_000_000_000,
    "data.grid": 1024,
    "model.hidden_channels": 65_536,
    "model.side": 256,
    "model.levels": 10,
}

POSITIVE = (
    *("projector.radius", "projector.sigma", "optimizer.lr", "optimizer.clip"),
    *("allocator.initial_gib", "allocator.maximum_gib"),
)


class ConfigError(ValueError):
    """A config that cannot run; the message holds every problem with what to write instead."""


@dataclass
class BackendConfig:
    """Which implementation of the operators runs (``conf/backend/``)."""

    name: str = MISSING  # a module of pointproj.backends, or auto
    algorithm: str | None = None  # cuml only: auto | brute | rbc, how it searches


@dataclass
class ProjectorConfig:
    """How features travel from reference points to query points (``conf/projector/``)."""

    kind: str = MISSING  # knn | radius
    k: int | None = None  # neighbours, for kind=knn
    radius: float | None = None  # cut-off in units of the query cube, for kind=radius
    sigma: float = 0.1  # softmax temperature, in units of the query cube
    context: bool | None = (
        None  # give the second MLP displacement and soft distance; null: unless target=random
    )


@dataclass
class ModelConfig:
    """Size of the network (``conf/model/``)."""

    name: str = MISSING  # projector | multiscale
    hidden_channels: int = 25
    grid_channels: int = 16  # multiscale only: width of the finest grid
    side: int = 32  # multiscale only: cells a side of the finest grid
    levels: int = 3  # multiscale only: grids of halving sides
    neighbors: int = 12  # multiscale only: reference points that a point attends to
    normals: bool | None = None  # show face normals; null: to the projector, where they tell in from out


@dataclass
class DataConfig:
    """Where shapes come from and how they are sampled (``conf/data/``)."""

    name: str = MISSING  # furniture | modelnet10 | mixed | gaussian
    root: str | None = None  # folder with <class>/{train,test}/*.off; null: data/<name>
    download: bool = False  # modelnet10 only: fetch the official archive into root
    strict: bool = False  # stop at the first unusable mesh instead of leaving it out
    classes: list[str] | None = None  # null: all that are found
    limit: int | None = None  # at most this many meshes a class and split
    train_meshes: int = 6  # furniture only: meshes made a class
    test_meshes: int = 2
    varied: bool = False  # furniture only: many more builds, in any proportions
    defects: bool = False  # furniture only: surfaces with the defects of real files
    points: int = 2048  # reference points a shape
    resample: bool = True  # fresh points every epoch; false: the same points
    grid: int = 30  # query points a side, on [-1, 1]^3
    queries: int | None = None  # random query points a shape in training; 0: the grid; null: by model
    pool: int = 16384  # random points a shape that these are drawn from
    repeats: int = 1  # mixed only: how often an epoch holds each real mesh, beside furniture once
    variants: int = (
        0  # mixed only: opened variants of each real training mesh; above 0, one of each made piece
    )
    cache: str = "data/cache"  # prepared samples, by content and settings
    workers: int = 0  # processes that sample batches ahead


@dataclass
class TargetConfig:
    """What is learned on the query points (``conf/target/``)."""

    name: str = MISSING  # udf | sdf | occupancy | random
    loss: str | None = None  # absolute | smooth | squared | cross_entropy | overlap; null: the target's own
    eikonal: float = 0.0  # weight of (|gradient| - 1)^2 at the query points, for distances


@dataclass
class AugmentationConfig:
    """How training shapes are changed on the device, clouds and queries alike (section ``augmentation``)."""

    turn: str = (
        "none"  # about the vertical: none | right (quarter turns) | any (half of the shapes by any angle)
    )
    mirror: bool = False  # left and right, front and back, each for half of the shapes
    stretch: float = 0.0  # largest change of an axis' length, as a fraction; not for distances
    shrink: float = 0.0  # largest loss of size, as a fraction
    noise: float = 0.0  # largest standard deviation of noise on the points, in units of the query cube
    drop: float = 0.0  # largest share of the points that is missing, in one region


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
    checkpoint_every: int = 1  # epochs between writes of last.pt
    on_nan: str = "stop"  # a step whose loss or gradient is not finite: stop there, or skip it and go on
    time_steps: int = 0  # repetitions when forward pass and step are timed after training; 0: not timed


@dataclass
class AllocatorConfig:
    """Who owns GPU memory (``conf/allocator/``)."""

    name: str = MISSING  # torch | rmm
    expandable_segments: bool = False  # torch only: reserved blocks grow
    resource: str | None = None  # rmm only: pool | async | arena | managed
    initial_gib: float | None = None  # rmm only: taken at the start; null: 1 (pool, async)
    maximum_gib: float | None = None  # rmm only: never more; null: all there is (arena: half of it)


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
    augmentation: AugmentationConfig = field(default_factory=AugmentationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    device: str = "auto"  # auto | cpu | cuda
    compile: bool = False
    seed: int = 0
    resume: str | None = None  # auto: newest checkpoint of this config; or a path


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
    problems = [*_value_problems(config), *_combination_problems(config)]
    if problems:
        lines = problems if len(problems) == 1 else ["", *(f"  - {problem}" for problem in problems)]
        raise ConfigError("this config cannot run: " + "\n".join(lines))
    if config.projector.context is None:
        config.projector.context = config.target.name != "random"
    if config.data.queries is None:
        config.data.queries = _default_queries(config)
    if config.model.normals is None:  # real meshes have faces of either orientation; multiscale needs none
        oriented = config.data.name == "furniture" and config.target.name in ("sdf", "occupancy")
        config.model.normals = oriented and config.model.name == "projector"
    return config


def _default_queries(config: Config) -> int:
    """Random queries for multiscale, whose grid is not that of the queries; the projector has the grid."""
    return 1024 if config.model.name == "multiscale" and config.target.name != "random" else 0


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, keyed as on the command line: ``{"optimizer.lr": 0.001, ...}``."""
    values = {}
    for name, value in tree.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return values


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean ...?"`` for the candidates that look like ``word``, else nothing."""
    close = difflib.get_close_matches(word, dict.fromkeys(candidates), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _get(config: Config, key: str) -> Any:
    value = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _value_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with single values."""
    for key, choices in CHOICES.items():
        value = _get(config, key)
        if value is not None and value not in choices:
            yield f"{key}={value}: expected one of {', '.join(choices)}{nearest(value, choices)}"
    for key, least in MINIMA.items():
        value = _get(config, key)
        if value is not None and value < least:
            yield f"{key}={value}: expected a whole number of at least {least}"
    for key, most in MAXIMA.items():
        if _get(config, key) > most:
            yield f"{key}={_get(config, key)}: expected a whole number of at most {most}"
    for key in POSITIVE:
        value = _get(config, key)
        if value is not None and not (value > 0 and math.isfinite(value)):
            yield f"{key}={value}: expected a finite number above 0"
    if config.target.loss not in (None, *LOSSES):
        close = nearest(config.target.loss, LOSSES)
        yield f"target.loss={config.target.loss}: expected one of {', '.join(LOSSES)}, or null{close}"
    if not 0 <= config.target.eikonal < math.inf:
        yield f"target.eikonal={config.target.eikonal}: expected a finite number of at least 0"
    for name in ("stretch", "shrink", "noise", "drop"):
        value = getattr(config.augmentation, name)
        if not 0 <= value < 1:
            yield f"augmentation.{name}={value}: expected a number from 0 to below 1"
    optimizer = config.optimizer
    if not 0 <= optimizer.weight_decay < math.inf:
        yield f"optimizer.weight_decay={optimizer.weight_decay}: expected a finite number of at least 0"
    if not 0 <= optimizer.warmup < 1:
        yield f"optimizer.warmup={optimizer.warmup}: expected a fraction of all steps, from 0 to below 1"
    if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
        yield f"optimizer.betas={_listed(optimizer.betas)}: expected two numbers from 0 to below 1"
    if config.data.classes is not None and not config.data.classes:
        yield "data.classes=[]: expected at least one class, or null for all that are found"
    if config.resume not in (None, "auto") and not Path(config.resume).exists():
        yield f"resume={config.resume}: there is no such file; expected auto or the path of a checkpoint"


def _combination_problems(config: Config) -> Iterator[str]:
    """Yield which values do not go together."""
    yield from _projector_problems(config)
    data, target = config.data.name, config.target.name
    if data == "gaussian" and target in ("udf", "sdf", "occupancy"):
        yield (
            f"data=gaussian has no surface, so target={target} has no values: write target=random, or "
            f"data=furniture target={target}"
        )
    if config.data.download and data != "modelnet10":
        yield f"data.download=true is for data=modelnet10; data={data} needs no download: leave it out"
    for name in ("varied", "defects"):
        if getattr(config.data, name) and data in ("modelnet10", "gaussian"):
            yield f"data.{name}=true is for data=furniture; data={data} is taken as it is: leave it out"
    if config.data.repeats > 1 and data != "mixed":
        yield f"data.repeats={config.data.repeats} is for data=mixed: write training.epochs instead"
    if config.data.variants and data != "mixed":
        yield f"data.variants={config.data.variants} is for data=mixed: leave it out"
    yield from _query_problems(config)
    if config.model.name == "multiscale" and config.model.levels <= MAXIMA["model.levels"]:
        yield from _multiscale_problems(config)
    if config.profiler.name == "line_profile" and config.compile:
        yield (
            "profiler=line_profile times Python lines, and compile=true runs none of the model's: "
            "write compile=false, or profiler=torch"
        )
    if config.backend.algorithm is not None and config.backend.name != "cuml":
        yield (
            f"backend.algorithm={config.backend.algorithm} is for backend=cuml; "
            f"backend={config.backend.name} has none: leave it out"
        )
    yield from _allocator_problems(config.allocator, config.device)


def _allocator_problems(allocator: AllocatorConfig, device: str) -> Iterator[str]:
    of_rmm = ("resource", "initial_gib", "maximum_gib")
    given = [key for key in of_rmm if getattr(allocator, key) is not None]
    if allocator.name == "torch" and given:
        key = given[0]
        yield (
            f"allocator.{key}={getattr(allocator, key)} is for allocator=rmm: write allocator=rmm, "
            "or leave it out"
        )
    if allocator.name == "rmm":
        if allocator.expandable_segments:
            yield "allocator.expandable_segments=true is for allocator=torch: leave it out"
        if allocator.initial_gib is not None and allocator.resource in ("arena", "managed"):
            yield (
                f"allocator.initial_gib={allocator.initial_gib} has no meaning for "
                f"allocator.resource={allocator.resource}: write allocator.maximum_gib"
            )
        if allocator.initial_gib and allocator.maximum_gib and allocator.initial_gib > allocator.maximum_gib:
            yield (
                f"allocator.initial_gib={allocator.initial_gib} is above "
                f"allocator.maximum_gib={allocator.maximum_gib}: expected at most that"
            )
    if device == "cpu" and allocator.name == "rmm":
        yield "allocator=rmm manages GPU memory and device=cpu uses none: leave one of them out"
    if device == "cpu" and allocator.expandable_segments:
        yield (
            "allocator.expandable_segments=true is about GPU memory and device=cpu uses none: leave one of "
            "them out"
        )


def _query_problems(config: Config) -> Iterator[str]:
    """Yield what does not go with random queries, or needs them."""
    target, augmentation = config.target, config.augmentation
    if config.data.queries and target.name == "random":
        yield "target=random has values on the grid alone: write data.queries=0"
    moved = augmentation.turn != "none" or augmentation.mirror or augmentation.stretch or augmentation.shrink
    if moved and not config.data.queries:
        yield (
            "augmentation moves the shapes, and targets on a fixed grid cannot follow: write "
            "data.queries=2048 for random query points, or augmentation.turn=none and no mirror, stretch or "
            "shrink"
        )
    distances = target.name in ("udf", "sdf")
    if augmentation.stretch and distances:
        yield f"augmentation.stretch changes distances unevenly, and target={target.name} is one: write 0"
    if target.eikonal and not distances:
        yield f"target.eikonal is for distances; target={target.name} is none: write target.eikonal=0"
    if target.loss in ("cross_entropy", "overlap") and target.name != "occupancy":
        yield f"target.loss={target.loss} is for target=occupancy, got target={target.name}: write absolute"


def _multiscale_problems(config: Config) -> Iterator[str]:
    model = config.model
    if model.side % 2 ** (model.levels - 1):
        yield (
            f"model.side={model.side} cannot be halved {model.levels - 1} times, as "
            f"model.levels={model.levels} asks for: write a multiple of {2 ** (model.levels - 1)}"
        )
    for name in ("hidden_channels", "grid_channels"):
        if getattr(model, name) % 8:
            yield f"model.{name}={getattr(model, name)}: model=multiscale needs a multiple of 8"
    if model.neighbors > config.data.points:
        yield (
            f"model.neighbors={model.neighbors} of data.points={config.data.points} reference points: "
            f"expected at most {config.data.points}, or more points"
        )


def _projector_problems(config: Config) -> Iterator[str]:
    projector = config.projector
    if projector.kind == "knn":
        if projector.radius is not None:
            yield (
                f"projector.radius={projector.radius} has no meaning for projector=knn: "
                f"write projector=radius projector.radius={projector.radius}, or projector.radius=null"
            )
        if projector.k is None:
            yield "projector=knn needs the number of neighbours: write projector.k=7"
        elif projector.k > config.data.points:
            yield (
                f"projector.k={projector.k} neighbours of data.points={config.data.points} reference points: "
                f"expected k of at most {config.data.points}, or more points"
            )
    if projector.kind == "radius":
        if projector.k is not None:
            yield (
                f"projector.k={projector.k} has no meaning for projector=radius: "
                f"write projector=knn projector.k={projector.k}, or projector.k=null"
            )
        if projector.radius is None:
            yield "projector=radius needs the cut-off: write projector.radius=0.1"


def _listed(values: Sequence[float]) -> str:
    return "[" + ",".join(str(value) for value in values) + "]"

"""Which configs cannot run: single values out of range, and values that do not go together."""

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pointproj.config.schema import AllocatorConfig, AugmentationConfig, Config
from pointproj.config.targets import TARGETS

# What a value may be where it is one of few. Backends are not here: whoever adds one adds a module and a
# file in conf/backend/, and nothing else.
CHOICES = {
    "projector.kind": ("knn", "radius"),
    "data.name": ("furniture", "modelnet10", "mixed", "gaussian"),
    "target.name": tuple(TARGETS),
    "model.name": ("projector", "multiscale"),
    "augmentation.rotate": ("none", "right", "any"),
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
    "model.neighbors": 3,
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
    "data.workers": 1024,
    "seed": 2**63 - 1,
}

POSITIVE = (
    *("projector.radius", "projector.sigma", "optimizer.lr", "optimizer.clip"),
    *("allocator.initial_gib", "allocator.maximum_gib"),
)


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean ...?"`` for the candidates that look like ``word``, else nothing."""
    close = difflib.get_close_matches(word, dict.fromkeys(candidates), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def problems_of(config: Config) -> Iterator[str]:
    """Yield all that keeps a config from running, each with what to write instead."""
    yield from _value_problems(config)
    yield from _combination_problems(config)


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
    for name in ("stretch", "warp", "shrink", "noise", "drop"):
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
    if data == "gaussian" and target in TARGETS and TARGETS[target].of_mesh:
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
    if augmentation.moves and not config.data.queries:
        yield (
            "augmentation moves the shapes, and targets on a fixed grid cannot follow: write "
            "data.queries=2048 for random query points, or augmentation.rotate=none and no mirror, stretch, "
            "warp or shrink"
        )
    facts = TARGETS.get(target.name)
    if facts is None:  # an unknown name is a problem of its own
        return
    if config.data.queries and not facts.of_mesh:
        yield f"target={target.name} has values on the grid alone: write data.queries=0"
    for name in ("stretch", "warp"):
        if getattr(augmentation, name) and facts.is_distance:
            yield f"augmentation.{name} changes distances unevenly, and target={target.name} is one: write 0"
    if target.eikonal and not facts.is_distance:
        yield f"target.eikonal is for distances; target={target.name} is none: write target.eikonal=0"
    if target.loss in ("cross_entropy", "overlap") and facts.output != "logit":
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


# What tells how far each kind of projector looks: the value, what it is, and an example.
_REACHES = {"knn": ("k", "number of neighbours", 7), "radius": ("radius", "cut-off", 0.1)}


def _projector_problems(config: Config) -> Iterator[str]:
    projector = config.projector
    for kind, (key, meaning, example) in _REACHES.items():
        value = getattr(projector, key)
        if kind == projector.kind and value is None:
            yield f"projector={kind} needs the {meaning}: write projector.{key}={example}"
        if kind != projector.kind and value is not None:
            yield (
                f"projector.{key}={value} has no meaning for projector={projector.kind}: write "
                f"projector={kind} projector.{key}={value}, or projector.{key}=null"
            )
    if projector.keep_neighbors:
        yield from _kept_neighbor_problems(config)
    if projector.kind == "knn" and (projector.k or 0) > config.data.points:
        yield (
            f"projector.k={projector.k} neighbours of data.points={config.data.points} reference points: "
            f"expected k of at most {config.data.points}, or more points"
        )


def _kept_neighbor_problems(config: Config) -> Iterator[str]:
    """Yield what lets the neighbours of a training shape change from step to step."""
    changes = {
        "projector=radius has no lists of neighbours": config.projector.kind != "knn",
        "model=multiscale searches points of its own": config.model.name == "multiscale",
        "data.resample=true draws other points every epoch: write data.resample=false": config.data.resample
        and config.data.name != "gaussian",
        "data.queries are other points every time: write data.queries=0": bool(config.data.queries),
        "augmentation changes the points: leave it out": config.augmentation != AugmentationConfig(),
    }
    for reason, applies in changes.items():
        if applies:
            yield f"projector.keep_neighbors=true needs shapes that stay as they are: {reason}"


def _listed(values: Sequence[float]) -> str:
    return "[" + ",".join(str(value) for value in values) + "]"

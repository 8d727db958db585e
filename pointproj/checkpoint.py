"""Checkpoints: all of the training loop's state in one file, written whole or not at all.

PhysicsNeMo's ``save_checkpoint`` writes model and optimizer as separate numbered files and not atomically;
``last.pt`` and ``best.pt`` have to be replaced in one move, so torch's own format is used. Files load with
``weights_only=True``: they hold tensors and plain values, and opening one runs no code.
"""

import dataclasses
import logging
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pointproj.config import Config, flat

log = logging.getLogger(__name__)

FORMAT = 1
LAST = "last.pt"
BEST = "best.pt"

# What may differ between a run and its continuation: where it runs, what it shows, where files are.
FREE_KEYS = (
    "allocator",
    "backend",
    "compile",
    "data.cache",
    "data.download",
    "data.root",
    "data.strict",
    "data.workers",
    "device",
    "logger",
    "profiler",
    "resume",
    "training.checkpoint_every",
    "training.log_every",
    "training.pictures",
    "training.time_steps",
    "training.validate_every",
)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be continued from; the message says which, why, and what to do."""


def save(path: Path, state: Mapping[str, Any], config: Config) -> None:
    """Write a checkpoint, replacing an older one in one move.

    Parameters
    ----------
    path : Path
        Its folder exists. An interrupted write leaves the old file as it was.
    state : mapping
        State of model, optimizer and loop: tensors, numbers, strings, lists, mappings.
    config : Config
        Of the run; what :func:`read` compares.
    """
    content = {"format": FORMAT, "config": dataclasses.asdict(config), "random": random_states(), **state}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(content, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, config: Config) -> dict[str, Any]:
    """Read a checkpoint that a run of ``config`` may continue from.

    Parameters
    ----------
    path : Path
        A file, or the folder of a run (its ``last.pt`` is meant then).
    config : Config
        Of the run that continues.

    Returns
    -------
    dict
        What :func:`save` was given, on the CPU, with ``format``, ``config`` and ``random`` beside it.

    Raises
    ------
    CheckpointError
        If there is no such file, it is damaged or no checkpoint, or its config differs where it matters.
    """
    path = path / LAST if path.is_dir() else path
    content = _load(path)
    differences = config_differences(content["config"], dataclasses.asdict(config))
    if differences:
        raise CheckpointError(
            f"{path} belongs to another config: " + "; ".join(differences) + ". Give these the checkpoint's "
            "values, or start anew without resume."
        )
    return content


def find_newest(root: Path, config: Config) -> Path | None:
    """Return the newest ``last.pt`` below ``root`` whose config is as good as equal, or None.

    Parameters
    ----------
    root : Path
        Folder of runs.
    config : Config
        Of the run that wants to continue.
    """
    found = [(path.stat().st_mtime_ns, path) for path in root.rglob(LAST)]
    for _, path in sorted(found, reverse=True):
        try:
            read(path, config)
        except CheckpointError as error:
            log.debug("not resumed: %s", error)
        else:
            return path
    return None


def config_differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Name each value that differs and changes what is learned, as ``key: checkpoint A, this run B``.

    The number of epochs may differ where no learning rate depends on it.
    """
    saved, wanted = _comparable(saved), _comparable(wanted)
    free = FREE_KEYS
    if wanted.get("optimizer.schedule") == "constant" and not wanted.get("optimizer.warmup"):
        free = (*free, "training.epochs")
    return [
        f"{key}: checkpoint {saved.get(key)}, this run {wanted.get(key)}"
        for key in sorted(saved.keys() | wanted.keys())
        if not any(key == name or key.startswith(name + ".") for name in free)
        and saved.get(key) != wanted.get(key)
    ]


def random_states() -> dict[str, Any]:
    """Return the states of all random generators of this process, as tensors and plain values."""
    name, keys, *position = np.random.get_state()
    version, words, gauss = random.getstate()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *position],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set all random generators to what :func:`random_states` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *position = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimizer the moments and step counts of a checkpoint, and leave its settings alone.

    The settings of the checkpoint would carry over how that run was executed (captured, on which device).
    """
    optimizer.load_state_dict(
        {"state": state["state"], "param_groups": optimizer.state_dict()["param_groups"]}
    )


def _load(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}; expected a .pt file or the folder of a run")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}); take another file of that run"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or "config" not in content:
        raise CheckpointError(f"{path} is not a checkpoint of this program's format {FORMAT}")
    return content


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flat(config).items()}

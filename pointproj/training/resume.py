"""Where a run stands, and which checkpoint it continues from, found and read before any data is prepared."""

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pointproj.config import Config
from pointproj.runtime.distributed import Processes
from pointproj.runtime.run_folder import RunFolder
from pointproj.training import checkpoint

log = logging.getLogger(__name__)


@dataclass
class Position:
    """Where a run stands and what it has measured so far; part of every checkpoint."""

    epoch: int = 0  # finished epochs
    step_in_epoch: int = 0
    step: int = 0
    best: float = math.inf  # lowest error on the test meshes
    losses: list[list[float]] = field(default_factory=list)  # [step, mean loss since the entry before]
    errors: list[list[float]] = field(default_factory=list)  # [step, error on the test meshes]


Continued = tuple[Path, dict[str, Any]]  # a checkpoint and its content


def checkpoint_to_continue(config: Config, run: RunFolder, processes: Processes) -> Continued | None:
    """Find and read what ``resume`` names.

    Parameters
    ----------
    config : Config
    run : RunFolder
        Of the run that continues; ``resume=auto`` looks at its neighbours.
    processes : Processes
        Who will train.

    Returns
    -------
    (Path, dict) or None
        The file and what :func:`pointproj.training.checkpoint.read` returned for it; None to begin anew.

    Raises
    ------
    CheckpointError
        If there is no such checkpoint, it does not fit the config, or as many processes as are here would
        take other batches than those that wrote it.
    """
    found = _named(config, run)
    if found is not None:
        path, content = found
        wrote = content.get("processes", 1)
        if wrote != processes.count:
            raise checkpoint.CheckpointError(
                f"{path} was written by {wrote} process(es), and {processes.count} would continue it with "
                f"batches of another size: start {wrote}, or start anew without resume"
            )
    return found


def _named(config: Config, run: RunFolder) -> Continued | None:
    if config.resume is None:
        return None
    if config.resume != "auto":
        path = Path(config.resume)
        path = path / checkpoint.LAST if path.is_dir() else path
        return path, checkpoint.read(path, config)
    outputs = next((folder for folder in run.path.parents if folder.name == "outputs"), run.path.parent)
    path = checkpoint.find_newest(outputs, config)
    if path is None:
        log.info("resume=auto: no checkpoint of this config below %s; training from the beginning", outputs)
        return None
    return path, checkpoint.read(path, config)

"""Checkpoints: the whole state of the training loop in one file; the previous file is kept too.

PhysicsNeMo's ``save_checkpoint`` writes model and optimizer to separate numbered files, and not atomically.
But ``last.pt`` and ``best.pt`` have to be replaced in one move, so :mod:`pointproj.runtime.tensor_file`
writes them. When ``last.pt`` is replaced, the old file is kept as ``previous.pt``.
"""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from pointproj.config import Config, flat, from_saved
from pointproj.nn.pretrained import TENSORS
from pointproj.runtime import tensor_file
from pointproj.runtime.distributed import Processes
from pointproj.runtime.run_folder import RunFolder, require_idle, resume_argument

log = logging.getLogger(__name__)

FORMAT = 2
LAST = "last.pt"
PREVIOUS = "previous.pt"  # the last.pt before; it is read if last.pt cannot be read
BEST = "best.pt"

# Values that may differ between a run and its continuation: where it runs, what it shows, where files are.
FREE_KEYS = (
    *("allocator", "backend", "compile", "device", "logger", "profiler", "resume"),
    *("data.cache", "data.download", "data.root", "data.strict", "data.workers"),
    *("training.checkpoint_every", "training.log_every", "training.validate_every", "training.on_nan"),
    *("training.pictures", "training.time_steps", "training.weights"),
)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message says which, why, and what to do."""


class OtherConfig(CheckpointError):  # noqa: N818 - what it is
    """A checkpoint can be read, but its config differs in values that change what is learned."""


@dataclass
class Position:
    """How far a run has come, and what it has measured so far; part of every checkpoint."""

    epoch: int = 0  # finished epochs
    step_in_epoch: int = 0
    step: int = 0
    best: float = math.inf  # lowest error on the validation meshes
    losses: list[list[float]] = field(default_factory=list)  # [step, mean loss since the previous entry]
    errors: list[list[float]] = field(default_factory=list)  # [step, error on the validation meshes]
    loss_sum: float = 0.0  # of all finite losses since the last entry of losses
    loss_steps: int = 0


Continued = tuple[Path, dict[str, Any]]  # a checkpoint and its content


def save(path: Path, state: Mapping[str, Any], config: Config) -> None:
    """Write a checkpoint into an existing folder; an older one is replaced in one move.

    ``state`` is the state of model, optimizer and loop. An old ``last.pt`` becomes ``previous.pt``. Raises
    CheckpointError if the checkpoint cannot be written; then the old one is still there.
    """
    content = {"format": FORMAT, "config": dataclasses.asdict(config), "random": random_states(), **state}
    try:
        tensor_file.save(path, content, keep=path.with_name(PREVIOUS) if path.name == LAST else None)
    except OSError as error:
        whole = next((name for name in (LAST, PREVIOUS, BEST) if path.with_name(name).exists()), None)
        onwards = "there is no checkpoint yet"
        if whole is not None:
            onwards = f"{whole} is complete: continue with {resume_argument(path.with_name(whole))}"
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}): make room there or name another folder "
            f"with hydra.run.dir=FOLDER; {onwards}"
        ) from error


def read(path: Path, config: Config) -> dict[str, Any]:
    """Read a checkpoint that a run of ``config`` may continue from: a file, or the ``last.pt`` of a folder.

    If ``last.pt`` cannot be read, ``previous.pt`` in the same folder is read, with a warning. Raises
    CheckpointError, which names both files, if neither is there and a checkpoint; and OtherConfig if its
    config differs in values that change what is learned.
    """
    path = path / LAST if path.is_dir() else path
    try:
        content = load(path)
    except CheckpointError as error:
        previous = path.with_name(PREVIOUS)
        if path.name != LAST or not previous.exists():
            raise
        try:
            content = load(previous)
        except CheckpointError as of_previous:
            raise CheckpointError(f"{error}; {of_previous}") from of_previous
        log.warning("%s; taking %s, which was written before it", error, previous.name)
    differences = config_differences(content["config"], dataclasses.asdict(config))
    if differences:
        raise OtherConfig(
            f"{path} belongs to another config: {'; '.join(differences)}. Give these the checkpoint's "
            "values, or start anew without resume."
        )
    return content


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint of any config and any origin: reading runs no code from the file.

    The result has ``format``, ``config`` (nested mappings of plain values), ``random`` and the ``state`` of
    :func:`save`, on the CPU. Raises CheckpointError if there is no such file, or another program wrote it.
    """
    try:
        content = tensor_file.load(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"there is no checkpoint {path}; expected a .pt file or the folder of a run"
        ) from None
    except (OSError, tensor_file.DamagedFile) as error:
        raise CheckpointError(
            f"{path} cannot be read as a checkpoint ({error}); take another file of that run"
        ) from error
    if content.get("format") != FORMAT or not isinstance(content.get("config"), dict):
        raise CheckpointError(f"{path} is not a checkpoint of this program's format {FORMAT}")
    return content


def load_best(path: Path) -> Continued:
    """Read a checkpoint of any config; from a folder the best, exported weights, or the last."""
    if path.is_dir():
        path /= next((name for name in (BEST, TENSORS) if (path / name).exists()), LAST)
    return path, load(path)


def described(path: Path, content: Mapping[str, Any]) -> str:
    """Return a line on a checkpoint of a valid config: its file, its epoch, and if training ended early."""
    epochs, epoch = content["config"]["training"]["epochs"], _epoch(content)
    if epoch is None:  # weights without the state of a run
        return str(path)
    try:
        reached = max(epoch, _epoch(load(path.with_name(LAST))) or 0)
    except CheckpointError:
        reached = epoch
    line = f"{path}, of epoch {epoch} of {epochs}"
    if reached < epochs:
        line += f"; training ended after {reached} epochs, at {reached / epochs:.0%}"
    return line


def _epoch(content: Mapping[str, Any]) -> int | None:
    position = content.get("position")
    epoch = position.get("epoch") if isinstance(position, Mapping) else None
    return epoch if isinstance(epoch, int) else None


def find(config: Config, run: RunFolder, processes: Processes) -> Continued | None:
    """Find and read the checkpoint that ``resume`` names; return None to begin anew.

    ``resume=auto`` looks into the run's folder, and into other runs' folders unless the user named the
    folder. Raises CheckpointError if there is no such checkpoint, if it does not fit the config, or if
    another number of processes wrote it, since the batches would differ. Raises RunError if the found run is
    still in use by another process.
    """
    if config.resume is None:
        return None
    if config.resume == "auto":
        continued = _newest(config, run)
        if continued is None:
            return None
        path, content = continued
    else:
        path = Path(config.resume)
        path = path / LAST if path.is_dir() else path
        content = read(path, config)
    wrote = content.get("processes", 1)
    if wrote != processes.count:
        raise CheckpointError(
            f"{path} was written by {wrote} process(es), and {processes.count} would continue it with "
            f"batches of another size: start {wrote}, or start anew without resume"
        )
    if path.parent.resolve() != run.path.resolve():
        log.info("resume    from %s, in the new folder %s", path, run.path)
    return path, content


def _newest(config: Config, run: RunFolder) -> Continued | None:
    """Return the newest checkpoint that a run of this config may continue from, or None if there is none.

    Raises CheckpointError if the newest run of this config has checkpoints, and none can be read.
    """
    folder = run.path
    if not run.named:
        folder = next((parent for parent in run.path.parents if parent.name == "outputs"), run.path.parent)
    found = {path.parent: path.stat().st_mtime_ns for name in (PREVIOUS, LAST) for path in folder.rglob(name)}
    if (run.path / BEST).exists():  # which a run from the beginning would replace
        found.setdefault(run.path, 0)
    for parent in sorted(found, key=lambda parent: (found[parent], parent), reverse=True):
        own = parent.resolve() == run.path.resolve()
        try:
            content = read(parent, config)
        except OtherConfig as error:
            log.debug("not resumed: %s", error)
            continue
        except CheckpointError as error:
            if own or _is_of(config, parent):
                raise CheckpointError(
                    f"resume=auto: {parent} has a run of this config that cannot be continued: {error}. Its "
                    "files stay as they are: name another checkpoint with resume=FILE, move the folder away, "
                    "or begin in another folder without resume"
                ) from error
            log.warning("resume=auto passes over %s: %s", parent, error)
            continue
        if not own:
            require_idle(parent)
        return parent / LAST, content
    log.info("resume=auto: no checkpoint of this config in %s; training from the beginning", folder)
    return None


def _is_of(config: Config, folder: Path) -> bool:
    """Return whether the ``config.yaml`` in a folder is of a run that this config may continue."""
    try:
        written = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        earlier = from_saved({**written, "resume": None})
    except Exception:  # it is missing, or of another program or version
        return False
    return not config_differences(dataclasses.asdict(earlier), dataclasses.asdict(config))


def config_differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """List the values that differ and change what is learned, as ``key: checkpoint A, this run B``.

    A higher number of epochs is no difference, and a lower one neither if no learning rate depends on it.
    """
    saved, wanted = (
        {key: list(value) if isinstance(value, tuple) else value for key, value in flat(config).items()}
        for config in (saved, wanted)
    )
    epochs = [values.get("training.epochs") for values in (saved, wanted)]
    raised = all(isinstance(number, int) for number in epochs) and epochs[0] < epochs[1]
    epochs_are_free = raised or not rate_depends_on_epochs(wanted)
    free = (*FREE_KEYS, "training.epochs") if epochs_are_free else FREE_KEYS
    differing = sorted(k for k in saved.keys() | wanted.keys() if saved.get(k) != wanted.get(k))
    return [
        f"{key}: checkpoint {saved.get(key)}, this run {wanted.get(key)}"
        for key in differing
        if not f"{key}.".startswith(tuple(f"{name}." for name in free))
    ]


def rate_depends_on_epochs(config: Mapping[str, Any]) -> bool:
    """Return whether the learning rate of a step depends on the number of all steps."""
    config = flat(config)
    return config.get("optimizer.schedule") != "constant" or bool(config.get("optimizer.warmup"))


@contextmanager
def fits(path: Path) -> Iterator[None]:
    """Raise CheckpointError if the block, which restores a checkpoint, fails: ``path`` does not fit."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} does not fit this network, though its config does ({type(error).__name__}: {error}): "
            "it was changed, or made by another version of this program; start anew without resume"
        ) from error


def random_states() -> dict[str, Any]:
    """Return the states of torch's random generators; a run does not use those of Python and NumPy."""
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"torch": torch.get_rng_state(), "cuda": on_gpus}


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Set the random generators to the states that :func:`random_states` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimizer the moments and step counts of a checkpoint; its settings stay.

    The checkpoint's settings depend on how that run was executed (captured or not, on which device).
    """
    moments = {int(number): moment for number, moment in state["state"].items()}
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})

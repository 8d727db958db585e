"""One job: its config is checked, its folder claimed, and its end always recorded."""

import gc
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pointproj.config import Config, ConfigError, to_config
from pointproj.machine import environment
from pointproj.runtime import distributed
from pointproj.runtime.errors import is_user_error
from pointproj.runtime.failures import ending_together
from pointproj.runtime.overrides import check_files
from pointproj.runtime.run_folder import RunError, RunFolder, require_writable
from pointproj.runtime.signals import StopAtOnce

log = logging.getLogger(__name__)


def run_job(composed: DictConfig) -> None:
    """Run the job that Hydra has set up; if several processes run it together, each calls this.

    Outside of a sweep, an error ends the program; a user-facing error as SystemExit with its message. In a
    sweep, the error is recorded in the job's folder (``status.json``), and the next jobs run.
    """
    processes = distributed.join()
    if not processes.is_first:
        distributed.log_errors_only(processes.rank)
    hydra_config = HydraConfig.get()
    in_sweep = hydra_config.mode == RunMode.MULTIRUN
    folder = Path(hydra_config.runtime.output_dir)
    setting = "hydra.sweep.dir=" if in_sweep else "hydra.run.dir="
    named = any(override.startswith(setting) for override in hydra_config.overrides.hydra)
    written = OmegaConf.to_container(hydra_config.overrides.task)  # as they are: with ${...} in them
    facts = {"job": hydra_config.job.get("num"), "overrides": written}
    try:
        with StopAtOnce(), ending_together(folder, processes):
            if in_sweep:
                _forget_last_job()
                check_files(hydra_config.runtime)
            config = None if in_sweep else _checked(composed, folder)
            with _claimed(composed, folder, named) as run, _recorded_status(run, facts, in_sweep):
                _train(config or to_config(composed), run, in_sweep)
        gc.collect()  # frees captured steps, which use the connection that is closed next
        distributed.leave()
    except Exception as error:
        if is_user_error(error):
            sys.exit(f"{type(error).__name__}: {error}")
        raise


def _checked(composed: DictConfig, folder: Path) -> Config:
    try:
        check_files(HydraConfig.get().runtime)
        return to_config(composed)
    except ConfigError:
        with suppress(OSError):  # the folder does not exist yet, or is not empty
            folder.rmdir()
        raise


def _claimed(composed: DictConfig, folder: Path, named: bool) -> RunFolder:
    run = RunFolder(folder, writes=distributed.join().is_first, named=named)
    run.claim(OmegaConf.to_yaml(composed), continues=_is_continued(composed, folder))
    return run


def _is_continued(composed: DictConfig, folder: Path) -> bool:
    """Return whether a run in the folder is the one to be continued, and not another run."""
    earlier = folder / "config.yaml"
    if composed.resume is None or not earlier.exists():
        return False
    if composed.resume != "auto":
        return Path(composed.resume).resolve().is_relative_to(folder.resolve())
    from pointproj.training.checkpoint import config_differences

    plain = [OmegaConf.to_container(config) for config in (OmegaConf.load(earlier), composed)]
    return not config_differences(*plain)


@contextmanager
def _recorded_status(run: RunFolder, facts: dict[str, Any], in_sweep: bool) -> Iterator[None]:
    """Write ``status.json``: running, then ok, stopped or failed. If the job is killed, running remains.

    In a sweep an error is not raised again, unless other processes wait for this one to end.
    """
    started = time.monotonic()

    def note(status: str, **more: Any) -> None:
        seconds = round(time.monotonic() - started, 2)
        run.write_json("status.json", {"status": status, **more, "seconds": seconds, **facts})

    note("running")
    try:
        yield
        note("ok")
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        with suppress(RunError):  # it would hide the first error
            note("stopped" if stopped else "failed", error=f"{type(error).__name__}: {error}")
        if stopped or not in_sweep or not distributed.join().is_single:
            raise
        if is_user_error(error):
            log.error("job failed: %s: %s", type(error).__name__, error)
        else:
            log.exception("job failed")


def _train(config: Config, run: RunFolder, in_sweep: bool) -> None:
    """Train; modules that take seconds to import are imported here."""
    # torch's tracer reads this when torch is imported. Without it, it prints a line at each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from pointproj.runtime.devices import cpu_threads, own_gpu
    from pointproj.runtime.memory import configure_allocator
    from pointproj.runtime.profiling import require_profiler
    from pointproj.training.execution import may_capture
    from pointproj.training.loop import train

    data = config.data
    if data.name != "gaussian":
        require_writable(Path(data.cache))
        if data.name not in ("modelnet10", "meshes") or data.download:  # meshes are written
            require_writable(Path(data.root or "data"))
    require_profiler(config.profiler)
    configure_allocator(config.allocator, captures=may_capture(config))
    log.info("run       %s", run.path)
    run.write_json("environment.json", environment())
    # Other jobs of the sweep may run on this machine at the same time, and need GPUs too.
    takes_one = in_sweep and config.device != "cpu" and distributed.join().is_single
    with own_gpu() if takes_one else nullcontext(), cpu_threads(config.training.threads):
        train(config, run)


def _forget_last_job() -> None:
    """Release what the last job of this process left: memory, the record of its peak, and compiled code."""
    if "torch" in sys.modules:
        import torch

        from pointproj.runtime.memory import empty_cache, reset_peak

        if "torch._dynamo" in sys.modules:  # otherwise the call imports it, for a second
            torch.compiler.reset()
        gc.collect()
        empty_cache()
        reset_peak()

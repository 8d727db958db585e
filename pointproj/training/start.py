"""The start of a training: device, backend, checkpoint and data, as the config says; then the loop."""

import logging
from pathlib import Path
from typing import Any

from pointproj.config import Config, ConfigError, nearest
from pointproj.data.dataset import prepare
from pointproj.machine import environment
from pointproj.ops.registry import names as backend_names
from pointproj.ops.registry import resolve, use_options
from pointproj.runtime import distributed
from pointproj.runtime.compiler import choose_compilers
from pointproj.runtime.devices import choose_device, device_text, seed_everything
from pointproj.runtime.failures import explained_dead_worker
from pointproj.runtime.loggers import MetricLogger, open_logger
from pointproj.runtime.memory import explained_out_of_memory, reset_peak
from pointproj.runtime.run_folder import RunFolder
from pointproj.training import checkpoint
from pointproj.training.capture import capture_obstacle
from pointproj.training.loop import Execution, Training

log = logging.getLogger(__name__)


def train(config: Config, run: RunFolder) -> dict[str, Any]:
    """Train as the config says, and leave everything in the run's folder.

    Where a launcher started several processes, each calls this, and they train one model together.

    Parameters
    ----------
    config : Config
        Checked, from :func:`pointproj.config.to_config`.
    run : RunFolder
        Where metrics, checkpoints, pictures and the report go.

    Returns
    -------
    dict
        The content of ``metrics.json``.

    Raises
    ------
    BackendUnavailable, DeviceError, LoggerUnavailable, CheckpointError
        Before any data is read, if the config cannot be run as it is.
    DataError, MeshError
        From the preparation of the data.
    TrainingDiverged
        If a loss or gradient is not finite; the checkpoints are from before, and the batch is saved.
    OutOfMemory
        If the device has not enough memory; says what to lower.
    WorkerDied
        If a process that samples batches has died.
    Stopped
        After Ctrl-C, SIGTERM or SIGUSR1; ``last.pt`` then holds the state after the last step.
    """
    execution = _choose_execution(config)
    device, processes = execution.device, execution.processes
    run.write_json("environment.json", {**environment(str(device)), "processes": processes.count})
    continued = checkpoint.find(config, run, processes)
    weights = None
    if continued is None and config.training.weights is not None:
        weights = checkpoint.load_best(Path(config.training.weights))
    logger = open_logger(config, run.path) if processes.is_first else MetricLogger()
    try:
        seed_everything(config.seed)
        reset_peak(device)
        data = prepare(config, processes, str(device))
        last = run.path / checkpoint.LAST
        with explained_out_of_memory(config, device), explained_dead_worker(config.data.workers, last):
            metrics = Training(config, run, data, execution, logger).run(continued, weights)
    except BaseException:
        logger.close(failed=True)
        raise
    logger.close()
    return metrics


def _choose_execution(config: Config) -> Execution:
    """Choose device and backend as the config says, and log why."""
    processes = distributed.join()
    device = choose_device(config.device)
    name = config.backend.name
    known = ("auto", *backend_names())
    if name not in known:
        listed = ", ".join(known)
        raise ConfigError(f"backend.name={name}: expected one of {listed}{nearest(name, known)}")
    backend, why = resolve(name, device.type, config.projector.OPERATOR)
    log.info("device    %s", device_text(device))
    log.info("backend   %s: %s", backend, why)
    use_options(name, config.backend.algorithm)
    if not config.compile or device.type != "cuda":
        return Execution(device, backend, processes=processes)
    choose_compilers(few_kernels=config.projector.name != "visibility")
    obstacle = capture_obstacle(backend)
    if obstacle:
        log.warning("compile=true compiles the model but captures no CUDA graph of the step: %s", obstacle)
    return Execution(device, backend, obstacle is None, processes)

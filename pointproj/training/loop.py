"""The training of a network: device and backend, the loop, the report."""

import dataclasses
import io
import itertools
import logging
import math
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from pointproj.config import Config, ConfigError, nearest
from pointproj.data.dataset import PreparedData, prepare
from pointproj.machine import environment
from pointproj.ops.functional import knn_aggregate, radius_aggregate
from pointproj.ops.registry import names as backend_names
from pointproj.ops.registry import resolve, use_options
from pointproj.runtime import distributed
from pointproj.runtime.compiler import choose_compilers
from pointproj.runtime.devices import choose_device, device_text, seed_everything
from pointproj.runtime.distributed import Processes, StopTogether
from pointproj.runtime.failures import explained_dead_worker
from pointproj.runtime.loggers import MetricLogger, NoLogger, open_logger
from pointproj.runtime.memory import explained_out_of_memory, peak_bytes, reset_peak
from pointproj.runtime.profiling import StepProfiler
from pointproj.runtime.run_folder import RunFolder, resume_argument
from pointproj.runtime.signals import Stopped, StopRequest
from pointproj.training import checkpoint, report
from pointproj.training.capture import capture_obstacle
from pointproj.training.display import Pace, ProgressDisplay
from pointproj.training.divergence import DivergenceCheck
from pointproj.training.finish import finish
from pointproj.training.loader import BatchLoader
from pointproj.training.losses import loss_function
from pointproj.training.networks import build_model
from pointproj.training.optimizers import build_optimizer, learning_rate, set_learning_rate
from pointproj.training.resume import Continued, Position, checkpoint_to_continue
from pointproj.training.step import Batch, TrainingStep
from pointproj.training.validation import Evaluation, Predictor, evaluate, untrained_predictor

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
    processes = distributed.join()
    device = choose_device(config.device)
    _check_backend_name(config.backend.name)
    backend, why = resolve(config.backend.name, device.type, config.projector.OPERATOR)
    log.info("device    %s", device_text(device))
    log.info("backend   %s: %s", backend, why)
    use_options(config.backend.name, config.backend.algorithm)
    obstacle = capture_obstacle(backend) if config.compile and device.type == "cuda" else None
    if config.compile and device.type == "cuda":
        choose_compilers(few_kernels=config.projector.name != "visibility")
    if obstacle:
        log.warning("compile=true compiles the model but captures no CUDA graph of the step: %s", obstacle)
    run.write_json("environment.json", {**environment(str(device)), "processes": processes.count})
    continued = checkpoint_to_continue(config, run, processes)
    logger = open_logger(config, run.path) if processes.is_first else NoLogger()
    try:
        seed_everything(config.seed)
        reset_peak(device)
        data = prepare(config, processes, str(device))
        last = run.path / checkpoint.LAST
        with explained_out_of_memory(config, device), explained_dead_worker(config.data.workers, last):
            metrics = Training(config, run, data, device, backend, logger, processes).run(continued)
    except BaseException:
        logger.close(failed=True)
        raise
    logger.close()
    return metrics


def _check_backend_name(name: str) -> None:
    known = ("auto", *backend_names())
    if name not in known:
        listed = ", ".join(known)
        raise ConfigError(f"backend.name={name}: expected one of {listed}{nearest(name, known)}")


class Training:
    """One run: its model, optimizer and data, and where it stands.

    Parameters
    ----------
    config : Config
    run : RunFolder
    data : PreparedData
    device : torch.device
    backend : str
        Of the operators, resolved.
    logger : MetricLogger
    processes : Processes
        The processes that train together; only the first one writes to ``run`` and ``logger``.
    """

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        data: PreparedData,
        device: torch.device,
        backend: str,
        logger: MetricLogger,
        processes: Processes,
    ) -> None:
        self.config = config
        self.run_folder = run
        self.data = data
        self.device = device
        self.backend = backend
        self.logger = logger
        self.processes = processes
        self.model = build_model(config, backend).to(device)
        capture = config.compile and device.type == "cuda" and capture_obstacle(backend) is None
        self.optimizer = build_optimizer(config.optimizer, self.model.parameters(), capturable=capture)
        self.step = TrainingStep(
            self.model,
            self.optimizer,
            loss_function(config.target),
            clip=config.optimizer.clip,
            amp=config.training.amp,
            eikonal=config.target.eikonal,
            compile=config.compile,
            capture=capture,
            processes=processes,
        )
        self.loader = BatchLoader(config, data, device, processes, backend)
        self.total_steps = self.loader.steps_per_epoch * config.training.epochs
        self.position = Position()
        self.divergence = DivergenceCheck(config, run.path)
        self.pace = Pace()
        self.first_step_ended: float | None = None  # seconds since the epoch, of this process
        self.pending: Callable[[], None] | None = None  # acts on the status that was requested
        untrained = untrained_predictor(config.target.name, backend, normals=bool(config.projector.normals))
        self.baseline = self.evaluate(untrained)
        self.evaluation: Evaluation | None = None  # of the model as it is now

    def run(self, continued: Continued | None = None) -> dict[str, Any]:
        """Train from the beginning or from a checkpoint, then report.

        Parameters
        ----------
        continued : (Path, dict), optional
            A checkpoint and what :func:`pointproj.training.checkpoint.read` returned for it.

        Returns
        -------
        dict
            The content of ``metrics.json``.
        """
        self._log_header()
        if continued is None:
            self.run_folder.truncate_metrics(-1)  # of a run that was killed here before its first checkpoint
            self._validate()
        else:
            with checkpoint.fits(continued[0]):
                self._restore(*continued)
        self._loop()
        if self.evaluation is None:
            self.evaluation = self.evaluate(self.predict)
        return finish(self)

    def _loop(self) -> None:
        config, position = self.config, self.position
        with ExitStack() as stack:
            profiler = StepProfiler(config.profiler, self.run_folder.path, self._profiled_functions())
            stack.callback(profiler.close)
            stop = stack.enter_context(StopRequest())
            stop_together = stack.enter_context(closing(StopTogether(self.processes)))
            display = stack.enter_context(self._display())
            # One stream of batches for all epochs: its workers go on sampling during validation.
            stream = stack.enter_context(closing(self.loader.training(position)))
            profiler.start()
            while position.epoch < config.training.epochs:
                batches_left = itertools.islice(stream, self.loader.steps_per_epoch - position.step_in_epoch)
                with self.pace.running():
                    for batch in batches_left:
                        self._train_step(batch, display, profiler)
                        if stop_together(stop.made is not None):
                            self._stop(stop)
                    self._read_status()
                    self._wait_for_device()  # steps still under way belong to this time
                self._check_finite()
                position.epoch, position.step_in_epoch = position.epoch + 1, 0
                is_last = position.epoch == config.training.epochs
                if position.epoch % config.training.validate_every == 0 or is_last:
                    self._validate()
                if position.epoch % config.training.checkpoint_every == 0 or is_last:
                    self._save(checkpoint.LAST)

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _profiled_functions(self) -> list[Callable[..., Any]]:
        """Where the time of a step is spent in Python."""
        return [
            TrainingStep._run,
            TrainingStep._loss_with_gradients,
            type(self.model).forward,
            knn_aggregate,
            radius_aggregate,
        ]

    def _train_step(self, batch: dict[str, Any], display: ProgressDisplay, profiler: StepProfiler) -> None:
        config, position = self.config, self.position
        lr = learning_rate(config.optimizer, position.step, self.total_steps)
        set_learning_rate(self.optimizer, lr)
        self.step(batch)
        if self.first_step_ended is None:
            self._wait_for_device()
            self.first_step_ended = time.time()
        self._read_status()  # of an earlier step: the device runs this one meanwhile
        profiler.step()
        self.pace.count(self.loader.shapes_of_step(position.step_in_epoch))
        position.step += 1
        position.step_in_epoch += 1
        display.advance(position.step)
        check_is_due = self.divergence.add(position.step, batch)
        ends_interval = position.step % config.training.log_every == 0 or position.step == self.total_steps
        if check_is_due or ends_interval:
            self.step.request_status(ends_interval=ends_interval)
            self.pending = partial(self._act_on_status, display if ends_interval else None, lr)
            if self.device.type != "cuda":
                self._read_status()

    def _display(self) -> ProgressDisplay:
        console = None if self.processes.is_first else Console(file=io.StringIO())
        return ProgressDisplay(self.total_steps, self.position.step, console)

    def _read_status(self) -> None:
        """Act on the status that was requested after an earlier step, if that was not done yet."""
        act, self.pending = self.pending, None
        if act is not None:
            act()

    def _act_on_status(self, display: ProgressDisplay | None, lr: float) -> None:
        loss, not_finite = self.step.read_status()
        self.divergence.check(not_finite)
        if display is not None:
            self._log_step(display, lr, loss)

    def _log_step(self, display: ProgressDisplay, lr: float, loss: float) -> None:
        position, training = self.position, self.config.training
        if math.isfinite(loss):  # it is not if all these steps were skipped
            position.losses.append([position.step, loss])
        pace, memory = self.pace.read(), peak_bytes(self.device)
        display.line(position.epoch + 1, training.epochs, position.step, loss, lr, pace, memory)
        measured = {"ms_per_step": pace.ms_per_step, "samples_per_second": pace.samples_per_second}
        self._record("train", loss=loss, lr=lr, **measured, memory_bytes=memory)

    def _check_finite(self) -> None:
        self._read_status()
        self.divergence.check(self.step.read_not_finite())

    def _validate(self) -> None:
        """Measure the model on the test meshes, and keep it if it is the best so far."""
        position = self.position
        self.evaluation = self.evaluate(self.predict)
        error = self.evaluation.error
        position.errors.append([position.step, error])
        log.info("step %d: test %s", position.step, report.one_line(self.evaluation, self.baseline))
        self._record("test", **self.evaluation.means())
        if position.step > 0 and error < position.best:
            position.best = error
            self._save(checkpoint.BEST)

    def predict(self, batch: Batch) -> Tensor:
        """Predict without compilation, which would begin anew for the shapes of the test batches."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.training.amp):
            prediction = self.model(
                batch["query_points"], batch["reference_points"], features=batch.get("features")
            )
        return prediction.squeeze(-1).float()

    def evaluate(self, predict: Predictor) -> Evaluation:
        return evaluate(predict, self.loader.test(), self.config.target.name, self.processes)

    def _record(self, split: str, **values: float) -> None:
        position = self.position
        self.run_folder.log_metrics(
            {"split": split, "epoch": position.epoch, "step": position.step, **values}
        )
        self.logger.metrics({f"{split}/{name}": value for name, value in values.items()}, position.step)

    def _save(self, name: str) -> None:
        if not self.processes.is_first:
            return
        state = {
            "processes": self.processes.count,
            "sampler": self.loader.sampler,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step.state_dict(),
            "position": dataclasses.asdict(self.position),
        }
        checkpoint.save(self.run_folder.path / name, state, self.config)

    def _restore(self, path: Path, content: dict[str, Any]) -> None:
        self.model.load_state_dict(content["model"])
        checkpoint.load_optimizer(self.optimizer, content["optimizer"])
        checkpoint.restore_random_states(content["random"])
        self.step.load_state_dict(content["step"])
        self.position = position = Position(**content["position"])
        self.run_folder.truncate_metrics(position.step)
        best, own = path.with_name(checkpoint.BEST), self.run_folder.path / checkpoint.BEST
        if self.processes.is_first and best.exists() and best.resolve() != own.resolve():
            shutil.copyfile(best, own)
        drew = content.get("sampler", self.loader.sampler)
        if drew != self.loader.sampler:
            log.warning("so far the %s drew the points; from here on other points are drawn", drew)
        nothing_left = ": nothing is left to train" if position.epoch >= self.config.training.epochs else ""
        log.info("continued from %s, %d of %d steps%s", path, position.step, self.total_steps, nothing_left)

    def _stop(self, stop: StopRequest) -> None:
        self._check_finite()
        self._save(checkpoint.LAST)
        onwards = resume_argument(self.run_folder.path / checkpoint.LAST)
        log.warning("stopped after step %d; continue with %s", self.position.step, onwards)
        raise Stopped(stop.made or signal.SIGTERM)  # none here if another process was asked

    def _log_header(self) -> None:
        config = self.config
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        log.info("network   %s(%s)", type(self.model).__name__, self.model.extra_repr())
        log.info(
            "          %s parameters, %s, %s%s",
            f"{parameters:,}",
            "bfloat16 autocast over float32" if config.training.amp else "float32",
            self.step.mode,
            ", neighbours searched once" if config.projector.kept_neighbors else "",
        )
        log.info(
            "data      %d training and %d test meshes; batches of %s, %d steps an epoch, %d in all",
            len(self.data.train),
            len(self.data.test),
            self._batch_size_text(),
            self.loader.steps_per_epoch,
            self.total_steps,
        )
        if self.loader.shapes_a_step > len(self.data.train):
            log.warning(
                "training.batch_size=%d is more than there are training meshes: each step takes all %d",
                config.training.batch_size,
                len(self.data.train),
            )

    def _batch_size_text(self) -> str:
        size, count = self.config.training.batch_size, self.processes.count
        return str(size) if count == 1 else f"{count} x {size} in {count} processes"

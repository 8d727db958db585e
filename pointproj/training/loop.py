"""The training of a network: preparation, then steps, validations and checkpoints, then the report."""

import dataclasses
import itertools
import logging
import math
import shutil
import signal
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pointproj.config import Config
from pointproj.data.dataset import PreparedData, ShapeDataset, prepare
from pointproj.geometry.meshes import query_grid
from pointproj.machine import environment
from pointproj.ops.functional import knn_aggregate, radius_aggregate
from pointproj.runtime import memory
from pointproj.runtime.compiler import import_compiler
from pointproj.runtime.distributed import SINGLE_PROCESS, StopTogether
from pointproj.runtime.failures import explained_dead_worker
from pointproj.runtime.loggers import MetricLogger, open_logger
from pointproj.runtime.profiling import StepProfiler
from pointproj.runtime.progress_bar import progress
from pointproj.runtime.run_folder import RunFolder, resume_argument
from pointproj.runtime.signals import Stopped, StopRequest
from pointproj.training import checkpoint, report
from pointproj.training.baselines import baselines
from pointproj.training.checkpoint import Continued, Position
from pointproj.training.divergence import DivergenceCheck, Status
from pointproj.training.execution import Execution, choose_execution, new_step
from pointproj.training.field_measures import FieldMeasures
from pointproj.training.loader import BatchLoader
from pointproj.training.networks import take_weights, with_features
from pointproj.training.optimizers import learning_rate, set_learning_rate
from pointproj.training.step import TrainingStep, time_step
from pointproj.training.validation import Evaluation, Predictor, evaluate, untrained_predictor

log = logging.getLogger(__name__)


def train(config: Config, run: RunFolder) -> dict[str, Any]:
    """Train as the config says, write all results to the run's folder, and return ``metrics.json``.

    If a launcher started several processes, each calls this, and they train one model together.

    Raises
    ------
    BackendUnavailable, DeviceError, LoggerUnavailable, CheckpointError
        Before any data is read.
    DataError, MeshError
        While data is prepared.
    TrainingDiverged, OutOfMemory, WorkerDied
        While the network is trained.
    Stopped
        After a signal; then ``last.pt`` has the state after the last step.
    """
    execution = choose_execution(config)
    device, processes = execution.device, execution.processes
    run.write_json("environment.json", {**environment(str(device)), "processes": processes.count})
    continued = checkpoint.find(config, run, processes)
    weights = None
    if continued is None and config.training.weights is not None:
        weights = checkpoint.load_best(Path(config.training.weights))
    logger = open_logger(config, run.path) if processes.is_first else MetricLogger()
    try:
        memory.reset_peak(device)
        last = run.path / checkpoint.LAST
        with memory.explained_out_of_memory(config, device), explained_dead_worker(config.data.workers, last):
            data = prepare(config, processes, str(device), partial(_rehearse, config, execution))
            metrics = Training(config, run, data, execution, logger).fit(continued, weights)
    except BaseException:
        logger.close(failed=True)
        raise
    logger.close()
    return metrics


def _rehearse(config: Config, execution: Execution) -> None:
    """Import modules and build kernels that a first step needs: take one of another network on few points."""
    if config.compile:
        import_compiler()
    eager = execution._replace(capture=False, processes=SINGLE_PROCESS)
    step = new_step(dataclasses.replace(config, compile=False), eager)
    side = math.ceil(config.projector.fewest_points ** (1 / 3)) + 1
    points = torch.from_numpy(query_grid(side)).to(execution.device)[None]
    batch = {"query_points": points, "reference_points": points.clone(), "normals": points}
    batch = with_features({**batch, "target": points[..., 0]}, config.projector)
    normals = bool(config.projector.normals)
    untrained_predictor(config.target.name, execution.backend, normals=normals)(batch)
    step(batch)


class Training:
    """One run: its model, optimizer, data and position."""

    def __init__(
        self, config: Config, run: RunFolder, data: PreparedData, execution: Execution, logger: MetricLogger
    ) -> None:
        self.config, self.run_folder, self.data, self.logger = config, run, data, logger
        self.device, self.backend, _, self.processes = execution
        self.step = new_step(config, execution, data.statistics)
        self.model, self.optimizer = self.step.model, self.step.optimizer
        self.predict = partial(self.step.forward, compiled=False)
        self.loader = BatchLoader(config, data, self.device, self.processes, self.backend)
        self.total_steps = self.loader.steps_per_epoch * config.training.epochs
        self.position = Position()
        self.divergence = DivergenceCheck(config, run.path)
        self.pace = report.Pace()
        self.first_step_ended: float | None = None  # seconds since the epoch, of this process
        self.pending: tuple[Status, float | None] | None = None  # not read; the rate if a line is due
        self.measure = None if data.statistics is None else FieldMeasures(data.statistics)
        self.chooses = self.measure is None or data.validation is not None  # fields: not by test samples
        self.chosen_by = data.test if data.validation is None else data.validation  # decides on best.pt
        candidates = baselines(config, data, self.device, self.backend)
        evaluated = {words: self._evaluate(each, self.chosen_by) for words, each in candidates.items()}
        self.baseline_name = min(evaluated, key=lambda words: evaluated[words].error)
        self.untrained, self.baseline = candidates[self.baseline_name], evaluated[self.baseline_name]

    def fit(self, continued: Continued | None = None, weights: Continued | None = None) -> dict[str, Any]:
        """Train from the beginning, from weights or from a checkpoint; write and return the report."""
        self._log_header()
        if continued is not None:
            with checkpoint.fits(continued[0]):
                self._restore(*continued)
        else:
            self.run_folder.take_metrics(-1)  # drops those of a run killed before its first checkpoint
            if weights is not None:
                log.info("weights   %s", take_weights(self.model, *weights))
            if self.measure is not None and self.processes.is_first and self.config.training.pictures:
                log.info("sample    %s", report.draw_sample(self.run_folder, self.data.train))
            self._validate()
        self._loop()
        return self._write_report()

    def _loop(self) -> None:
        config, position = self.config, self.position
        with ExitStack() as stack:
            stop = stack.enter_context(StopRequest())
            stop_together = stack.enter_context(closing(StopTogether(self.processes)))
            bar = progress("training", self.total_steps, done=position.step, lines=False)
            advance = stack.enter_context(bar)
            # One stream of batches for all epochs, so that its workers sample during validation too.
            stream = stack.enter_context(closing(self.loader.training(position)))
            steps = TrainingStep._take_step, TrainingStep._loss_with_gradients
            timed = *steps, type(self.model).forward, knn_aggregate, radius_aggregate
            profiler = StepProfiler(config.profiler, self.run_folder.path, timed)
            stack.enter_context(closing(profiler))
            while position.epoch < config.training.epochs:
                batches_left = itertools.islice(stream, self.loader.steps_per_epoch - position.step_in_epoch)
                with self.pace.running():
                    for batch in batches_left:
                        self._train_step(batch)
                        profiler.step()
                        advance(1)
                        if stop_together(stop.made is not None):
                            self._stop(stop)
                    self._check_finite()  # waits for the last steps, whose time belongs to this epoch
                position.epoch, position.step_in_epoch = position.epoch + 1, 0
                is_last = position.epoch == config.training.epochs
                if position.epoch % config.training.validate_every == 0 or is_last:
                    self._validate()
                if position.epoch % config.training.checkpoint_every == 0 or is_last:
                    self._save(checkpoint.LAST)

    def _train_step(self, batch: dict[str, Any]) -> None:
        config, position = self.config, self.position
        lr = learning_rate(config.optimizer, position.step, self.total_steps)
        set_learning_rate(self.optimizer, lr)
        self.step(batch)
        if self.first_step_ended is None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.first_step_ended = time.time()
        self._read_status()  # of an earlier step, while the device runs this one
        self.pace.count(self.loader.shapes_of_step(position.step_in_epoch))
        position.step += 1
        position.step_in_epoch += 1
        check_is_due = self.divergence.add(position.step, batch)
        line_is_due = position.step % config.training.log_every == 0 or position.step == self.total_steps
        if check_is_due or line_is_due:
            self.pending = self.step.take_status(), lr if line_is_due else None
            if self.device.type != "cuda":
                self._read_status()

    def _read_status(self) -> None:
        """Read the pending status of an earlier step, if there is one, and act on it."""
        if self.pending is None:
            return
        (status, lr), self.pending = self.pending, None
        position, (loss_sum, not_finite) = self.position, status.read()
        position.loss_sum += loss_sum
        position.loss_steps += status.steps - len(not_finite)
        self.divergence.check(not_finite)
        if lr is None:
            return
        loss = math.nan  # if all these steps were skipped
        if position.loss_steps:
            loss = position.loss_sum / position.loss_steps
            position.losses.append([position.step, loss])
        position.loss_sum, position.loss_steps = 0.0, 0
        pace, peak = self.pace.read(), memory.peak_bytes(self.device)
        report.log_progress(self.config, position, self.total_steps, loss, lr, pace, peak)
        measured = {"ms_per_step": pace.ms_per_step, "samples_per_second": pace.samples_per_second}
        self._record("train", loss=loss, lr=lr, **measured, memory_bytes=peak)

    def _check_finite(self) -> None:
        """Wait for all steps, and act on those that are not finite."""
        self._read_status()
        self.pending = self.step.take_status(), None
        self._read_status()

    def _validate(self) -> None:
        """Measure the model on the validation meshes, and save it if it is the best so far."""
        position = self.position
        evaluation = self._evaluate(self.predict, self.chosen_by)
        error = evaluation.error
        position.errors.append([position.step, error])
        log.info("step %d: validation %s", position.step, report.one_line(evaluation, self.baseline))
        self._record("validation", **evaluation.means())
        if position.step > 0 and error < position.best and self.chooses:
            position.best = error
            self._save(checkpoint.BEST)

    def _evaluate(self, predict: Predictor, dataset: ShapeDataset) -> Evaluation:
        batches = self.loader.unseen(dataset)
        return evaluate(predict, batches, self.config.target.name, self.processes, self.measure)

    def _record(self, split: str, **values: float) -> None:
        position = self.position
        facts = {"split": split, "epoch": position.epoch, "step": position.step}
        self.run_folder.log_metrics({**facts, **values})
        self.logger.metrics({f"{split}/{name}": value for name, value in values.items()}, position.step)

    def _save(self, name: str) -> None:
        if not self.processes.is_first:
            return
        state = {
            "processes": self.processes.count,
            "sampler": self.loader.sampler,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "position": dataclasses.asdict(self.position),
        }
        if self.data.statistics is not None:
            state["statistics"] = self.data.statistics.as_mapping()
        checkpoint.save(self.run_folder.path / name, state, self.config)

    def _restore(self, path: Path, content: dict[str, Any]) -> None:
        self.model.load_state_dict(content["model"])
        checkpoint.load_optimizer(self.optimizer, content["optimizer"])
        checkpoint.restore_random_states(content["random"])
        self.position = position = Position(**content["position"])
        self.run_folder.take_metrics(position.step, path.parent)
        best, own = path.with_name(checkpoint.BEST), self.run_folder.path / checkpoint.BEST
        if self.processes.is_first and best.exists() and best.resolve() != own.resolve():
            shutil.copyfile(best, own)
        drew = content.get("sampler", self.loader.sampler)
        if drew != self.loader.sampler and self.measure is None:  # of fields, both draw the same
            log.warning("so far the %s drew the points; from this step on, other points are drawn", drew)
        before, epochs = content["config"]["training"]["epochs"], self.config.training.epochs
        if before != epochs and checkpoint.rate_depends_on_epochs(content["config"]):
            rate = learning_rate(self.config.optimizer, position.step, self.total_steps)
            words = "the learning rate goes on at %.2g, as if it had been %d from the beginning"
            log.warning(f"training.epochs was %d and is %d: {words}", before, epochs, rate, epochs)
        nothing_left = ": nothing is left to train" if position.epoch >= epochs else ""
        log.info("continued from %s, %d of %d steps%s", path, position.step, self.total_steps, nothing_left)

    def _stop(self, stop: StopRequest) -> None:
        self._check_finite()
        self._save(checkpoint.LAST)
        onwards = resume_argument(self.run_folder.path / checkpoint.LAST)
        log.warning("stopped after step %d; continue with %s", self.position.step, onwards)
        raise Stopped(stop.made or signal.SIGTERM)  # ``made`` is None if another process got the signal

    def _write_report(self) -> dict[str, Any]:
        """Test the model, draw pictures, time the step, write ``metrics.json``, and return its content."""
        config, position, step = self.config, self.position, self.step
        tested, baseline = (self._evaluate(each, self.data.test) for each in (self.predict, self.untrained))
        self.logger.metrics({f"test/{name}": value for name, value in tested.means().items()}, position.step)
        compared = report.comparison(tested, baseline, position.errors[0][1])
        count = len(self.data.test)
        unseen = f"{count} unseen sample{'s' * (count != 1)}"
        test = "the training cloud" if config.data.name == "gaussian" else unseen
        write = report.text if self.measure is None else report.fields_text
        log.info("\n%s", write(compared, config.target.name, test, self.baseline_name))
        if self.processes.is_first and config.training.pictures:
            predict = lambda batch: self.predict(self.loader.on_device(batch))  # noqa: E731
            where = self.run_folder, config, position, self.baseline
            for path in report.draw(*where, self.data.test, predict):
                self.logger.picture(path, position.step)
            if config.logger.name != "none":
                self.logger.cloud(*report.sample_cloud(*where[:2], self.data.test, predict), position.step)
        timed = {}
        if config.training.time_steps:
            timed = time_step(step, next(self.loader.plain()), config.training.time_steps)
            log.info("backend %s, %s, on %s:", self.backend, step.mode, self.device)
            log.info("  forward       %10.3f ms", timed["forward_ms"])
            log.info("  training step %10.3f ms", timed["step_ms"])
        metrics = {
            "status": "ok",
            "backend": self.backend,
            "device": str(self.device),
            "mode": step.mode,
            "neighbors": "kept" if config.projector.kept_neighbors else "searched in each step",
            "processes": self.processes.count,
            "loss": position.losses[-1][1] if position.losses else None,
            **compared,
            "best": position.best,
            "validation": position.errors[-1][1],
            "ms_per_step": self.pace.ms_per_step,
            "first_step_ended": self.first_step_ended,
            **timed,
            "peak_memory_bytes": memory.peak_bytes(self.device),
            "memory": memory.statistics(self.device),
            "steps": position.step,
            "left_out": self.data.left_out,
        }
        self.run_folder.write_json("metrics.json", metrics)
        report.log_end(config.target.name, self.run_folder.path)
        return metrics

    def _log_header(self) -> None:
        config, data, loader = self.config, self.data, self.loader
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        precision = "bfloat16 autocast over float32" if config.training.amp else "float32"
        searched = ", neighbours searched once" if config.projector.kept_neighbors else ""
        log.info("network   %s(%s)", type(self.model).__name__, self.model.extra_repr())
        log.info("          %s parameters, %s, %s%s", f"{parameters:,}", precision, self.step.mode, searched)
        size, count = config.training.batch_size, self.processes.count
        held_out = "no" if data.validation is None else len(data.validation)
        batches = size if count == 1 else f"{count} x {size} in {count} processes"
        log.info(
            f"data      {len(data.train)} training, {held_out} validation and {len(data.test)} test samples; "
            f"batches of {batches}, {loader.steps_per_epoch} steps an epoch, {self.total_steps} in all"
        )
        if data.validation is None:
            taken = "best.pt is chosen by the test samples" if self.chooses else "last.pt is the result"
            log.warning("no training samples are held out: %s", taken)
        if loader.shapes_a_step > len(data.train):
            words = "training.batch_size=%d exceeds the number of training samples: each step takes all %d"
            log.warning(words, size, len(data.train))

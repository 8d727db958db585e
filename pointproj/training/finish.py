"""The end of a run: compare with the baseline, draw, time the step, and write ``metrics.json``."""

import logging
from typing import TYPE_CHECKING, Any

from pointproj.runtime.memory import peak_bytes, statistics
from pointproj.training import report
from pointproj.training.timing import time_step

if TYPE_CHECKING:
    from pointproj.training.loop import Training

log = logging.getLogger(__name__)


def finish(training: "Training") -> dict[str, Any]:
    """Report what a run has come to, on the console and in its folder.

    Parameters
    ----------
    training : Training
        Trained and evaluated.

    Returns
    -------
    dict
        The content of ``metrics.json``.
    """
    config, position, data = training.config, training.position, training.data
    compared = report.comparison(training.evaluation, training.baseline, position.errors[0][1])
    gaussian = config.data.name == "gaussian"
    measured_on = "the training cloud" if gaussian else f"{len(data.test)} unseen meshes"
    log.info("\n%s", report.text(compared, config.target.name, measured_on, bool(config.projector.normals)))
    if training.processes.is_first and config.training.pictures:
        _draw(training)
    timed = _timed(training) if config.training.time_steps else {}
    metrics = {
        "status": "ok",
        "backend": training.backend,
        "device": str(training.device),
        "mode": training.step.mode,
        "neighbors": "kept" if config.projector.kept_neighbors else "searched in each step",
        "processes": training.processes.count,
        "loss": position.losses[-1][1] if position.losses else None,
        **compared,
        "best": position.best,
        "ms_per_step": training.pace.ms_per_step,
        "first_step_ended": training.first_step_ended,
        **timed,
        "peak_memory_bytes": peak_bytes(training.device),
        "memory": statistics(training.device),
        "steps": position.step,
        "left_out": data.left_out,
    }
    training.run_folder.write_json("metrics.json", metrics)
    drawn = "metrics, pictures and checkpoints" if config.training.pictures else "metrics and checkpoints"
    log.info("%s are in %s", drawn, training.run_folder.path)
    return metrics


def _timed(training: "Training") -> dict[str, float]:
    batch = next(training.loader.plain())
    timed = time_step(training.step, batch, training.config.training.time_steps)
    log.info("backend %s, %s, on %s:", training.backend, training.step.mode, training.device)
    log.info("  forward       %10.3f ms", timed["forward_ms"])
    log.info("  training step %10.3f ms", timed["step_ms"])
    return timed


def _draw(training: "Training") -> None:
    from pointproj.training.gallery import draw_run  # matplotlib takes seconds to import

    paths = draw_run(
        training.run_folder,
        training.config,
        losses=training.position.losses,
        errors=training.position.errors,
        baseline=training.baseline,
        test=training.data.test,
        predict=lambda batch: training.predict(training.loader.on_device(batch)),
    )
    for path in paths:
        training.logger.picture(path, training.position.step)

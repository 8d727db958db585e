"""Loggers that record metrics and plots in addition to the run's folder: TensorBoard, MLflow or wandb."""

import dataclasses
import importlib.util
import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from pointproj.config import Config, flat
from pointproj.runtime.errors import first_line

log = logging.getLogger(__name__)

PACKAGES = {
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
}

RETRY_INTERVAL = 30.0  # seconds between attempts to reach a server that is away
WAITS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""How long MLflow itself waits, in seconds, unless the environment says otherwise: its default is minutes."""


class LoggerUnavailable(RuntimeError):  # noqa: N818 - named as BackendUnavailable
    """The requested logger is not installed; the message has the command that installs it."""


class MetricLogger:
    """Interface of the loggers. This class itself records nothing beyond the run's own files."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of one step."""

    def picture(self, path: Path, step: int) -> None:
        """Record a PNG file."""

    def cloud(
        self, path: Path, points: Float[np.ndarray, "n 3"], colours: Float[np.ndarray, "n 3"], step: int
    ) -> None:
        """Record points with colours from 0 to 1, which the binary glTF file ``path`` has too."""

    def close(self, *, failed: bool = False) -> None:
        """Write all buffered data; ``failed`` tells whether the run ended with an error."""


def open_logger(config: Config, folder: Path) -> MetricLogger:
    """Open the logger of a config; it records the whole config as the run's parameters.

    Its files are written to ``folder``, the run's folder, unless the environment variable
    ``MLFLOW_TRACKING_URI`` names another place for MLflow. wandb sends nothing, unless ``WANDB_MODE`` is
    ``online``. Raises LoggerUnavailable if a package is missing, or a server does not answer.
    """
    name = config.logger.name
    if name == "none":
        return MetricLogger()
    missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
    if missing:
        raise LoggerUnavailable(
            f'logger={name} needs {", ".join(missing)}: pip install -e ".[{name}]", or write logger=none'
        )
    loggers = {"tensorboard": TensorBoardLogger, "mlflow": MLflowLogger, "wandb": WandbLogger}
    return loggers[name](config, folder)


class TensorBoardLogger(MetricLogger):
    """Event files for ``tensorboard --logdir outputs``; at the end, the config as hyperparameters."""

    def __init__(self, config: Config, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder / "tensorboard")
        self._config, self._names = flat(dataclasses.asdict(config)), set()
        rows = "\n".join(f"    {key}: {value}" for key, value in self._config.items())
        self._writer.add_text("config", rows)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._names |= {*values}

    def picture(self, path: Path, step: int) -> None:
        from matplotlib.image import imread

        self._writer.add_image(path.stem, imread(path)[..., :3], step, dataformats="HWC")

    def cloud(self, path: Path, points: np.ndarray, colours: np.ndarray, step: int) -> None:
        shown = points.astype(np.float32)[None], np.uint8(255 * colours)[None]
        self._writer.add_mesh(path.stem, *shown, global_step=step)

    def close(self, *, failed: bool = False) -> None:
        from torch.utils.tensorboard.summary import hparams

        plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in self._config.items()}
        for summary in hparams(plain, dict.fromkeys(self._names, 0.0)):  # of metrics only the names
            self._writer.file_writer.add_summary(summary)
        self._writer.close()


class WandbLogger(MetricLogger):
    """A run of Weights & Biases in the project ``pointproj``, offline unless WANDB_MODE says otherwise.

    ``wandb sync`` sends what was written offline.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb

        self._of = wandb
        mode = os.environ.get("WANDB_MODE", "offline")
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        values = flat(dataclasses.asdict(config))
        about: dict[str, Any] = {"project": "pointproj", "name": folder.resolve().name, "config": values}
        try:
            self._run = wandb.init(dir=folder, mode=mode, settings=settings, **about)
        except Exception as error:
            raise LoggerUnavailable(
                f"wandb in the mode {mode} does not work ({first_line(error)}): write WANDB_MODE=offline, or "
                "logger=none"
            ) from error

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def picture(self, path: Path, step: int) -> None:
        self._run.log({path.stem: self._of.Image(str(path))}, step=step)

    def cloud(self, path: Path, points: np.ndarray, colours: np.ndarray, step: int) -> None:
        finite = np.isfinite(points).all(1)  # NaN would make invalid JSON
        values = np.concatenate([points, 255 * colours], 1)[finite]
        self._run.log({f"{path.stem} cloud": self._of.Object3D(values)}, step=step)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class MLflowLogger(MetricLogger):
    """One MLflow run in the experiment ``pointproj``.

    If its server goes away, values are kept and sent again later, and a warning says so: training goes on.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        for name, least in WAITS.items():
            os.environ.setdefault(name, least)
        from mlflow import MlflowClient

        folder = folder.resolve()
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None  # a server decides where files are
        if not uri:
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlflow").as_uri()
        self._uri, self._unsent, self._next_try, self._is_away = uri, deque(), 0.0, False
        try:
            self._client = MlflowClient(tracking_uri=uri)
            experiment = self._client.get_experiment_by_name("pointproj")
            create = self._client.create_experiment
            identity = experiment.experiment_id if experiment else create("pointproj", artifacts)
            self._run = self._client.create_run(identity, run_name=folder.name).info.run_id
            for key, value in flat(dataclasses.asdict(config)).items():
                self._client.log_param(self._run, key, value)
        except Exception as error:
            raise LoggerUnavailable(
                f"MLflow at {uri} does not work ({first_line(error)}): start its server, correct "
                "MLFLOW_TRACKING_URI, or write logger=none"
            ) from error

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        for name, value in values.items():
            self._unsent.append((self._client.log_metric, (self._run, name, value, now, step)))
        self._send()

    def picture(self, path: Path, step: int) -> None:
        self._unsent.append((self._client.log_artifact, (self._run, str(path), "pictures")))
        self._send()

    def cloud(self, path: Path, points: np.ndarray, colours: np.ndarray, step: int) -> None:
        self.picture(path, step)

    def close(self, *, failed: bool = False) -> None:
        status = "FAILED" if failed else "FINISHED"
        self._unsent.append((self._client.set_terminated, (self._run, status)))
        self._next_try = 0.0
        self._send()
        if self._unsent:
            words = "MLflow at %s lacks %d values and files of this run; the run's folder has them all"
            log.warning(words, self._uri, len(self._unsent))

    def _send(self) -> None:
        """Send what is left, in order; after an error, not again before a while has passed."""
        if time.monotonic() < self._next_try:
            return
        try:
            while self._unsent:
                send, arguments = self._unsent[0]
                send(*arguments)
                self._unsent.popleft()
        except Exception as error:  # of any kind: the server, the network or its disk
            self._next_try = time.monotonic() + RETRY_INTERVAL
            if not self._is_away:
                words = "MLflow at %s is away (%s); the run's folder has all values, sending is tried again"
                log.warning(words, self._uri, first_line(error))
            self._is_away = True
        else:
            if self._is_away:
                log.info("MLflow at %s is there again", self._uri)
            self._is_away = False

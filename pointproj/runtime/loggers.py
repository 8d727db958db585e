"""Loggers that record metrics and plots in addition to the run's folder: TensorBoard or MLflow."""

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from pointproj.config import Config, flat

PACKAGES = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}


class LoggerUnavailable(RuntimeError):  # noqa: N818 - named as BackendUnavailable
    """The requested logger is not installed; the message has the command that installs it."""


class MetricLogger:
    """Interface of the loggers. This class itself records nothing beyond the run's own files."""

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Record numbers of one step."""

    def picture(self, path: Path, step: int) -> None:
        """Record a PNG file."""

    def close(self, *, failed: bool = False) -> None:
        """Write all buffered data; ``failed`` tells whether the run ended with an error."""


def open_logger(config: Config, folder: Path) -> MetricLogger:
    """Open the logger of a config; it records the whole config as the run's parameters.

    Its files are written to ``folder``, the run's folder, unless the environment variable
    ``MLFLOW_TRACKING_URI`` names another place for MLflow. Raises LoggerUnavailable if a package is missing.
    """
    name = config.logger.name
    if name == "none":
        return MetricLogger()
    missing = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
    if missing:
        raise LoggerUnavailable(
            f'logger={name} needs {", ".join(missing)}: pip install -e ".[{name}]", or write logger=none'
        )
    return {"tensorboard": TensorBoardLogger, "mlflow": MLflowLogger}[name](config, folder)


class TensorBoardLogger(MetricLogger):
    """Event files for ``tensorboard --logdir outputs``."""

    def __init__(self, config: Config, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder / "tensorboard")
        rows = "\n".join(f"    {key}: {value}" for key, value in flat(dataclasses.asdict(config)).items())
        self._writer.add_text("config", rows)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def picture(self, path: Path, step: int) -> None:
        from matplotlib.image import imread

        self._writer.add_image(path.stem, imread(path)[..., :3], step, dataformats="HWC")

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class MLflowLogger(MetricLogger):
    """One MLflow run in the experiment ``pointproj``."""

    def __init__(self, config: Config, folder: Path) -> None:
        from mlflow import MlflowClient

        folder = folder.resolve()
        uri, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None  # a server decides where files are
        if not uri:
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name("pointproj")
        create = self._client.create_experiment
        identity = experiment.experiment_id if experiment else create("pointproj", artifacts)
        self._run = self._client.create_run(identity, run_name=folder.name).info.run_id
        for key, value in flat(dataclasses.asdict(config)).items():
            self._client.log_param(self._run, key, value)

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def picture(self, path: Path, step: int) -> None:
        self._client.log_artifact(self._run, str(path), "pictures")

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._run, status="FAILED" if failed else "FINISHED")

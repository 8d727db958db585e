"""A tracking server that is away does not end a run."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from pointproj.runtime import loggers
from pointproj.runtime.loggers import LoggerUnavailable, open_logger
from tests.configs import config_of


class Client:
    """Of MLflow, as far as it is used; raises while ``away``."""

    away = False

    def __init__(self, tracking_uri):
        self.sent = []
        Client.last = self

    def __getattr__(self, name):
        def call(*given, **named):
            if Client.away:
                raise ConnectionError("refused\n(many lines)")
            self.sent.append((name, given[1:]))
            return SimpleNamespace(experiment_id="1", info=SimpleNamespace(run_id="r"))

        return call


@pytest.fixture
def config(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(Client, "away", False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    for name in loggers.WAITS:
        monkeypatch.setenv(name, "1")
    return config_of("logger=mlflow")


def test_a_server_that_goes_away_gets_all_values_when_it_is_back(config, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(loggers, "RETRY_INTERVAL", 0.0)
    logger = open_logger(config, tmp_path)
    Client.away = True
    logger.metrics({"loss": 1.0, "error": 2.0}, 1)
    logger.cloud(tmp_path / "a.glb", None, None, 1)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("MLflow at http://server is away (ConnectionError: refused)")
    Client.away = False
    logger.metrics({"loss": 0.5}, 2)
    logger.close()
    sent = [(name, given) for name, given in Client.last.sent if name not in ("log_param", "create_run")][1:]
    metrics = [(given[0], given[1], given[3]) for name, given in sent if name == "log_metric"]
    assert metrics == [("loss", 1.0, 1), ("error", 2.0, 1), ("loss", 0.5, 2)]
    assert [name for name, _ in sent if name != "log_metric"] == ["log_artifact", "set_terminated"]


def test_a_server_that_stays_away_is_not_asked_at_each_step(config, tmp_path, caplog):
    logger = open_logger(config, tmp_path)
    Client.away = True
    logger.metrics({"loss": 1.0}, 1)
    Client.away = False
    before = len(Client.last.sent)
    logger.metrics({"loss": 1.0}, 2)
    assert len(Client.last.sent) == before
    Client.away = True
    logger.close(failed=True)
    assert "lacks 3 values and files of this run" in caplog.text


def test_a_server_that_is_missing_at_the_start_is_one_sentence(config, tmp_path, monkeypatch):
    monkeypatch.setattr(Client, "away", True)
    with pytest.raises(LoggerUnavailable, match=r"MLflow at http://server .*refused.*logger=none") as caught:
        open_logger(config, tmp_path)
    assert "\n" not in str(caught.value)

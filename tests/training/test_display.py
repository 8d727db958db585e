"""The pace of a training, and its progress line."""

import logging

from pointproj.config import Config
from pointproj.runtime.progress_bar import progress
from pointproj.training.checkpoint import Position
from pointproj.training.report import Interval, Pace, log_progress


def test_pace_counts_running_time_alone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    pace = Pace()
    with pace.running():
        now[0] += 2.0
        pace.count(4)
    now[0] += 100.0
    with pace.running():
        now[0] += 1.0
        pace.count(2)
        interval = pace.read()
        assert (interval.ms_per_step, interval.samples_per_second) == (1500.0, 2.0)
        now[0] += 0.5
        pace.count(2)
    assert (pace.read().ms_per_step, pace.ms_per_step) == (500.0, 1000.0)


def test_the_first_step_which_may_compile_does_not_count_for_the_time_left(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    pace = Pace()
    with pace.running():
        for seconds in (30.0, 1.0, 1.0):
            now[0] += seconds
            pace.count(2)
        interval = pace.read()
    assert (round(interval.ms_per_step), interval.expected_ms) == (10667, 1000.0)
    with caplog.at_level(logging.INFO):
        log_progress(Config(), Position(step=3), 20, 0.125, 1e-3, interval, 2**20)
    assert caplog.messages[0].endswith("ETA 0:00:17")


def test_progress_line_holds_everything_and_no_bar_without_a_terminal(caplog, capsys):
    config = Config()
    config.training.epochs = 10
    with caplog.at_level(logging.INFO), progress("training", 20, done=4, lines=False) as advance:
        advance(1)
        position = Position(epoch=2, step=5)
        log_progress(config, position, 20, 0.125, 1e-3, Interval(2000.0, 8.0, 2000.0), 3 * 2**20)
    assert [record.message for record in caplog.records] == [
        "epoch  3/10  25%  loss 0.12500  lr 1.0e-03  2000 ms/step  8 samples/s  3 MiB  ETA 0:00:30"
    ]
    assert capsys.readouterr() == ("", "")

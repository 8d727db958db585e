"""Log lines about the progress of long work."""

import io
import logging
import sys

import pytest

from pointproj.runtime import progress_bar


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [0.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_is_estimated_without_the_start(clock, caplog):
    caplog.set_level(logging.INFO)
    with progress_bar.progress("preparing", 50, unit="meshes") as advance:
        clock[0] = 20.0  # helper processes start
        advance(1)
        for _ in range(9):
            clock[0] += 2.0
            advance(1)
    lines = [record.message for record in caplog.records]
    assert lines[0] == "preparing: 1 of 50 meshes (2%)"
    assert lines[1:] == [
        "preparing: 4 of 50 meshes (8%), 92 s left",
        "preparing: 7 of 50 meshes (14%), 86 s left",
        "preparing: 10 of 50 meshes (20%), 80 s left",
    ]


def test_logs_stand_above_a_bar_and_a_file_gets_what_is_printed(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        with progress_bar.progress("preparing", 5) as advance:
            assert handler.stream is sys.stderr is not terminal
            logging.getLogger().error("left out")
            print("result")
            advance(5)
        assert handler.stream is terminal is sys.stderr
    finally:
        logging.getLogger().removeHandler(handler)
    assert file.getvalue() == "result\n"
    assert "left out" in terminal.getvalue()
    assert "preparing" in terminal.getvalue()

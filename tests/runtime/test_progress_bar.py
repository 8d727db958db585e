"""Log lines about the progress of long work."""

import logging

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

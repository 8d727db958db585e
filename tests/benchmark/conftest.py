"""What all tests of the benchmark need."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row begins with a collection of garbage, which would look through all tests after the first row."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)

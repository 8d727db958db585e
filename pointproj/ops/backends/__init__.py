"""The backends: every module here is one, found by its name."""

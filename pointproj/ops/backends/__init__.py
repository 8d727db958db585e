"""The backends: every module here is one, found by its name."""


class BackendUnavailable(RuntimeError):  # noqa: N818 - a state of the machine, named as users say it
    """The backend that was named cannot run here; the message says why and what to do."""

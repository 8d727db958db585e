"""The error that names what is wrong with a run's data."""


class DataError(ValueError):
    """The data that a run needs is missing or cannot be used; the message says what to do."""

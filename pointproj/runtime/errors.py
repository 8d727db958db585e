"""Errors that pointproj words itself: what a user is shown of them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


def is_worded(error: BaseException) -> bool:
    """Return whether pointproj raised this error itself, with words that need no traceback beside them."""
    package = type(error).__module__.partition(".")[0]
    return package in ("pointproj", "__main__")  # the second is a module of it that was started with -m


@contextmanager
def ending_in_words() -> Iterator[None]:
    """End a program by an error that pointproj worded, or by Ctrl-C, without a traceback; others keep theirs.

    Raises
    ------
    SystemExit
        With the error's words, or 130.
    """
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if is_worded(error):
            sys.exit(f"{type(error).__name__}: {error}")
        raise

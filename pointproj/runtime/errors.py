"""User-facing errors: errors of pointproj itself, whose messages need no traceback."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def is_user_error(error: BaseException) -> bool:
    """Return whether pointproj defines the error's class, so that its message says what to do."""
    return type(error).__module__.partition(".")[0] == "pointproj"


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Exit without a traceback on a user-facing error, or with 130 after Ctrl-C; other errors pass."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if is_user_error(error):
            sys.exit(f"{type(error).__name__}: {error}")
        raise


def print_any_text() -> None:
    """Let standard output and error write characters that their encoding lacks, as ``\\xe9``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message; compilers' messages have pages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

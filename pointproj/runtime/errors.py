"""User-facing errors: errors of pointproj itself, whose messages need no traceback."""

import io
import os
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


@contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Exit with one message if Hydra cannot compose a config, for example of a broken file of the user's own.

    Where HYDRA_FULL_ERROR is set, Hydra's whole traceback is shown.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if "HYDRA_FULL_ERROR" in os.environ:
        yield
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints a traceback and exits
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        key = getattr(error, "full_key", None)
        lines = [
            line
            for line in str(error).splitlines()
            if not line.lstrip().startswith(("full_key:", "object_type="))
        ]
        sys.exit("\n".join([f"this config cannot be composed{f', at {key}' if key else ''}:", *lines]))
    finally:
        del os.environ["HYDRA_FULL_ERROR"]


def print_any_text() -> None:
    """Let standard output and error write characters that their encoding lacks, as ``\\xe9``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message; compilers' messages have pages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

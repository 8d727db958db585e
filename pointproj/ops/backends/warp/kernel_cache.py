"""Where Warp keeps compiled kernels, when the folder that it would take cannot be written."""

import atexit
import functools
import logging
import os
import shutil
import tempfile

log = logging.getLogger(__name__)

VARIABLE = "WARP_CACHE_PATH"  # Warp reads it when it starts


@functools.cache
def obstacle() -> str | None:
    """Why kernels cannot be kept anywhere, or None: without a home they go to a temporary folder.

    To be asked before Warp is imported.
    """
    given = os.environ.get(VARIABLE)
    if _can_be_written(given or _home_of_warp()):
        return None
    if given:
        return f"{VARIABLE} names {given}, which cannot be written: name a folder there that can"
    try:
        folder = tempfile.mkdtemp(prefix="pointproj-warp-")
    except OSError as error:
        return f"its compiled kernels can be written nowhere ({error}): name a folder in {VARIABLE}"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[VARIABLE] = folder  # for helper processes, too
    said = "Warp cannot write to %s: each process compiles its kernels anew; name a folder in %s to keep them"
    log.warning(said, _home_of_warp(), VARIABLE)
    return None


def _home_of_warp() -> str:
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "warp")


def _can_be_written(folder: str) -> bool:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)

"""Which library there is for this machine: the one in the wheel, or one that was built here.

A library lies in a folder of its own, named by a hash of all that it depends on and by its GPU architectures.
It gets its name when it is complete, so a build that was interrupted is begun again. Of several processes
that start together, one builds and the others wait.
"""

import fcntl
import functools
import hashlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pointproj.ops.backends import BackendUnavailable
from pointproj.ops.backends.native import BUILD_AHEAD
from pointproj.ops.backends.native.compiler import (
    AUTOGRAD,
    LIBRARY,
    compile_autograd,
    compile_library,
    compiler_obstacle,
    folder_name,
    serves,
    toolkit_obstacle,
)

log = logging.getLogger(__name__)

IN_THE_WHEEL = Path(__file__).parent / "built"  # setup.py writes there


def obstacle() -> str | None:
    """None if there is a library or one can be built, else a sentence: what is missing, how to get it."""
    if find_build(architectures_here()) is not None:
        return None
    return compiler_obstacle() or (toolkit_obstacle() if architectures_here() else None)


@functools.cache
def extension() -> Any:
    """``torch.ops.pointproj`` with the extension's operators; builds the extension if need be."""
    torch.ops.load_library(find_or_make(architectures_here()) / LIBRARY)
    if _autograd().exists():
        torch.ops.load_library(_autograd())
    return torch.ops.pointproj


def _autograd() -> Path:
    """The library with autograd in C++, if there is one for this version of torch."""
    digest = hashlib.sha256(AUTOGRAD.read_bytes()).hexdigest()[:16]
    return _built_here() / f"autograd-{digest}-torch-{torch.__version__}.so"


def make_autograd() -> None:
    """Build the library with autograd in C++, if there is none; RuntimeError: the compiler fails."""
    if not _autograd().exists():
        made = _autograd().with_suffix(f".{os.getpid()}")
        made.parent.mkdir(parents=True, exist_ok=True)
        compile_autograd(made)
        os.replace(made, _autograd())


def find_or_make(architectures: Sequence[str]) -> Path:
    """The folder of a library for these GPU architectures, which is built if there is none."""
    return find_build(architectures) or make_build(architectures)


def find_build(architectures: Sequence[str]) -> Path | None:
    """The folder of a library that runs on the CPU and on these GPUs, if there is one."""
    folders = (folder for root in (IN_THE_WHEEL, _built_here()) for folder in sorted(root.glob("*-*")))
    return next((folder for folder in folders if serves(folder, architectures)), None)


def make_build(architectures: Sequence[str]) -> Path:
    """Build for these GPU architectures (``"90"`` is sm_90), without any for the CPU only.

    ``BackendUnavailable`` names a missing tool, or says that the compiler fails, and what to do.
    """
    folder = _built_here() / folder_name(architectures)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "process", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it if this process dies
        if not (folder / LIBRARY).exists():
            reason = compiler_obstacle() or (toolkit_obstacle() if architectures else None)
            if reason:
                raise BackendUnavailable(f"backend 'native': {reason}")
            os.replace(_compile(folder, architectures), folder / LIBRARY)
    return folder


def _compile(folder: Path, architectures: Sequence[str]) -> Path:
    devices = ", ".join(["the CPU", *(f"sm_{a}" for a in architectures)])
    log.warning(f"building backend native for {devices}: takes a minute, once (ahead of time: {BUILD_AHEAD})")
    started = time.monotonic()
    made = folder / f"building-{os.getpid()}.so"
    try:
        compile_library(architectures, made)
    except (RuntimeError, OSError) as error:
        raise BackendUnavailable(
            f"backend 'native' does not compile; for all that the compiler says run: {BUILD_AHEAD}\n{error}"
        ) from error
    log.info(f"built backend native in {time.monotonic() - started:.0f} s: {folder}")
    return made


def _built_here() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default) / "pointproj_native"


@functools.cache
def architectures_here() -> tuple[str, ...]:
    """Architectures of the GPUs that torch sees."""
    if not torch.cuda.is_available():
        return ()
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return tuple(f"{major}{minor}" for major, minor in sorted(capabilities))

"""The compiler of ``torch.compile``: its imports, which take seconds, and the processes that help it."""

import importlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
LAZY_MODULES = ("torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd")

_begun: list[threading.Thread] = []


def begin_import(then: Callable[[], None] | None = None) -> None:
    """Begin to import what ``torch.compile`` imports until its first call has ended, in a thread beside this.

    Warp and Triton compile their kernels, and meshes are prepared, without Python's lock: meanwhile the
    thread imports what else would take up to ten seconds.

    Parameters
    ----------
    then : callable, optional
        Called in that thread at its end.
    """
    finish_import()
    thread = threading.Thread(target=_import, args=(then,), name="imports of torch.compile", daemon=True)
    _begun.append(thread)
    thread.start()


def finish_import() -> None:
    """Wait for what :func:`begin_import` began, if it did; to be called before compiling or forking."""
    while _begun:
        _begun.pop().join()


def _import(then: Callable[[], None] | None) -> None:
    for module in LAZY_MODULES:
        with suppress(ImportError):  # the first compilation says what is missing
            importlib.import_module(module)
    if then is not None:
        then()


def choose_compilers(*, few_kernels: bool) -> None:
    """Compile few kernels in this process, and many in helper processes; to be called before compiling.

    The helpers import torch before they compile anything, and a run waits for that at its end, even if it
    found all of its code compiled. The environment variable :data:`THREADS` of a user counts for more.
    """
    if THREADS not in os.environ:
        settings = importlib.import_module("torch._inductor.config")
        settings.compile_threads = 1 if few_kernels else settings.decide_compile_threads()

"""The compiler of ``torch.compile``: its imports, which take seconds, and the processes that help it."""

import importlib
import os

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def import_compiler() -> None:
    """Import what ``torch.compile`` imports until its first call has ended: up to ten seconds."""
    for module in ("torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd"):
        importlib.import_module(module)


def choose_compilers(*, few_kernels: bool) -> None:
    """Compile few kernels in this process, and many in helper processes; to be called before compiling.

    The helpers import torch first, and a run waits for that at its end, even if all of its code was compiled.
    The environment variable :data:`THREADS` of a user counts for more.
    """
    if THREADS not in os.environ:
        settings = importlib.import_module("torch._inductor.config")
        settings.compile_threads = 1 if few_kernels else settings.decide_compile_threads()

"""The compiler of ``torch.compile``: its imports, which take seconds, and its helper processes."""

import importlib
import os

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def import_compiler() -> None:
    """Import the modules that the first call of ``torch.compile`` needs, which takes up to ten seconds."""
    for module in ("torch._dynamo", "torch._inductor.compile_fx", "torch._functorch.aot_autograd"):
        importlib.import_module(module)


def choose_compilers(*, few_kernels: bool) -> None:
    """Choose to compile few kernels in this process, many in helper processes; call this before compilation.

    Helpers begin by importing torch. A run waits for that at its end, even if it needs no helper. If the user
    has set the environment variable :data:`THREADS`, it decides instead.
    """
    if THREADS not in os.environ:
        settings = importlib.import_module("torch._inductor.config")
        settings.compile_threads = 1 if few_kernels else settings.decide_compile_threads()

"""What a run imports while others work, and who compiles for it."""

import os
import time
from functools import partial

import pytest
import torch._inductor.config as settings

from pointproj.runtime import compiler


def test_imports_begin_beside_and_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(compiler, "LAZY_MODULES", ("one", "missing", "other"))

    def slow_import(name: str) -> None:
        time.sleep(0.01)
        if name == "missing":
            raise ImportError(name)
        made.append(name)

    monkeypatch.setattr(compiler.importlib, "import_module", slow_import)
    compiler.finish_import()
    assert not made  # nothing was begun
    compiler.begin_import(partial(made.append, "then"))
    compiler.begin_import()  # by another job of the process
    compiler.finish_import()
    assert made == ["one", "other", "then", "one", "other"]


def test_few_kernels_are_compiled_without_helpers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(compiler.THREADS, raising=False)
    with settings.patch(compile_threads=5):  # monkeypatch would delete the setting at its end
        compiler.choose_compilers(few_kernels=True)
        assert settings.compile_threads == 1
        compiler.choose_compilers(few_kernels=False)
        assert settings.compile_threads == min(32, len(os.sched_getaffinity(0)))
        monkeypatch.setenv(compiler.THREADS, "3")
        compiler.choose_compilers(few_kernels=True)
        assert settings.compile_threads == min(32, len(os.sched_getaffinity(0)))

"""What a run imports while others work, and who compiles for it."""

import os
from functools import partial

import pytest
import torch._inductor.config as settings

from pointproj.runtime import compiler, helpers
from pointproj.runtime.helpers import HelperProcesses


def test_work_of_this_process_begins_once_with_the_helpers_first_jobs():
    called = []
    jobs = {number: partial(abs, -number) for number in range(helpers.FEWEST_JOBS)}
    with HelperProcesses(2, meanwhile=lambda: called.append(True)) as some:
        assert dict(some.results("one", {1: partial(abs, -1)}, "numbers")) == {1: 1}  # one job is done here
        assert not called
        assert dict(some.results("many", jobs, "numbers")) == {number: number for number in jobs}
        assert dict(some.results("again", jobs, "numbers")) == {number: number for number in jobs}
    assert called == [True]


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

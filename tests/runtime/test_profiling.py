"""The profiler around a bounded number of steps, several times in one process."""

import json
import logging
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from pointproj.config import AllocatorConfig, ProfilerConfig
from pointproj.runtime import memory, profiling

SOURCE = """
def work(matrix):
    product = matrix @ matrix
    clipped = product.relu()
    return clipped.sum()
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    (tmp_path / "profiled_module.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "profiled_module", raising=False)
    import profiled_module

    return profiled_module.work


def take_steps(config, folder, work, count):
    profiler = profiling.StepProfiler(config, folder, [work])
    matrix = torch.ones(32, 32, requires_grad=True)
    on = []
    for _ in range(count):
        on.append(profiler.recording is not None)
        work(matrix).backward()
        profiler.step()
    profiler.close()
    assert profiler.recording is None
    return on


def test_without_a_profiler_nothing_happens(tmp_path, work):
    assert not any(take_steps(ProfilerConfig(name="none"), tmp_path / "run", work, 20))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("job", [0, 1])  # the second job of a process finds what the first has left
def test_torch_records_the_steps_asked_for(tmp_path, work, caplog, job):
    caplog.set_level(logging.INFO)
    config = ProfilerConfig(name="torch", skip=2, steps=3)
    on = take_steps(config, tmp_path / "run", work, 8)
    assert on == [False, True, True, True, True, False, False, False]  # one more to warm up
    folder = tmp_path / "run" / "profile" / "torch"
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "MmBackward0" for event in events) == 3
    table = (folder / "cpu_time.txt").read_text()
    assert all(words in table for words in ("aten::mm", "CPU Mem", "FLOPs"))
    assert "[[32, 32], [32, 32]]" in (folder / "by_shape.txt").read_text()
    assert (folder / "gpu_time.txt").exists() == torch.cuda.is_available()
    row = next(line for line in caplog.messages if "aten::mm" in line)
    assert row.split()[2] == "3.0"  # one forward and two backward products a step


def test_columns_of_the_tables_can_be_left_out(tmp_path, work):
    take_steps(ProfilerConfig("torch", 1, 2, shapes=False, memory=False, flops=False), tmp_path, work, 3)
    table = (tmp_path / "profile/torch/cpu_time.txt").read_text()
    assert "aten::mm" in table
    assert not any(words in table for words in ("CPU Mem", "FLOPs"))
    assert not (tmp_path / "profile/torch/by_shape.txt").exists()


def test_nvtx_has_a_range_for_each_step_asked_for(tmp_path, work, monkeypatch):
    done = []
    for module, name in ((torch.cuda.nvtx, "range_push"), (torch.cuda.nvtx, "range_pop")):
        monkeypatch.setattr(module, name, lambda *words, name=name: done.append((name, *words)))
    for name in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, name, lambda name=name: done.append(name))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda **given: nullcontext(given))
    take_steps(ProfilerConfig("nvtx", skip=1, steps=2), tmp_path, work, 5)
    steps = [("range_push", "step"), ("range_pop",)] * 3  # the last is empty
    assert done == ["start", *steps, "stop"]


@pytest.mark.gpu
def test_operators_are_ranges_of_nvtx():
    """Under NVTX, torch's dispatcher sees every operator, which has a range of its name there."""
    ranges = profiling.NvtxRanges(shapes=True)
    assert torch.autograd._profiler_enabled()
    ranges.step()
    ranges.close()
    assert not torch.autograd._profiler_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_nvtx_without_a_gpu_is_refused():
    with pytest.raises(profiling.ProfilerUnavailable, match="needs a GPU"):
        profiling.require_profiler(ProfilerConfig(name="nvtx"))


def test_torch_records_what_there_is_when_training_ends_early(tmp_path, work, caplog):
    take_steps(ProfilerConfig(name="torch", skip=1, steps=50), tmp_path / "run", work, 3)
    assert "only 2 of profiler.steps=50" in caplog.text
    events = json.loads((tmp_path / "run/profile/torch/trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "MmBackward0" for event in events) == 2


@pytest.mark.parametrize("name", ["torch", "line_profile"])
def test_training_that_ends_before_the_recording_says_so(tmp_path, work, caplog, name):
    pytest.importorskip("line_profiler", reason="line_profile needs line_profiler")
    take_steps(ProfilerConfig(name=name, skip=5, steps=2), tmp_path / "run", work, 5)
    assert "nothing recorded, training took 5 steps" in caplog.text
    assert not [path for path in tmp_path.rglob("run/**/*") if path.is_file()]


@pytest.mark.parametrize("name", ["line_profile", "torch"])
def test_line_profile_counts_the_steps_asked_for(tmp_path, work, caplog, name):
    pytest.importorskip("line_profiler", reason="line_profile needs line_profiler")
    caplog.set_level(logging.INFO)
    config = ProfilerConfig(name=name, lines=name == "torch", skip=2, steps=3)
    take_steps(config, tmp_path / "run", work, 8)
    if name == "torch":
        events = json.loads((tmp_path / "run/profile/torch/trace.json").read_text())["traceEvents"]
        assert sum(event.get("name") == "MmBackward0" for event in events) == 3
    table = (tmp_path / "run/profile/line_profiler/profiler_stats.txt").read_text()
    row = next(line for line in table.splitlines() if "matrix @ matrix" in line)
    assert row.split()[:2] == ["3", "3"]  # line 3, three hits
    assert any("product.relu()" in line for line in caplog.messages)


def test_a_missing_line_profiler_is_told_before_training(monkeypatch):
    monkeypatch.setattr(profiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(profiling.ProfilerUnavailable, match=r"pip install 'line_profiler>=5'"):
        profiling.require_profiler(ProfilerConfig(name="line_profile"))
    profiling.require_profiler(ProfilerConfig(name="torch"))


HOST_PEAK = """
import torch
from pointproj.runtime import memory

memory.reset_peak("cpu")
before = memory.peak_bytes("cpu")
tensor = torch.ones(64 * 2**20)
grown = memory.peak_bytes("cpu") - before
assert grown >= 0.5 * tensor.nbytes, (grown, tensor.nbytes)
"""


def test_host_peak_grows_with_what_is_allocated():
    """In a process of its own, started by one that has used more: that one's memory does not count."""
    used = torch.ones(256 * 2**20)
    del used
    subprocess.run([sys.executable, "-c", HOST_PEAK], check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_an_allocator_setting_without_gpu_is_told_to_have_no_effect(caplog):
    memory.configure_allocator(AllocatorConfig(name="torch", expandable_segments=True))
    assert "no effect" in caplog.text
    caplog.clear()
    memory.configure_allocator(AllocatorConfig(name="torch"))
    assert not caplog.text


@pytest.mark.gpu
def test_expandable_segments_are_on_for_the_job_that_asks_and_off_for_the_next():
    def expandable():
        torch.cuda.empty_cache()
        left = max((s["total_size"] for s in torch.cuda.memory_snapshot()), default=0)  # by other tests
        tensor = torch.empty(left + 2**20, dtype=torch.uint8, device="cuda")  # fits into no segment
        start = tensor.data_ptr()
        of = (s for s in torch.cuda.memory_snapshot() if 0 <= start - s["address"] < s["total_size"])
        return next(of)["is_expandable"]

    for asked in (False, True, False):
        memory.configure_allocator(AllocatorConfig(name="torch", expandable_segments=asked))
        assert expandable() == asked


@pytest.mark.gpu
def test_gpu_peak_is_counted_from_the_reset():
    tensor = torch.ones(2**20, device="cuda")
    memory.reset_peak("cuda")
    more = torch.ones(2**22, device="cuda")
    del more
    assert memory.peak_bytes("cuda") >= tensor.nbytes + 2**24

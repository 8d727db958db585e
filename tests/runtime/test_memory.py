"""Who may own GPU memory: RMM takes over once, early and for good, or says in a sentence why it does not."""

import gc
import importlib.util
import json
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from pointproj.config import AllocatorConfig
from pointproj.runtime import graph_memory, memory, rmm_memory
from pointproj.runtime.graph_memory import GraphMemory
from pointproj.runtime.rmm_memory import AllocatorUnavailable
from pointproj.training.execution import may_capture
from tests.configs import config_of
from tests.processes import PROJECT

RMM = AllocatorConfig(name="rmm", resource="pool")

needs_rmm = pytest.mark.skipif(
    rmm_memory.unavailable() is not None, reason=f"allocator=rmm: {rmm_memory.unavailable()}"
)


def run(code: str) -> dict:
    """Run code in a process of its own: RMM can take over once in a process. Its last line is JSON."""
    head = "import json, torch\nfrom pointproj.runtime import memory, rmm_memory\n"
    head += "from pointproj.config import AllocatorConfig\n"
    command = [sys.executable, "-c", head + code]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch):
    """A process whose memory is RMM's, as far as anybody is told."""
    monkeypatch.setattr(rmm_memory, "_owner", rmm_memory._Owner(RMM, None, None))


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu():
    with pytest.raises(AllocatorUnavailable, match=r"allocator=rmm: it manages GPU memory.*allocator=torch"):
        memory.configure_allocator(RMM)
    assert not rmm_memory.in_use()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AllocatorUnavailable, match=r'rmm is missing; .* -e "\.\[rapids-cu13\]"; or write'):
        memory.configure_allocator(RMM)


def test_too_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rmm_memory, "unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AllocatorUnavailable, match="has used the GPU in this process already"):
        memory.configure_allocator(RMM)


def test_several_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rmm_memory, "unavailable", lambda: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(AllocatorUnavailable, match="several processes that train one model"):
        memory.configure_allocator(RMM)


def test_a_later_job_gets_neither_other_values_nor_torchs_memory_nor_a_graph(owned: None):
    memory.configure_allocator(AllocatorConfig(name="rmm", resource="pool"))
    with pytest.raises(AllocatorUnavailable, match="an earlier job of this process set RMM up with other"):
        memory.configure_allocator(AllocatorConfig(name="rmm", resource="async"))
    until = r"allocator=torch: .* made RMM the owner of its GPU memory until it ends"
    with pytest.raises(AllocatorUnavailable, match=until):
        memory.configure_allocator(AllocatorConfig(name="torch"))
    assert "no CUDA graph while RMM owns" in memory.graphs_unsupported()


@pytest.mark.parametrize("fails", [False, True], ids=["captured", "failed"])
def test_pools_take_turns_and_are_deleted_while_none_is_in_use(fails: bool, owned: None, monkeypatch):
    """With stand-ins for torch's functions."""
    used, deleted = [], []

    class Pool:
        def __init__(self, library: str) -> None:
            self.id = (0, library)

        def __del__(self) -> None:
            deleted.append((self.id, [*used]))

    @contextmanager
    def use(pool: Pool):
        used.append(pool.id)
        yield
        used.remove(pool.id)

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(graph_memory, "_pools", None)
    graph_memory.fill_pools("ordinary")
    assert memory.graphs_unsupported() is None
    graph_memory._pools.library = "graph"
    pool = GraphMemory()
    with pool.before_capture():
        assert used == [(0, "graph")]
    with pytest.raises(InterruptedError) if fails else nullcontext(), pool.capture():
        assert used == []
        if fails:
            raise InterruptedError
    del pool
    gc.collect()
    assert (used, deleted) == ([(0, "ordinary")], [])
    memory.empty_cache()
    assert (used, deleted) == ([(0, "ordinary")], [] if fails else [((0, "graph"), [])])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [((), False), (("compile=true",), True), (("compile=true", "backend=cuml"), False)],
)
def test_rmm_makes_way_for_graphs_only_where_a_step_may_be_captured(overrides, expected: bool):
    assert may_capture(config_of(*overrides)) is expected


def test_torch_owns_by_default():
    memory.configure_allocator(AllocatorConfig(name="torch"))
    assert memory.graphs_unsupported() is None
    assert memory.statistics("cpu")["allocator"] == "host"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_run_ends_before_it_reads_data(tmp_path: Path):
    command = [sys.executable, "train.py", "allocator=rmm", "experiment=smoke"]
    command += [f"hydra.run.dir={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}"]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "AllocatorUnavailable: allocator=rmm: it manages GPU memory" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "cache").exists()


@pytest.mark.gpu
@needs_rmm
@pytest.mark.parametrize("resource", ["pool", "async", "arena", "managed"])
def test_all_libraries_draw_from_one_resource(resource: str):
    told = run(f"""
memory.configure_allocator(AllocatorConfig(name="rmm", resource="{resource}", maximum_gib=2.0))
memory.reset_peak("cuda")
told = {{"empty": memory.statistics("cuda")}}
tensor = torch.ones(2**20, device="cuda")
told["torch"] = memory.allocated_bytes("cuda")
import cupy
of_cupy = cupy.ones(2**20, dtype="float32")
told["cupy"] = memory.allocated_bytes("cuda")
import warp as wp
of_warp = wp.ones(2**20, dtype=wp.float32, device="cuda")
told["warp"] = memory.allocated_bytes("cuda")
assert tensor.sum().item() == float(of_cupy.sum()) == float(of_warp.numpy().sum()) == 2**20
del tensor, of_cupy, of_warp
told["end"] = memory.statistics("cuda")
memory.reset_peak("cuda")
told["reset"] = memory.statistics("cuda")
print(json.dumps(told))
""")
    mib = 2**20
    first = told["empty"]["allocated_bytes"]
    assert told["torch"] - first == 4 * mib
    assert told["cupy"] - told["torch"] >= 4 * mib
    assert told["warp"] - told["cupy"] >= 4 * mib
    assert told["end"]["resource"] == resource
    assert told["end"]["peak_bytes"] >= first + 12 * mib
    assert told["reset"]["peak_bytes"] == told["reset"]["allocated_bytes"] < first + 12 * mib
    assert told["end"]["allocations"] > told["reset"]["allocations"] == 0


@pytest.mark.gpu
@needs_rmm
def test_a_maximum_holds():
    told = run("""
memory.configure_allocator(AllocatorConfig(name="rmm", resource="pool", initial_gib=0.1, maximum_gib=0.5))
try:
    torch.ones(2**28, device="cuda")
except Exception as error:
    print(json.dumps({"error": type(error).__name__ + str(error)}))
""")
    assert "memory" in told["error"].lower() or "alloc" in told["error"].lower()


@pytest.mark.gpu
@needs_rmm
def test_torch_that_has_allocated_keeps_its_memory():
    told = run("""
torch.ones(1, device="cuda")
try:
    memory.configure_allocator(AllocatorConfig(name="rmm", resource="pool"))
except rmm_memory.AllocatorUnavailable as error:
    print(json.dumps({"error": str(error), "owns": rmm_memory.in_use()}))
""")
    assert "has used the GPU" in told["error"]
    assert told["owns"] is False


@pytest.mark.gpu
@needs_rmm
@pytest.mark.parametrize("resource", ["pool", "async", "arena", "managed"])
def test_steps_are_captured_in_the_memory_of_every_resource(resource: str):
    told = run(f"""
import gc
from pointproj.runtime.graph_memory import GraphMemory
from pointproj.training.step import CapturedCall
from tests.training.test_step import batches, losses, make_step
memory.configure_allocator(AllocatorConfig("rmm", resource="{resource}", maximum_gib=2.0), captures=True)
memory.reset_peak("cuda")
step, given = make_step("cuda", compile=True, capturable=True), [*batches(24, (3, 3, 2), "cuda")]
told = {{"replayed": losses(step, given), "eager": losses(make_step("cuda"), given), "mode": step.mode}}
told |= {{"reserved": torch.cuda.memory_reserved(), **memory.statistics("cuda")}}
del step
torch.compiler.reset()
gc.collect()
memory.empty_cache()
told["after"] = memory.allocated_bytes("cuda")
try:
    CapturedCall(lambda _: given[0]["target"].sum().item(), {{}}, torch.cuda.Stream(), GraphMemory())
except Exception:
    memory.empty_cache()
    print(json.dumps(told))
""")
    assert told["mode"] == "captured"
    assert told["replayed"] == pytest.approx(told["eager"], rel=1e-4)
    # torch's first capture keeps the state of random numbers outside, in a segment of 2 MiB.
    assert told["reserved"] - told["allocated_bytes"] in (0, 2 * 2**20)
    assert told["peak_bytes"] >= told["allocated_bytes"] > told["after"] > 0
    assert 0 < told["torch_peak_bytes"] < told["peak_bytes"]


@pytest.mark.gpu
@needs_rmm
@pytest.mark.parametrize(
    ("backend", "mode"), [("torch", "captured"), ("warp", "captured"), ("cuml", "compiled")]
)
def test_a_run_captures_what_does_not_wait(backend: str, mode: str, tmp_path: Path):
    folder = tmp_path / "run"
    command = [sys.executable, "train.py", "allocator=rmm", "compile=true", "device=cuda", "data=gaussian"]
    command += ["target=random", "data.points=500", "data.grid=8", "training.epochs=6"]
    command += ["training.batch_size=1", f"backend={backend}", f"hydra.run.dir={folder}"]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (metrics["mode"], metrics["backend"]) == (mode, backend)
    assert metrics["memory"]["allocator"] == "rmm"
    assert metrics["memory"]["peak_bytes"] == metrics["peak_memory_bytes"] > 0
    log = (folder / "train.log").read_text()
    assert ("captures no CUDA graph of the step: cuML waits" in log) is (mode == "compiled")

"""Building the native backend, and what its operators refuse."""

import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pointproj.ops import registry
from pointproj.ops.backends import BackendUnavailable
from pointproj.ops.backends.native import build, compiler
from pointproj.ops.registry import load
from pointproj.ops.specification.reference import DEFAULT

ROOT = Path(__file__).parents[2]


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, a clone, and no GPU."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(build, "IN_THE_WHEEL", tmp_path / "wheel")
    monkeypatch.setattr(build, "architectures_here", lambda: ())
    return tmp_path


def _tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_without_a_compiler(nothing_built: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.obstacle() == (
        "the C++ compiler no-such-compiler is missing; install one with: apt-get install g++"
    )
    with pytest.raises(BackendUnavailable, match=r"backend 'native': the C\+\+ compiler no-such-compiler is"):
        build.make_build(())


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "release 11.8, V11.8.89",
            "is 11.8, but this torch needs CUDA 12 or 13; install it with: apt-get install",
        ),
        ("release 14.0, V14.0.1", "is 14.0, but this torch needs CUDA 12 or 13"),
        ("nonsense", "is of unknown version, but this torch needs CUDA 12 or 13"),
        (
            None,
            r"the CUDA toolkit 13.0 \(nvcc\) is missing; install it with: apt-get install cuda-toolkit-13-0",
        ),
        ("release 13.2, V13.2.1", None),
        ("release 12.4, V12.4.131", None),
    ],
    ids=["too-old", "newer-than-torch", "no-version", "missing", "suitable", "older-than-torch"],
)
def test_cuda_toolkit(said: str | None, reason: str | None, nothing_built: Path, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "architectures_here", lambda: ("90",))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(compiler.shutil, "which", _which(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if said is not None:
        _tool(tmp_path / "bin", "nvcc", f"echo {said}")
    if reason is None:
        assert build.obstacle() is None
    else:
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(build.obstacle())


def _which(folder: Path) -> Callable[..., str | None]:
    """Finds an nvcc in the folder alone, and every other tool."""

    def which(name: str, path: str | None = None) -> str | None:
        tool = folder / name
        return (str(tool) if tool.exists() else None) if name == "nvcc" else f"/usr/bin/{name}"

    return which


def test_compiler_that_fails(nothing_built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _tool(tmp_path / "bin", "broken-c++", "echo 'no space left on device'; exit 1")
    monkeypatch.setenv("CXX", str(tmp_path / "bin" / "broken-c++"))
    with pytest.raises(
        BackendUnavailable, match="does not compile; for all that the compiler says run: python"
    ):
        build.make_build(())
    assert build.find_build(()) is None


def test_build_that_was_interrupted_is_begun_again(nothing_built: Path, monkeypatch: pytest.MonkeyPatch):
    begun = []

    def interrupted(folder: Path, architectures: tuple[str, ...]) -> Path:
        begun.append(folder)
        library = _library(folder, architectures)
        if len(begun) == 1:
            raise KeyboardInterrupt
        return library

    monkeypatch.setattr(build, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build.make_build(())
    assert build.find_build(()) is None
    assert build.make_build(()) == build.find_build(()) == begun[1]
    build.make_build(())
    assert len(begun) == 2


def _library(folder: Path, architectures: tuple[str, ...]) -> Path:
    """What the compiler leaves behind."""
    (folder / "building.so").touch()
    return folder / "building.so"


def _build_slowly(folder: str) -> None:
    os.environ["TORCH_EXTENSIONS_DIR"] = folder

    def slow(made: Path, architectures: tuple[str, ...]) -> Path:
        with open(Path(folder) / "begun", "a") as log:
            log.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        return _library(made, architectures)

    build._compile = slow
    assert build.make_build(()) == build.find_build(())


def test_several_processes_build_once(nothing_built: Path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_build_slowly, args=(str(nothing_built),)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len((nothing_built / "begun").read_text().split()) == 1


def test_a_build_serves_the_architectures_it_holds(nothing_built: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "_compile", _library)
    monkeypatch.setattr(build, "toolkit_obstacle", lambda: None)
    both = build.make_build(("80", "90"))
    for here in ((), ("80",), ("86",), ("80", "90")):
        assert build.find_build(here) == both
    for here in (("75",), ("100",), ("90", "100")):
        assert build.find_build(here) is None
    packed = nothing_built / "wheel" / compiler.folder_name(("80", "90+PTX"))
    packed.mkdir(parents=True)
    assert build.find_build(("100",)) is None
    (packed / compiler.LIBRARY).touch()
    for here in ((), ("80",), ("89",), ("90",), ("100", "121")):
        assert build.find_build(here) == packed
    assert build.find_build(("75",)) is None


def test_a_build_of_other_sources_is_not_taken(nothing_built: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "_compile", _library)
    built = build.make_build(())
    built.rename(built.with_name("0" * 16 + "-cpu"))
    assert build.find_build(()) is None


def test_auto_does_not_begin_a_build_but_says_how(nothing_built: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "obstacle", lambda: None)
    registry.resolve.cache_clear()
    name, why = registry.resolve("auto", "cpu", "radius")
    registry.resolve.cache_clear()
    assert name == "warp"
    assert "native: faster here, once it is built; build it with: python -m pointproj build-native" in why
    assert not list(nothing_built.iterdir())


def test_auto_takes_what_is_built(nothing_built: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "_compile", _library)
    build.make_build(())
    registry.resolve.cache_clear()
    assert registry.resolve("auto", "cpu", "knn")[0] == "native"
    registry.resolve.cache_clear()


def test_what_is_built_needs_no_compiler(tmp_path: Path):
    """Another process loads what this one has built, with no tool in its path."""
    native = load("native")
    if native.unavailable():
        pytest.skip(native.unavailable())
    build.extension()
    program = (
        "import torch, pointproj\n"
        "assert pointproj.backends()['native'] is None\n"
        "print(pointproj.knn(torch.zeros(1, 3), torch.eye(3), 2, backend='native')[1].tolist())\n"
    )
    environment = os.environ | {"PATH": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "[[0, 1]]\n", done.stderr


def test_command_line_names_what_is_there():
    if load("native").unavailable():
        pytest.skip(load("native").unavailable())
    command = [sys.executable, "-m", "pointproj", "build-native"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / compiler.LIBRARY).exists()
    done = subprocess.run([*command, "--arch", "hopper"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "expected an architecture such as 9.0; got 'hopper'" in done.stderr


def test_autograd_in_cpp_gives_both_derivatives():
    """A process that finds the library, which needs a new one: torch keeps what it has loaded."""
    if load("native").unavailable():
        pytest.skip(load("native").unavailable())
    build.make_autograd()
    program = """
import torch, pointproj
sizes = ((9, 3), (33, 3), (33, 5), ())
query, *others = [torch.rand(s).double() for s in sizes]
query = torch.complex(query, -query).conj().imag  # memory holds other numbers
inputs = query, points, features, sigma = [t.requires_grad_() for t in (query, *others)]
for operator, size in ((pointproj.knn_aggregate, 7), (pointproj.radius_aggregate, 0.4)):
    made = []
    for backend in ("native", "torch"):
        out = operator(query, points, features, size, sigma=sigma, backend=backend)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), inputs)
        made.append((out, *first, *second))
    torch.testing.assert_close(*made)
    print(type(made[0][0].grad_fn).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == ["CppFunction"] * 2, done.stderr


@pytest.mark.slow
def test_kernels_compile_for_ampere_and_hopper(tmp_path: Path):
    nvcc = compiler.find_nvcc()
    if nvcc is None:
        pytest.skip("no nvcc here")
    sources = sorted(compiler.SOURCES.glob("*.cu"))
    differing = {path.stem for path in compiler.SOURCES.glob("*.h") if "__CUDA_ARCH__" in path.read_text()}
    assert differing < {source.stem for source in sources}

    unoptimised = ["-O0", "-Xcicc", "-O0", "-Xptxas", "-O0"]

    def started(source: Path) -> subprocess.Popen:
        # The assembler takes most of the time: it is for code that differs between architectures.
        whole = "-c", *compiler.cuda_flags(("80", "90"))
        kernels = "-ptx", *compiler.cuda_flags(("80+PTX",))
        flags = [flag for flag in (whole if source.stem in differing else kernels) if flag != "-O3"]
        command = [nvcc, *compiler.HEADERS, *unoptimised, *flags, str(source)]
        command += ["-o", str(tmp_path / source.stem)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    running = {source.name: started(source) for source in sources}
    for name, process in running.items():
        _, said = process.communicate()
        assert process.returncode == 0, f"{name}: {said}"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf here")
def test_any_torch_and_python_can_load_it():
    """It needs C functions of torch alone, and nothing of Python's or of CUDA's runtime."""
    _operators()
    library = build.find_build(()) / compiler.LIBRARY
    said = subprocess.run(["readelf", "-dW", library], capture_output=True, text=True, check=True).stdout
    needed = {name.split(".so")[0] for name in re.findall(r"NEEDED.*\[(.*)\]", said)}
    assert "libtorch" in needed
    assert not any(name.startswith(("libc10", "libcudart", "libpython")) for name in needed)
    said = subprocess.run(["readelf", "-sW", library], capture_output=True, text=True, check=True).stdout
    undefined = {line.split()[-1] for line in said.splitlines() if " UND " in line and "@" not in line}
    # Some builds of torch export functions of the C++ library, whose mangled names begin so.
    undefined = {name for name in undefined if not re.match("_ZN?K?R?S", name)}
    of_torch = {name for name in undefined if "torch" in name or "c10" in name or name.startswith("_Z")}
    assert of_torch
    assert {name for name in of_torch if not name.startswith(("aoti_torch_", "torch_"))} == set()


POINTS = torch.rand(9, 3)


def _operators() -> Any:
    if load("native").unavailable():
        pytest.skip(load("native").unavailable())
    return build.extension()


def _search(**changes: Any) -> Tensor:
    operators = _operators()
    given = {"points": POINTS, "offsets": None, "clouds": 1, "table": None, "k": 2} | changes
    references = POINTS, given["offsets"], given["clouds"], given["table"], math.inf, given["k"]
    return operators.native_knn(given["points"], given["offsets"], *references, False)


def _within(**changes: Any) -> Tensor:
    operators = _operators()
    given = {"features": torch.rand(9, 4), "sigma": torch.tensor(0.1), "radius": 0.3, "table": None} | changes
    weighting = DEFAULT._replace(**{n: v for n, v in changes.items() if n in DEFAULT._fields})
    summands = given["features"], given["sigma"], *weighting
    last = given["table"], given["radius"]
    return operators.native_radius_aggregate(POINTS, None, POINTS, None, 1, *summands, False, *last)


def _within_backward(**changes: Any) -> Tensor:
    operators = _operators()
    features, sigma = torch.rand(9, 4), torch.tensor(0.1)
    inputs = POINTS, None, POINTS, None, 1, features, sigma, *DEFAULT, False, None, 0.3
    names = "aggregated", "saved", "grids"
    made = dict(zip(names, operators.native_radius_aggregate(*inputs), strict=True))
    given = {"grad": torch.rand(9, 4), "needs": [True] * 4} | made | changes
    outputs = (given[name] for name in names)
    return operators.native_radius_aggregate_backward(given["grad"], given["needs"], *inputs, *outputs)


def _index(**changes: Any) -> Tensor:
    given = {"points": POINTS, "radius": None, "largest": None} | changes
    last = given["radius"], given["largest"]
    return _operators().native_build_index(given["points"], None, 1, *last, False)


def _list(**changes: Any) -> Tensor:
    operators = _operators()
    given = {"points": POINTS, "table": None, "radius": 0.3, "radii": None, "capacity": 5} | changes
    last = given["table"], given["radius"], given["radii"], given["capacity"]
    return operators.native_radius_list(given["points"], None, POINTS, None, 1, *last)


def _nearest_within(k: int) -> Tensor:
    return _operators().native_radius_search(POINTS, None, POINTS, None, 1, None, None, 0.3, None, k)


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (_search, {"points": torch.rand(9, 2)}, r"query_points must have shape \(n, 3\); got \[9, 2\]"),
        (_search, {"points": torch.rand(9, 3).half()}, "query_points must be float32 or float64; got Half"),
        (_search, {"points": torch.rand(3, 9).T}, "query_points must be contiguous"),
        (_search, {"points": torch.rand(9, 3).double()}, "reference_points must be Double; got Float"),
        (_search, {"clouds": 2}, "of equal size; got 9 points in 2 clouds"),
        (_search, {"offsets": torch.tensor([0, 9])}, "offsets must be Int; got Long"),
        (_search, {"offsets": torch.tensor([0, 4, 9]).int()}, r"offsets must have shape \[2\]; got \[3\]"),
        (_search, {"k": 0}, "k must be from 1 to the number of reference points, 9; got 0"),
        (_search, {"k": 10}, "k must be from 1 to the number of reference points, 9; got 10"),
        (_search, {"table": POINTS}, r"cell_list must have shape \[\d+\]; got \[9, 3\]"),
        (_search, {"table": torch.rand(172)}, "cell_list must be Int; got Float"),
        (_within, {"table": POINTS}, r"reference_grid must have shape \[\d+\]; got \[9, 3\]"),
        (_within, {"features": torch.rand(8, 4)}, r"features must have shape \[9, 4\]; got \[8, 4\]"),
        (_within, {"features": torch.rand(9, 4).half()}, "features must be float32 or float64, and as wide"),
        (_within, {"features": torch.rand(9, 0)}, r"features must have shape \(n, channels\); got \[9, 0\]"),
        (_within, {"sigma": torch.ones(9)}, r"sigma must have shape \[\]; got \[9\]"),
        (_within, {"radius": 0.0}, "radius must be positive and finite; got 0"),
        (_within, {"radius": float("nan")}, "radius must be positive and finite; got nan"),
        (_within, {"kernel": "cubic"}, "kernel must be one of exponential, .*; got cubic"),
        (_within, {"reduce": "max"}, "reduce must be one of mean, sum, weighted; got max"),
        (_list, {"points": torch.rand(9, 2)}, r"query_points must have shape \(n, 3\); got \[9, 2\]"),
        (_list, {"radius": 0.0}, "radius must be positive and finite; got 0"),
        (_list, {"radii": torch.rand(8)}, r"radii must have shape \[9\]; got \[8\]"),
        (_list, {"radii": torch.rand(9).double()}, "radii must be Float; got Double"),
        (_list, {"table": POINTS}, r"reference_grid must have shape \[\d+\]; got \[9, 3\]"),
        (_list, {"capacity": -1}, "capacity must not be negative; got -1"),
        (_nearest_within, {"k": 0}, "k must be positive; got 0"),
        (_index, {"points": torch.rand(9, 2)}, r"points must have shape \(n, 3\); got \[9, 2\]"),
        (_index, {"radius": 0.0}, "radius must be positive and finite; got 0"),
        (_index, {"largest": torch.ones(9)}, r"largest_radius must have shape \[\]; got \[9\]"),
        (_within_backward, {"grad": torch.rand(9, 3)}, r"grad must have shape \[9, 4\]; got \[9, 3\]"),
        (_within_backward, {"needs": [True] * 3}, "needs must have 4 elements, one for each gradient; got 3"),
        (_within_backward, {"saved": torch.rand(9, 4)}, r"saved must have shape \[9, 2\]; got \[9, 4\]"),
        (_within_backward, {"grids": torch.rand(4)}, r"grids must have shape \[\d+\]; got \[4\]"),
    ],
)
def test_operators_check_their_arguments(call: Callable[..., Tensor], changes: dict, message: str):
    """Whoever calls them without the public functions gets an error, not a crash."""
    with pytest.raises(RuntimeError, match=message):
        call(**changes)

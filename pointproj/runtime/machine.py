"""What the results were measured on: device, driver, versions, commit and date."""

import os
import platform
import re
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import torch

from pointproj.runtime.run_folder import environment
from pointproj.runtime.versions import installed_version

COMMIT_VARIABLE = "POINTPROJ_COMMIT"  # names the commit where the code runs outside of a checkout


def machine_columns(device: torch.device) -> dict[str, str]:
    """The columns of a row that say where and with what it was measured."""
    versions = environment()["versions"]
    return {
        "device": device_name(device),
        "driver": driver_version() if device.type == "cuda" else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "warp": versions["warp-lang"] or "",
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's with the number of threads that torch uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()} CPU, {torch.get_num_threads()} threads"


def slug(name: str) -> str:
    """``name`` as a part of a file's name: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def package_version(package: str) -> str:
    """``"package version"``, or the bare name where no version is known."""
    version = installed_version(package)
    return package if version is None else f"{package} {version}"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def driver_version() -> str:
    """Version of the GPU's driver; nvidia-smi only reads here."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return answer.stdout.split("\n")[0].strip() or "unknown"


def _commit() -> str:
    state = environment()["git"]
    if state is None:
        return os.environ.get(COMMIT_VARIABLE, "unknown")
    return state["commit"][:12] + ("-dirty" if state["dirty"] else "")

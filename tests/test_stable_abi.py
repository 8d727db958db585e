"""One library serves every torch: it calls nothing of torch but the functions of its stable C interface."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from pointproj.ops.backends.native.build import architectures_here, find_or_make
from pointproj.ops.backends.native.compiler import LIBRARY

AOTI = "torch/csrc/inductor/aoti_torch"
STABLE = ("torch/csrc/stable/c/shim.h", f"{AOTI}/c/shim.h", f"{AOTI}/generated/c_shim_aten.h")
SYSTEM = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_")  # versioned: libc, libm, libstdc++, libgcc
HOOKS = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__cxa_finalize"}


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm of the binutils is not installed")
def test_undefined_symbols_are_torchs_stable_functions():
    library = find_or_make(architectures_here()) / LIBRARY
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    of_torch = {name for name in names if not SYSTEM.search(name)} - HOOKS
    headers = "\n".join((Path(torch.__file__).parent / "include" / name).read_text() for name in STABLE)
    assert of_torch
    assert {name for name in of_torch if not re.search(rf"\b{name}\(", headers)} == set()

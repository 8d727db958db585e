"""Compiling ``csrc`` to one library; also for setup.py, so it imports torch and nothing of this package.

The library uses torch's stable ABI and contains CUDA's runtime: one build serves every Python, and every
torch from 2.10 on.
"""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "pointproj_native.so"
AUTOGRAD = Path(__file__).parent / "autograd.cpp"
_TORCH = Path(torch.__file__).parent
# The oldest torch that a library is for: 2.10.
HEADERS = ["-std=c++20", "-isystem", str(_TORCH / "include"), "-DTORCH_TARGET_VERSION=0x020a000000000000"]
OLDEST_CUDA = 12  # C++20
# Of a wheel: A100 and GPUs of its major version, H100 and H200, and Blackwell where the compiler knows it.
WHEEL_GPUS = ("80", "90", "100", "120")
PTX = "+PTX"  # marks an architecture whose assembly is included: it runs on every newer GPU too
WHEEL_PTX = "90" + PTX


def compile_library(architectures: Sequence[str], out: Path) -> None:
    """Compile every file of ``csrc`` for the CPU, and again for GPUs, in parallel, to the library ``out``.

    The architecture ``"90"`` means machine code for sm_90, ``"90+PTX"`` assembly for sm_90 and newer ones.
    Without any, the library is for the CPU only. ``RuntimeError`` has the output of a compiler that fails.
    """
    compilers = [[host_compiler(), *cpp_flags()]]
    if architectures:
        compilers.append([find_nvcc(), "-ccbin", host_compiler(), *cuda_flags(architectures)])
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects, running = [], []
        for source in sorted(SOURCES.glob("*.cu")):
            for number, compiler in enumerate(compilers):
                objects.append(f"{folder}/{source.stem}{number}.o")
                running.append(pool.submit(_run, [*compiler, *HEADERS, "-c", str(source), "-o", objects[-1]]))
        for made in running:
            made.result()
        # The C++ library first: libtorch of torch 2.10 exports some functions of it, without their versions.
        link = ["-shared", *objects, f"-L{_TORCH / 'lib'}", "-lstdc++", "-ltorch", "-o", str(out)]
        # libtorch brings in all libraries of torch; the functions of CUDA's runtime are not exported.
        hide = ["--no-as-needed", "--exclude-libs", "ALL"]
        if architectures:
            _run([find_nvcc(), "-cudart", "static", *(x for h in hide for x in ("-Xlinker", h)), *link])
        else:
            _run([host_compiler(), f"-Wl,{','.join(hide)}", *link])


def compile_autograd(out: Path) -> None:
    """Compile the library with autograd in C++, which only this version of torch can load."""
    include = _TORCH / "include"
    headers = ["-std=c++20", "-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
    flags = ["-O2", "-fvisibility=hidden", "-fPIC", "-shared"]
    link = [f"-L{_TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    _run([host_compiler(), *headers, *flags, str(AUTOGRAD), "-o", str(out), *link])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}")


def cpp_flags() -> list[str]:
    """Flags of the part for the CPU."""
    # Distances are rounded after every operation, as those of the reference are.
    flags = ["-x", "c++", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-fPIC"]
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        flags.append("-march=x86-64-v3")
    return flags


def cuda_flags(architectures: Sequence[str]) -> list[str]:
    """Flags of the part for GPUs."""
    flags = ["-O3", "-fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
    for architecture in architectures:
        number = architecture.removesuffix(PTX)
        kind = "compute" if architecture.endswith(PTX) else "sm"
        flags.append(f"-gencode=arch=compute_{number},code={kind}_{number}")
    return flags


def folder_name(architectures: Sequence[str]) -> str:
    """Name of a library's folder: a hash of all that it depends on, then its GPU architectures."""
    return "-".join((_fingerprint(), *(architectures or ("cpu",))))


def architectures_in(folder: str) -> tuple[str, ...]:
    """GPU architectures in a folder's name."""
    return tuple(part for part in folder.split("-")[1:] if part != "cpu")


def serves(folder: Path, architectures: Sequence[str]) -> bool:
    """Whether the library in a folder is built from the sources here and runs on all these GPUs.

    Machine code runs on its GPU and on newer ones of the same major version, assembly on all newer ones.
    """
    if not folder.name.startswith(f"{_fingerprint()}-") or not (folder / LIBRARY).exists():
        return False
    return all(any(_runs(code, gpu) for code in architectures_in(folder.name)) for gpu in architectures)


def _runs(code: str, gpu: str) -> bool:
    number = code.removesuffix(PTX)
    return int(number) <= int(gpu) and (code.endswith(PTX) or number[:-1] == gpu[:-1])


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\n".join([sysconfig.get_platform(), *cpp_flags(), *cuda_flags(())]).encode())
    return digest.hexdigest()[:16]


def wheel_architectures() -> tuple[str, ...]:
    """Architectures of a wheel: the data-centre GPUs that the compiler here knows; ``()`` without one."""
    if toolkit_version() is None:
        return ()
    said = subprocess.run([find_nvcc(), "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    return (*(gpu for gpu in WHEEL_GPUS if f"sm_{gpu}" in said.split()), WHEEL_PTX)


def host_compiler() -> str:
    """The C++ compiler of a build."""
    return os.environ.get("CXX", "c++")


def compiler_obstacle() -> str | None:
    """None if there is a C++ compiler, else a sentence."""
    if shutil.which(host_compiler()):
        return None
    return f"the C++ compiler {host_compiler()} is missing; install one with: apt-get install g++"


def find_nvcc() -> str | None:
    """The CUDA compiler of a build: that of CUDA_HOME, in the path, or at its usual place."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def toolkit_version() -> tuple[int, int] | None:
    """Version of the CUDA compiler, ``(0, 0)`` if it does not print one; None without a compiler."""
    nvcc = find_nvcc()
    if nvcc is None:
        return None
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def toolkit_obstacle() -> str | None:
    """None if there is a CUDA compiler whose code runs wherever this torch does, else a sentence."""
    wanted = torch.version.cuda
    if wanted is None:
        return "this torch is built without CUDA; install one that is: https://pytorch.org/get-started"
    newest, found = int(wanted.split(".")[0]), toolkit_version()
    package = f"cuda-toolkit-{wanted.replace('.', '-')}"
    mend = f"install it with: apt-get install {package}, or set CUDA_HOME to where it is"
    if found is None:
        return f"the CUDA toolkit {wanted} (nvcc) is missing; {mend}"
    if not OLDEST_CUDA <= found[0] <= newest:  # a driver that runs this torch runs older CUDA too
        version = "of unknown version" if found == (0, 0) else f"{found[0]}.{found[1]}"
        fitting = " or ".join(str(major) for major in range(OLDEST_CUDA, newest + 1))
        return f"{find_nvcc()} is {version}, but this torch needs CUDA {fitting}; {mend}"
    return None

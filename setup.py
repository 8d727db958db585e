"""Compiles the library of the backend native into a wheel; all else about the package is in pyproject.toml.

The environment that builds the wheel needs torch and a C++ compiler (``--no-build-isolation``), and for GPUs
the nvcc of ``CUDA_HOME``. Without torch or compiler, the wheel has no library; without nvcc, none for GPUs.
"""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("pointproj/ops/backends/native")


def _compiler() -> ModuleType:
    """Return the module native/compiler.py, imported without importing pointproj."""
    spec = importlib.util.spec_from_file_location("compiler", NATIVE / "compiler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _obstacle() -> str | None:
    """Return None if the library can be compiled here, else why not."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not in the environment that builds the wheel (pip install --no-build-isolation)"
    return _compiler().compiler_obstacle()


OBSTACLE = _obstacle()


class BuildPy(build_py):
    """Compiles the library into the build folder, except for an editable installation."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        if OBSTACLE:
            print(f"pointproj: native is not compiled into this wheel, all else is as usual: {OBSTACLE}")
            return
        compiler = _compiler()
        architectures = compiler.wheel_architectures()
        built = Path(self.build_lib) / NATIVE / "built"
        shutil.rmtree(built, ignore_errors=True)
        folder = built / compiler.folder_name(architectures)
        folder.mkdir(parents=True)
        without = "" if architectures else " alone: there is no nvcc"
        print(f"pointproj: compiling native for the CPU{', '.join(('', *architectures))}{without}")
        compiler.compile_library(architectures, folder / compiler.LIBRARY)


class BinaryDistribution(Distribution):
    """A distribution for one platform, if it has the library."""

    def has_ext_modules(self) -> bool:
        return OBSTACLE is None


class BdistWheel(bdist_wheel):
    """A wheel for any version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=BinaryDistribution, cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})

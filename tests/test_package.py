"""What is published: a wheel of the library alone, whose modules need nothing that it does not bring."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import find_packages

import pointproj
from pointproj.__main__ import APPLICATION, LIBRARY, main
from pointproj.doctor import APPLICATION_PACKAGES

PROJECT = Path(__file__).resolve().parent.parent
CONFIG = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = CONFIG["project"]["optional-dependencies"]
IMPORT_NAMES = {"warp-lang": "warp"}  # where it is not the name of the package
OPTIONAL = {  # modules that alone may import a package
    "triton": ("pointproj.ops.backends.triton", "pointproj.ops.bridge.triton_op", "pointproj.nn.narrow_mlp"),
    "physicsnemo": ("pointproj.nn.physicsnemo",),
}
NATIVE = PROJECT / "pointproj/ops/backends/native"
NATIVE_SOURCES = [*(NATIVE / "csrc").iterdir(), NATIVE / "autograd.cpp"]
CONTRACTS = {c["name"]: c for c in CONFIG["tool"]["importlinter"]["contracts"]}
CONTRACT = CONTRACTS["The library never imports the application"]
APPLICATION_FOLDERS = {folder.removeprefix("pointproj.") for folder in CONTRACT["forbidden_modules"]}


def _names(requirements: list[str]) -> list[str]:
    return [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]


def _wheel_modules() -> dict[str, Path]:
    """Modules of the wheel by name."""
    packages = find_packages(PROJECT, include=CONFIG["tool"]["setuptools"]["packages"]["find"]["include"])
    files = (file for package in packages for file in (PROJECT / package.replace(".", "/")).glob("*.py"))
    paths = {file: file.relative_to(PROJECT).with_suffix("").as_posix().replace("/", ".") for file in files}
    return {name.removesuffix(".__init__"): file for file, name in paths.items()}


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    """Names of the modules that are imported when the module is: not in functions, nor for type checkers."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield statement.module
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
            yield from _imports(statement.orelse)
        elif not isinstance(statement, ast.FunctionDef):
            for block in ("body", "handlers", "orelse", "finalbody"):
                yield from _imports(getattr(statement, block, []))


@pytest.mark.parametrize(("name", "file"), _wheel_modules().items(), ids=_wheel_modules())
def test_modules_of_the_wheel_import_only_each_other_and_the_dependencies(name: str, file: Path):
    brought = {IMPORT_NAMES.get(package, package) for package in _names(CONFIG["project"]["dependencies"])}
    for imported in _imports(ast.parse(file.read_text(encoding="utf-8")).body):
        package = imported.partition(".")[0]
        if package == "pointproj":
            folder = imported.split(".")[1] if "." in imported else None
            assert folder not in APPLICATION_FOLDERS, f"{name} imports {imported}"
        else:
            may = name.startswith(OPTIONAL.get(package, ()))
            assert may or package in {*sys.stdlib_module_names, *brought}, f"{name} imports {imported}"


def test_every_folder_belongs_to_the_library_or_to_the_application():
    packed = {name.split(".")[1] for name in _wheel_modules() if "." in name}
    folders = {file.parent.name for file in (PROJECT / "pointproj").glob("*/__init__.py")}
    assert folders - packed == APPLICATION_FOLDERS


def test_the_wheel_holds_the_library_its_weights_the_sources_of_native_and_no_more(tmp_path: Path):
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, tmp_path)
    shutil.copytree(PROJECT / "pointproj", tmp_path / "pointproj")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(tmp_path)]
    environment = os.environ | {"CXX": "no-such-compiler"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert (
        "pointproj: native is not compiled into this wheel, all else is as usual: the C++ compiler "
        "no-such-compiler is missing; install one with: apt-get install g++\n" in done.stdout
    )
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    contents = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = [*_wheel_modules().values(), *NATIVE_SOURCES, PROJECT / "pointproj/py.typed"]
    wanted += (PROJECT / "pointproj/nn/weights").glob("*/*")
    assert contents == {file.relative_to(PROJECT).as_posix() for file in wanted}


def test_a_wheel_with_the_library_is_of_one_platform_and_any_python(tmp_path: Path):
    """With a compiler that writes empty files: the real one takes long, and runs in ``.ci/run``."""
    shutil.copytree(PROJECT / "pointproj/ops/backends", tmp_path / "pointproj/ops/backends")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "pointproj/__init__.py"):
        shutil.copy(PROJECT / name, tmp_path / name)
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; : > "$2"\n')
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(tmp_path)]
    environment = os.environ | {"CXX": str(compiler), "CUDA_HOME": str(tmp_path)}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    assert re.search(r"-py3-none-linux_\w+\.whl$", wheel.name)
    (library,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert re.search(r"native/built/[0-9a-f]{16}-cpu/pointproj_native\.so$", library)


def test_the_version_has_an_entry_in_the_changelog():
    headings = re.findall(r"^## (\S+)", (PROJECT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == pointproj.__version__


def test_constraints_name_a_version_of_every_dependency():
    text = (PROJECT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {name.replace("_", "-") for name in re.findall(r"^([\w.-]+)==", text, flags=re.MULTILINE)}
    requirements = [*CONFIG["project"]["dependencies"], *(r for extra in EXTRAS.values() for r in extra)]
    rapids = {package for package in _names(requirements) if package.startswith(("cuml-", "rmm-"))}
    # triton comes with torch, RAPIDS from an index of its own for each CUDA.
    needed = {name.replace("_", "-") for name in _names(requirements)} - rapids - {"pointproj", "triton"}
    assert not needed - pinned


def test_the_set_for_cuda_12_is_what_the_extras_take():
    text = (PROJECT / "constraints-cuda12.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", text, flags=re.MULTILINE))
    for requirement in [*CONFIG["project"]["dependencies"], *EXTRAS["train"], *EXTRAS["rapids-cu12"]]:
        name, least = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()
        if name in pinned:
            assert tuple(map(int, pinned[name].split("."))) >= tuple(map(int, least.split("."))), name
    assert {"torch", "warp-lang", "numpy", "cuml-cu12", "rmm-cu12"} <= pinned.keys()


def test_the_doctor_knows_the_packages_of_the_application():
    assert list(APPLICATION_PACKAGES) == _names(EXTRAS["train"])


def test_help_lists_every_command(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    for name, command in {**LIBRARY, **APPLICATION}.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", text, flags=re.MULTILINE)


@pytest.mark.parametrize("command", [*LIBRARY, *APPLICATION])
def test_every_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture):
    try:
        code = main([command, "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    assert f"python -m pointproj {command}" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        main(["evalute", "outputs/solids"])
    assert "choose from 'doctor'" in capsys.readouterr().err


def test_a_scan_without_its_reader_is_refused_before_the_imports(tmp_path: Path):
    code = (
        "import sys; sys.modules.update(laspy=None); import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'laspy' else find(name, *more)\n"
        "from pointproj.__main__ import main; print(main(['predict', 'a.LAS']), 'torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert ran.stdout == "1 False\n"
    assert 'predict: .LAS needs laspy: pip install -c constraints.txt -e ".[scans]"' in ran.stderr


def test_without_the_application_its_commands_say_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("pointproj.doctor.installed_version", lambda package: None)
    assert main(["evaluate", "outputs/solids"]) == 1
    said = capsys.readouterr().err
    assert "evaluate is a command of the application: it needs hydra-core" in said
    assert 'pip install -c constraints.txt -e ".[train]"' in said

"""What README and docs show is true of the code: examples run, command lines parse, links lead somewhere."""

import contextlib
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch

from pointproj.__main__ import main
from pointproj.benchmark import table
from pointproj.benchmark.results import read_rows
from pointproj.runtime.overrides import check_arguments
from tests.compat.physicsnemo_library import import_physicsnemo
from tests.configs import CONF, bench_config_of, config_of
from tests.processes import PROJECT

PAGES = sorted(
    str(page.relative_to(PROJECT))
    for pattern in ("*.md", "docs/**/*.md", "data/*.md", "outputs/README.md", "benchmarks/*.md")
    for page in PROJECT.glob(pattern)
)
MADE = ("docs/train/config.md", "docs/examples.md")  # pages of the site that docs/hooks.py makes


def _page(name: str = "README.md") -> str:
    return (PROJECT / name).read_text(encoding="utf-8")


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", _page(page), flags=re.DOTALL)


def _examples(pages: list[str]) -> list:
    return [
        pytest.param(source, id=f"{page}-{number}")
        for page in pages
        for number, source in enumerate(_blocks(page, "python"))
    ]


WITH_PEERS = [page for page in PAGES if page.startswith("docs/operators/replace_")]
TESTED_APART = ("README.md", "docs/operators/warp_op.md", *WITH_PEERS)


def _arguments(program: str) -> list[list[str]]:
    """Arguments of every command line that shows the program, without comments."""
    shown = "\n".join(_page(page) for page in PAGES).replace("\\\n", " ")
    calls = re.findall(rf"^ *(?:pip .* && )?python {program} (.*)$", shown, flags=re.MULTILINE)
    return [shlex.split(call, comments=True) for call in calls]


def _run(source: str, folder: Path) -> object:
    """Run an example as a file: Warp reads the source of kernels."""
    file = folder / "example.py"
    file.write_text(source, encoding="utf-8")
    return _imported(file)


def _imported(file: Path) -> object:
    spec = importlib.util.spec_from_file_location("pointproj_readme_example", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_commands_set_everything_up():
    section = _page().partition("## Two commands")[2].partition("\n## ")[0]
    run, test = re.findall(r"```sh\n(.*)\n```", section)  # one line each
    assert run == 'pip install -c constraints.txt -e ".[train]" && python train.py'
    assert test == 'pip install -c constraints.txt -e ".[test]" && pytest -n 2 -m "not peers"'
    (found,) = re.findall(r"^command=\$\(grep -m 1 '(.*)' README.md\)$", _page(".ci/run"), flags=re.MULTILINE)
    assert re.findall(f"{found}.*", _page(), flags=re.MULTILINE) == [test]


def test_picture_is_of_the_newest_results():
    rows = _imported(PROJECT / "docs/picture.py").newest(sorted((PROJECT / "benchmarks").glob("*.csv")))
    assert f"commit {rows[0].commit}" in _page("docs/operator.svg"), "python docs/picture.py"


def test_operators_example(tmp_path: Path):
    example = _run(_blocks("README.md", "python")[0], tmp_path)
    assert example.aggregated.shape == example.within.shape == example.ragged.shape == (800, 25)
    assert example.distances.shape == example.neighbor_indices.shape == (800, 7)
    for leaf in (example.features, example.query_points, example.sigma):
        assert leaf.grad.abs().sum() > 0
    own_cloud = (example.neighbor_indices >= 0) & (example.neighbor_indices < 5000)
    assert own_cloud.all()


def test_warp_op_example(tmp_path: Path, capsys: pytest.CaptureFixture):
    torch._dynamo.reset()
    (source,) = _blocks("docs/operators/warp_op.md", "python")
    assert len(source.splitlines()) < 25
    _run(source, tmp_path)
    assert capsys.readouterr().out.strip().endswith("tensor([[396., 200.]])")


@pytest.mark.parametrize("source", _examples([page for page in PAGES if page not in TESTED_APART]))
def test_examples_run(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    process = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in process.items():  # as torchrun with one process
        monkeypatch.setenv(name, value)
    _run(source, tmp_path)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.peers
@pytest.mark.parametrize("source", _examples(WITH_PEERS))
def test_examples_with_other_libraries_run(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # some write files
    for package in re.findall(r"^(?:from|import) (\w+)", source, flags=re.MULTILINE):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'pointproj[peers]'")
    if "physicsnemo.models" in source:
        import_physicsnemo()
    _run(source, tmp_path)


@pytest.mark.parametrize("arguments", _arguments("train.py"), ids=" ".join)
def test_train_command_lines(arguments: list[str], tmp_path: Path):
    replaced = [_without_placeholders(argument, tmp_path) for argument in arguments]
    check_arguments(replaced, CONF)
    overrides = [argument for argument in replaced if "=" in argument and not argument.startswith("hydra")]
    for chosen in {*zip(*(_choices(override) for override in overrides), strict=False)}:
        config_of(*chosen)


@pytest.mark.parametrize("arguments", _arguments("bench.py"), ids=" ".join)
def test_bench_command_lines(arguments: list[str]):
    # base=REV names a commit to compare with: bench.py takes it away before Hydra reads the others.
    overrides = [of for of in arguments if "=" in of and not of.startswith("base=")]
    bench_config_of(*overrides)


@pytest.mark.parametrize("arguments", _arguments("-m pointproj"), ids=" ".join)
def test_commands_and_their_options_exist(arguments: list[str], capsys: pytest.CaptureFixture):
    command, *rest = arguments
    with contextlib.suppress(SystemExit):
        assert main([command, "--help"]) == 0
    listed = capsys.readouterr().out
    assert f"python -m pointproj {command}" in listed
    assert not [option for option in rest if option.startswith("--") and option not in listed]


def _without_placeholders(argument: str, folder: Path) -> str:
    key, equals, value = argument.partition("=")
    if key == "resume" and value != "auto":
        return f"resume={folder}"
    return f"{key}{equals}{value}"


def _choices(override: str) -> list[str]:
    """The values of a sweep, the same one again where there is but one."""
    key, _, values = override.partition("=")
    chosen = [values] if values.startswith("[") else values.split(",")
    return [f"{key}={value}" for value in (chosen if len(chosen) > 1 else chosen * 2)]


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str):
    targets = re.findall(r"\]\(([^)]+)\)", _page(page))
    files = {target: target.partition("#")[0] for target in targets if not target.startswith("http")}
    found = {target: ((PROJECT / page).parent / file).resolve() for target, file in files.items()}
    made = [PROJECT / page for page in MADE]
    assert not [target for target, file in found.items() if not file.exists() and file not in made]


@pytest.mark.parametrize("page", ["docs/train/index.md"])
def test_table_of_groups_names_every_choice(page: str):
    rows = dict(re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|", _page(page), flags=re.MULTILINE))
    for folder in (f for f in CONF.iterdir() if f.is_dir() and f.name not in ("hydra", "experiment")):
        files = {file.stem for file in folder.glob("*.yaml")}
        assert files == set(re.findall(r"`(\w+)`", rows[folder.name])), folder.name
    experiments = {file.stem for file in (CONF / "experiment").glob("*.yaml")}
    assert all(f"| `{name}` |" in _page(page) for name in experiments)


def test_extras_are_listed_whole():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = _page("docs/index.md").partition("| extra |")[2].partition("\n\n")[0]
    listed = [re.findall(r"`([\w-]+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    assert {name for names in listed for name in names} == set(project["optional-dependencies"])


def test_table_of_the_readme_is_that_of_the_committed_results():
    rows = read_rows(PROJECT / "benchmarks/nvidia-h100-80gb-hbm3.csv")
    assert table.readme_table(rows) in _page(), (
        "python -m pointproj benchmark-table benchmarks/nvidia-h100-80gb-hbm3.csv --readme README.md"
    )


def test_readme_is_short():
    assert len(_page().split()) <= 1500


def test_tables_of_the_benchmark_are_those_of_the_committed_results():
    files = [read_rows(file) for file in sorted((PROJECT / "benchmarks").glob("*.csv"))]
    assert table.page(*files) == _page("benchmarks/tables.md"), (
        "python -m pointproj benchmark-table benchmarks/*.csv --output benchmarks/tables.md"
    )

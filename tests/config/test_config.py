"""The schema, its checks, and what the command line answers before any work starts."""

import inspect
import os
import pkgutil
import subprocess
import sys
import time
from dataclasses import asdict, fields

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from pointproj.config import NETWORKS, Config, ConfigError, KnnConfig, VisibilityConfig, from_saved, to_config
from pointproj.runtime.overrides import check_arguments
from tests.configs import CONF, composed, config_of
from tests.processes import PROJECT

GROUPS = [folder.name for folder in CONF.iterdir()]


def program(*arguments, cwd=PROJECT, **environment):
    command = [sys.executable, str(PROJECT / "train.py"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment})


def test_default_run_is_the_distance_to_furniture_by_the_knn_projector():
    config = config_of()
    assert (config.data.name, config.target.name, config.projector.name) == ("furniture", "udf", "knn")
    assert config.projector == KnnConfig(context=True, normals=False)
    assert config.backend.name == "auto"
    assert isinstance(config, Config)


def test_solids_are_furniture_occupancy_by_visibility_without_normals():
    config = config_of("experiment=solids")
    assert (config.data.name, config.target.name) == ("furniture", "occupancy")
    assert (config.data.queries, config.projector.normals) == (1024, False)
    assert (config.training.epochs, config.training.validate_every, config.data.points) == (14, 14, 1024)
    assert (config.optimizer.name, config.optimizer.lr, config.target.loss) == ("adamw", 1e-2, "overlap")
    assert config.projector == VisibilityConfig(
        hidden_channels=32, neighbors=13, rounds=1, normals=False, sensors=False
    )


def test_context_is_off_for_random_targets_unless_asked_for():
    assert config_of("target=random").projector.context is False
    assert config_of("target=random", "projector.context=true").projector.context is True
    assert config_of("projector.context=false").projector.context is False


def test_networks_learn_at_random_points_where_the_target_has_values_there():
    assert config_of("projector=knn").data.queries == 1024
    assert config_of("projector=radius", "data.queries=9").data.queries == 9
    assert config_of("target=random").data.queries == 0
    assert config_of("projector.keep_neighbors=true", "data.resample=false").data.queries == 0


@pytest.mark.parametrize(
    "file", sorted(CONF.glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}={file.stem}"
)
def test_every_choice_of_every_group_makes_a_valid_config(file):
    chosen = f"{file.parent.name}={file.stem}"
    extra = {
        "data=gaussian": ["target=random"],
        "data=flow": ["target=field"],
        "data=fields": ["target=field", "data.fields=[pressure]"],
        "target=field": ["data=flow"],
    }
    config = config_of(chosen, *extra.get(chosen, []))
    if file.parent.name != "experiment":
        assert getattr(config, file.parent.name).name == file.stem


def test_tutorial_experiments_are_the_tutorials_workloads():
    knn = config_of("experiment=tutorial_knn")
    assert (knn.data.name, knn.data.points, knn.data.grid) == ("gaussian", 100_000, 30)
    assert (knn.projector.name, knn.projector.k) == ("knn", 7)
    assert (knn.projector.sigma, knn.projector.context) == (0.1, False)
    assert (knn.optimizer.name, knn.optimizer.lr, knn.projector.hidden_channels) == ("adam", 1e-3, 25)
    assert (knn.target.name, knn.training.amp) == ("random", False)
    radius = config_of("experiment=tutorial_radius")
    assert (radius.data.name, radius.data.points, radius.data.grid) == ("gaussian", 25_000, 30)
    assert (radius.projector.name, radius.projector.sigma, radius.projector.context) == ("radius", 0.1, False)
    assert radius.projector.radius == 0.1


def test_an_experiment_gives_way_to_the_command_line():
    config = config_of("experiment=tutorial_radius", "projector.radius=0.25", "backend=torch")
    assert (config.projector.radius, config.backend.name) == (0.25, "torch")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["target.name=uvf"], ["target.name=uvf", "udf, sdf, occupancy, random", "did you mean udf?"]),
        (["training.epochs=0"], ["training.epochs=0", "at least 1"]),
        (["data.grid=1"], ["data.grid=1", "at least 2"]),
        (["data.workers=1000000"], ["data.workers=1000000", "at most 1024"]),
        (["training.epochs=10000000000000000000"], ["training.epochs=1", "at most 1000000000"]),
        (["data.limit=10000000000000000000"], ["data.limit=1", "at most 9223372036854775807"]),
        (["seed=99999999999999999999"], ["seed=99999999999999999999", "at most"]),
        (["projector.sigma=0"], ["projector.sigma=0", "above 0"]),
        (["projector.sigma=inf"], ["projector.sigma=inf", "finite"]),
        (["projector.sigma=1e39"], ["projector.sigma=1e+39", "1.2e-38 to 3.4e+38", "float32"]),
        (["projector.sigma=1e-40"], ["projector.sigma=1e-40", "1.2e-38 to 3.4e+38", "float32"]),
        (["augmentation.drop=0.999999"], ["augmentation.drop=0.999999", "so that 16 are left"]),
        (["projector.sigma=nan"], ["projector.sigma=nan", "finite"]),
        (["optimizer.warmup=1"], ["optimizer.warmup=1.0", "below 1"]),
        (["optimizer.betas=[0.9,1.0]"], ["optimizer.betas=[0.9,1.0]", "two numbers"]),
        (["optimizer.betas=[0.9]"], ["optimizer.betas=[0.9]", "two numbers"]),
        (["optimizer.weight_decay=-1"], ["weight_decay=-1.0", "at least 0"]),
        (["data.classes=[]"], ["data.classes=[]", "null"]),
        (["resume=nowhere/last.pt"], ["resume=nowhere/last.pt", "no such file"]),
        (["projector.name=radius"], ["projector.name=radius", "write projector=radius"]),
        (["projector.name=kn"], ["projector.name=kn", "did you mean knn?"]),
        (["projector.k=0"], ["projector.k=0", "at least 1"]),
        (["projector=radius", "projector.radius=-1"], ["projector.radius=-1.0", "above 0"]),
        (["projector=visibility", "projector.rounds=2000"], ["projector.rounds=2000", "at most 100"]),
        (["projector.k=65", "data.points=64"], ["projector.k=65", "data.points=64"]),
        (["projector.keep_neighbors=true"], ["keep_neighbors=true", "write data.resample=false"]),
        (["data=gaussian"], ["data=gaussian", "target=random", "data=furniture"]),
        (["data.sampling=evn"], ["data.sampling=evn", "area, even, scan", "did you mean even?"]),
        (["data.mixture=[]"], ["data.mixture=[]", "[{sampling:even}]"]),
        (["data.mixture=[{},{sampling:either}]"], ["data.mixture[1].sampling=either", "area, even, scan"]),
        (["data.mixture=[{points:0}]"], ["data.mixture[0].points=0", "at least 1"]),
        (["data.mixture=[{points:6}]"], ["projector.k=7", "cloud of data.mixture=6"]),
        (["data.mixture=[{noise:1}]"], ["data.mixture[0].noise=1.0", "below 1"]),
        (["data.mixture=[{}]", "data.resample=false"], ["data.mixture", "write data.resample=true"]),
        (["data.download=true"], ["data.download=true", "data=modelnet10"]),
        (["profiler=line_profile", "compile=true"], ["line_profile", "compile=false", "profiler=torch"]),
        (["device=cpu", "allocator.expandable_segments=true"], ["expandable_segments", "device=cpu"]),
        (["device=cpu", "allocator=rmm"], ["allocator=rmm", "device=cpu"]),
        (["allocator.maximum_gib=2"], ["allocator.maximum_gib=2.0", "write allocator=rmm"]),
        (["allocator=rmm", "allocator.expandable_segments=true"], ["is for allocator=torch"]),
        (["allocator=rmm", "allocator.resource=pol"], ["expected one of pool, async", "did you mean pool?"]),
        (
            ["allocator=rmm", "allocator.resource=arena", "allocator.initial_gib=1"],
            ["write allocator.maximum_gib"],
        ),
        (["allocator=rmm", "allocator.initial_gib=2", "allocator.maximum_gib=1"], ["expected at most that"]),
        (["backend=warp", "backend.algorithm=rbc"], ["backend.algorithm=rbc", "backend=cuml"]),
        (["backend=warp", "backend.exact=false"], ["backend.exact=false is for backend=cuml"]),
        (["backend=cuml", "backend.algorithm=kd"], ["expected one of auto, brute, rbc"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) and "=" in value[-1] else None,
)
def test_what_cannot_run_is_refused_with_the_words_that_help(overrides, words):
    with pytest.raises(ConfigError) as caught:
        config_of(*overrides)
    for word in words:
        assert word in str(caught.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        config_of("training.epochs=0", "data=gaussian", "seed=-1")
    assert str(caught.value).count("\n  - ") == 3


def test_a_missing_choice_is_named():
    with pytest.raises(ConfigError, match=r"write .*target=\.\.\."):
        to_config(OmegaConf.structured(Config()))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("optimizr.lr=1", ["there is no optimizr.lr", "did you mean optimizer.lr"]),
        ("lr=1", ["there is no lr", "did you mean optimizer.lr"]),
        ("trainin.epochs=1", ["there is no trainin.epochs", "training.epochs"]),
        ("+dataa.points=3", ["there is no dataa.points", "data.points"]),
        ("projectr=knn", ["there is no projectr", "projector"]),
        ("backend=wrap", ["backend=wrap: expected one of", "torch", "did you mean warp?"]),
        ("backend=torch,wrap", ["backend=wrap: expected one of"]),
        ("experiment='smke'", ["experiment=smke", "did you mean smoke?"]),
        ("data.mixture=[{sampling:even},{pionts:9}]", ["there is no pionts", "did you mean points?"]),
        ("epochs", ["expected KEY=VALUE or GROUP=CHOICE"]),
        ("training.epochs=1e3", ["training.epochs=1e3: expected a whole number of at least 1"]),
        ("training.epochs=10,1e3", ["training.epochs=10,1e3: expected a whole number of at least 1"]),
        ("projector.k=7.5", ["projector.k=7.5: expected a whole number of at least 1"]),
        ("compile=maybe", ["compile=maybe: expected true or false"]),
        ("compile=2", ["compile=2: expected true or false"]),
        ("data.resample=true,2", ["expected true or false"]),
        ("profiler=[torch,line_profile]", ["got 2 at once; write profiler=torch profiler.lines=true"]),
        (
            "profiler=[torch,line_profile],none",
            ["expected one of line_profile, none, nvtx, torch, got 2 at once"],
        ),
        ("data.root=/data/Stühle", ["""'data.root="/data/Stühle"'"""]),
        ("data.mixture=5", ["data.mixture=5: expected a list of {sampling, points, noise}, or null"]),
        ("data.mixture=[{points:few}]", ["expected a list of {sampling, points, noise}"]),
        ("optimizer.clip=tight", ["optimizer.clip=tight: expected a number above 0, or null"]),
        ("optimizer.betas=0.9", ["optimizer.betas=0.9: expected a list of numbers"]),
        ("training=5", ["training=5: expected values of the section: training.epochs=..."]),
        ("training.epochs=null", ["training.epochs=null: expected a whole number of at least 1"]),
    ],
)
def test_a_misspelt_word_is_answered_with_the_nearest(argument, words):
    with pytest.raises(ConfigError) as caught:
        check_arguments([argument], CONF)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimizer.lr=1e-3", "experiment=null", "backend=auto", "compile=true"],
        ["-m", "backend=torch,warp", "optimizer.lr=1e-3,1e-4", "seed=range(3)"],
        ["hydra.verbose=true", "hydra/job_logging=default", "hydra.run.dir=x"],
        ["--cfg", "job", "data={points: 3}"],
        ["training={epochs: 3}", "optimizer.clip=null", "data.mixture=[{points:300},{}]", "resume='a b.pt'"],
        ["data.classes=[bed,'night stand']", "optimizer.betas=[0.8,0.9]"],
        ["training.epochs=${seed}", "~experiment"],
        ["-sc", "query=bash"],
    ],
)
def test_what_is_right_passes(arguments):
    check_arguments(arguments, CONF)


def test_every_choice_that_the_schema_names_has_its_file():
    choices = {"projector": [*NETWORKS]}
    for section in fields(Config()):
        for value in fields(getattr(Config(), section.name)) if section.name in GROUPS else ():
            if value.name == "name" and value.metadata["choices"]:
                choices[section.name] = value.metadata["choices"]
    assert len(choices) == 7
    for group, names in choices.items():
        assert sorted(names) == sorted(file.stem for file in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize(
    ("arguments", "network", "key"),
    [
        (["projector=radius", "projector.k=3", "projector.radius=0.3"], "radius", "k=3"),
        (["projector.radius=0.2"], "knn", "radius=0.2"),
        (["experiment=solids", "projector.sigma=0.1"], "visibility", "sigma=0.1"),
        (["experiment=tutorial_radius", "projector.keep_neighbors=true"], "radius", "keep_neighbors=true"),
        (["-m", "projector=knn,radius", "projector.k=3,4"], "radius", "k=3,4"),
        (["-m", "experiment=smoke,solids", "projector.k=3"], "visibility", "k=3"),
    ],
)
def test_a_value_that_the_network_does_not_read_cannot_be_written(arguments, network, key):
    with pytest.raises(ConfigError) as caught:
        check_arguments(arguments, CONF)
    message = str(caught.value)
    assert f"projector.{key} has no meaning for projector={network}, which reads " in message
    assert f"projector.{key}, or leave it out" in message


def test_hydra_too_refuses_a_value_that_the_network_does_not_read():
    with pytest.raises(ConfigCompositionException, match="projector"):
        composed("projector=radius", "projector.k=3")


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_defaults_of_its_schema_and_its_saved_config_comes_back(name):
    constructor = inspect.signature(pkgutil.resolve_name(NETWORKS[name].NETWORK)).parameters
    for argument, value in NETWORKS[name]().arguments().items():
        if argument not in ("kind", "radius"):  # the radius alone decides nothing: kind="radius" needs one
            assert constructor[argument].default == value
    config = config_of(f"projector={name}")
    saved = from_saved(asdict(config))
    assert saved == config
    assert type(saved.projector) is NETWORKS[name]


@pytest.mark.parametrize(
    ("argument", "code", "words"),
    [
        ("optimizer.lr=fast", 2, "optimizer.lr=fast: expected a number above 0"),
        ("data=gaussian", 1, "write target=random"),
        ("training.epoch=3", 2, "did you mean training.epochs"),
        ("seed=${seed}", 1, "seed has no value, as ${...} in it cannot be filled in: Recursive"),
        ("data.root=${oc.env:NO_SUCH}", 1, "Environment variable 'NO_SUCH' not found"),
        ("data.root=${nope:x}", 1, "Unsupported interpolation type nope"),
        ("hydra.run.dir=${no.such}", 1, "at hydra.run.dir:\nInterpolation key 'no.such' not found"),
        ("experiment=own --config-dir=.", 1, 'own.yaml", line 1, column 4'),
        ("experiment=two --config-dir=.", 1, "two.yaml: compile=2: expected true or false"),
    ],
)
def test_the_program_refuses_shortly_and_leaves_no_run(argument, code, words, tmp_path):
    own = tmp_path / "experiment" / "own.yaml"
    own.parent.mkdir()
    own.write_text("a: [1\nb: }\n")
    two = own.with_name("two.yaml")
    two.write_text("# @package _global_\ncompile: 2\nprojector: {normals: 3}\n")
    ended = program(*argument.split(), cwd=tmp_path)
    own.unlink()
    two.unlink()
    assert ended.returncode == code
    assert words in ended.stderr
    assert "object_type" not in ended.stderr
    assert "Warning" not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or (code == 2 and path != own.parent)]


def test_printing_the_config_imports_nothing_heavy(tmp_path):
    started = time.monotonic()
    ended = program("--cfg", "job", "experiment=smoke", cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert ended.returncode == 0
    assert OmegaConf.create(ended.stdout).data.grid == 12
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if "|" in line}
    assert "pointproj.config" in imported
    assert not imported & {"torch", "warp", "numpy", "physicsnemo", "matplotlib", "trimesh", "rich"}
    assert time.monotonic() - started < 30  # a hang, not a slow machine


def test_help_is_about_this_program_and_lists_all_networks(tmp_path):
    ended = program("--help", cwd=tmp_path, PYTHONWARNINGS="error")
    assert (ended.returncode, ended.stderr) == (0, "")
    words = ("backend: auto, ", "experiment=smoke", "-m backend=torch,warp", "epochs: 40", "outputs/")
    for word in (*words, f"projector: {', '.join(sorted(NETWORKS))}\n"):
        assert word in ended.stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("backend=", "backend=warp"),
        ("experiment=tutorial_k", "experiment=tutorial_knn"),
        ("optimizer.", "optimizer.lr="),
    ],
)
def test_shell_completion_knows_groups_and_keys(line, expected, tmp_path):
    words = f"python train.py {line}"
    ended = program("-sc", "query=bash", cwd=tmp_path, COMP_LINE=words, COMP_POINT=str(len(words)))
    assert ended.returncode == 0
    assert expected in ended.stdout.split()

import dataclasses
import errno
import os
import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from pointproj.config import Config, KnnConfig
from pointproj.runtime import tensor_file
from pointproj.runtime.distributed import SINGLE_PROCESS
from pointproj.runtime.run_folder import RunFolder, resume_argument
from pointproj.training import checkpoint
from pointproj.training.checkpoint import CheckpointError
from tests.configs import config_of


@pytest.fixture
def config():
    made = Config()
    made.backend.name, made.target.name, made.optimizer.name = "torch", "udf", "adam"
    made.projector = KnnConfig()
    return made


def changed(config, **values):
    """Return a copy with ``section__key=value`` (or ``key=value``) changed."""
    copy = dataclasses.replace(config)
    for name, value in values.items():
        section, _, key = name.rpartition("__")
        if section:
            setattr(copy, section, dataclasses.replace(getattr(copy, section), **{key: value}))
        else:
            setattr(copy, key, value)
    return copy


def test_round_trip_of_tensors_and_plain_values(tmp_path, config):
    state = {"model": {"weight": torch.arange(3.0)}, "position": {"losses": [[1, 0.5]], "best": float("inf")}}
    checkpoint.save(tmp_path / "last.pt", state, config)
    content = checkpoint.read(tmp_path / "last.pt", config)
    torch.testing.assert_close(content["model"]["weight"], torch.tensor([0.0, 1.0, 2.0]))
    assert content["position"] == {"losses": [[1, 0.5]], "best": float("inf")}
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_a_folder_means_its_last_checkpoint(tmp_path, config):
    checkpoint.save(tmp_path / "last.pt", {"which": "last"}, config)
    checkpoint.save(tmp_path / "best.pt", {"which": "best"}, config)
    assert checkpoint.read(tmp_path, config)["which"] == "last"


def test_random_states_continue_where_they_were():
    states = checkpoint.random_states()
    drawn = torch.rand(2).tolist()
    checkpoint.restore_random_states(states)
    assert torch.rand(2).tolist() == drawn


@pytest.mark.parametrize(
    "values",
    [
        {"backend__name": "warp"},
        {"compile": True},
        {"device": "cpu"},
        {"data__workers": 3},
        {"data__root": "elsewhere"},
        {"training__log_every": 1},
        {"training__epochs": 99},  # no learning rate depends on it with a constant schedule
        {"resume": "auto"},
    ],
)
def test_what_does_not_change_learning_may_differ(tmp_path, config, values):
    checkpoint.save(tmp_path / "last.pt", {}, config)
    checkpoint.read(tmp_path / "last.pt", changed(config, **values))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"projector__hidden_channels": 64}, "projector.hidden_channels: checkpoint 25, this run 64"),
        ({"data__points": 99}, "data.points: checkpoint 1024, this run 99"),
        (
            {"optimizer__betas": (0.8, 0.9)},
            r"optimizer.betas: checkpoint \[0.9, 0.999\], this run \[0.8, 0.9\]",
        ),
        ({"seed": 3}, "seed: checkpoint 0, this run 3"),
    ],
)
def test_another_config_is_refused_by_name_of_the_difference(tmp_path, config, values, words):
    checkpoint.save(tmp_path / "last.pt", {}, config)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.read(tmp_path / "last.pt", changed(config, **values))


def test_epochs_may_be_raised_but_not_lowered_under_a_schedule_that_ends_with_them(tmp_path, config):
    config = changed(config, optimizer__schedule="cosine")
    checkpoint.save(tmp_path / "last.pt", {}, config)
    with pytest.raises(CheckpointError, match=r"training\.epochs: checkpoint 40, this run 39"):
        checkpoint.read(tmp_path / "last.pt", changed(config, training__epochs=39))
    checkpoint.read(tmp_path / "last.pt", changed(config, training__epochs=41))


def test_missing_damaged_and_foreign_files_are_refused(tmp_path, config):
    path = tmp_path / "last.pt"
    with pytest.raises(CheckpointError, match=r"no checkpoint .*last\.pt"):
        checkpoint.read(path, config)
    checkpoint.save(path, {"model": torch.zeros(1000)}, config)
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read(path, config)
    torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"torch\.save wrote it"):
        checkpoint.read(path, config)
    tensor_file.save(path, {"weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="not a checkpoint of this program"):
        checkpoint.read(path, config)


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_of_a_checkpoint_cut_short_the_one_before_is_taken_with_a_warning(tmp_path, config, share, caplog):
    path = tmp_path / "last.pt"
    for step in (1, 2, 3):
        checkpoint.save(path, {"step": step}, config)
    assert checkpoint.read(tmp_path, config)["step"] == 3
    assert not caplog.messages
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    for named in (tmp_path, path):
        assert checkpoint.read(named, config)["step"] == 2
    assert "last.pt cannot be read" in caplog.messages[0]
    assert "taking previous.pt" in caplog.messages[0]
    run = RunFolder(tmp_path, named=True)
    assert checkpoint.find(changed(config, resume="auto"), run, SINGLE_PROCESS)[0] == path


@pytest.mark.parametrize(("reached", "words"), [(9, "; training ended after 9 epochs, at 22%"), (40, "")])
def test_a_checkpoint_says_how_far_training_came(tmp_path, config, reached, words):
    for name, epoch in (("best.pt", 8), ("last.pt", reached)):
        checkpoint.save(tmp_path / name, {"position": {"epoch": epoch}}, config)
    line = checkpoint.described(*checkpoint.load_best(tmp_path))
    assert line == f"{tmp_path / 'best.pt'}, of epoch 8 of 40{words}"


def test_no_other_file_is_taken_for_one_asked_for_by_name(tmp_path, config):
    for name in ("last.pt", "last.pt", "best.pt"):
        checkpoint.save(tmp_path / name, {}, config)
    (tmp_path / "best.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"best\.pt cannot be read"):
        checkpoint.read(tmp_path / "best.pt", config)


def test_what_cannot_be_written_says_so_and_that_the_one_before_is_whole(tmp_path, config, monkeypatch):
    def full_disk(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoint.save(tmp_path / "last.pt", {"step": 1}, config)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(CheckpointError, match=r"No space left.*make room.*resume=.*last\.pt"):
        checkpoint.save(tmp_path / "last.pt", {"step": 2}, config)
    with pytest.raises(
        CheckpointError, match=r"best\.pt cannot be written.*; last\.pt is complete.*resume=.*last\.pt"
    ):
        checkpoint.save(tmp_path / "best.pt", {"step": 2}, config)
    (tmp_path / "new").mkdir()
    with pytest.raises(CheckpointError, match="there is no checkpoint yet"):
        checkpoint.save(tmp_path / "new" / "last.pt", {"step": 2}, config)
    (tmp_path / "new").rmdir()
    assert checkpoint.read(tmp_path, config)["step"] == 1
    assert os.listdir(tmp_path) == ["last.pt"]


def test_newest_of_equal_config_is_found(tmp_path, config):
    other = changed(config, projector__hidden_channels=3)
    for age, (name, owner) in enumerate([("c", other), ("b", config), ("a", config)]):
        folder = tmp_path / "day" / name
        folder.mkdir(parents=True)
        checkpoint.save(folder / "last.pt", {}, owner)
        os.utime(folder / "last.pt", (1000 - age, 1000 - age))
    (tmp_path / "last.pt").write_bytes(b"newest, and damaged")
    run = RunFolder(tmp_path / "new")
    wanted = changed(config, resume="auto")
    assert checkpoint.find(wanted, run, SINGLE_PROCESS)[0] == tmp_path / "day" / "b" / "last.pt"
    assert checkpoint.find(changed(config, resume="auto", seed=5), run, SINGLE_PROCESS) is None


def damaged(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("lost", ["damaged", "missing"])
def test_auto_refuses_a_run_whose_checkpoints_cannot_be_read(tmp_path, config, lost):
    for name in ("last.pt", "last.pt", "best.pt"):
        checkpoint.save(tmp_path / name, {"state": torch.zeros(99)}, config)
    for name in ("last.pt", "previous.pt"):
        damaged(tmp_path / name) if lost == "damaged" else (tmp_path / name).unlink()
    words = (
        "last.pt cannot be read.*previous.pt cannot be read"
        if lost == "damaged"
        else "no checkpoint .*last.pt"
    )
    with pytest.raises(CheckpointError, match=f"cannot be continued: .*{words}.*resume=FILE"):
        checkpoint.find(changed(config, resume="auto"), RunFolder(tmp_path, named=True), SINGLE_PROCESS)


@pytest.mark.parametrize(("seed", "refused"), [(0, True), (5, False)])
def test_auto_reads_in_config_yaml_of_which_run_an_unreadable_checkpoint_is(
    tmp_path, config, seed, refused, caplog
):
    old, new = tmp_path / "outputs" / "old", tmp_path / "outputs" / "new"
    old.mkdir(parents=True)
    (old / "last.pt").write_bytes(b"damaged")
    chosen = config_of("target=udf")
    OmegaConf.save(OmegaConf.structured(changed(chosen, seed=seed)), old / "config.yaml")
    find = partial(checkpoint.find, changed(chosen, resume="auto"), RunFolder(new), SINGLE_PROCESS)
    if refused:
        with pytest.raises(CheckpointError, match="old has a run of this config that cannot be continued"):
            find()
    else:
        assert find() is None
        assert "passes over" in caplog.messages[0]


def test_auto_takes_the_previous_checkpoint_where_the_last_is_missing(tmp_path, config):
    checkpoint.save(tmp_path / "previous.pt", {"step": 1}, config)
    run = RunFolder(tmp_path, named=True)
    assert checkpoint.find(changed(config, resume="auto"), run, SINGLE_PROCESS)[1]["step"] == 1


def test_optimizer_takes_moments_but_keeps_its_settings():
    parameter = torch.nn.Parameter(torch.tensor([1.0]))
    saved = torch.optim.Adam([parameter], lr=0.5, betas=(0.5, 0.5))
    parameter.grad = torch.tensor([2.0])
    saved.step()
    state = {**saved.state_dict(), "param_groups": [{**saved.state_dict()["param_groups"][0], "lr": 9.0}]}
    fresh = torch.optim.Adam([parameter], lr=0.25, fused=True)
    checkpoint.load_optimizer(fresh, state)
    assert fresh.param_groups[0]["lr"] == 0.25
    assert fresh.param_groups[0]["fused"] is True
    torch.testing.assert_close(fresh.state[parameter]["exp_avg"], torch.tensor([1.0]))
    assert fresh.state[parameter]["step"].item() == 1


@pytest.mark.parametrize("folder", ["outputs/2026-11-21/10-00-00-ab", "odd dir=x", "a,b", "it's", "a{b}[c]"])
def test_the_way_on_survives_shell_and_hydra(folder):
    path = Path(folder) / "last.pt"
    (argument,) = shlex.split(resume_argument(path))
    (override,) = OverridesParser.create().parse_overrides([argument])
    value = override.value()
    assert (getattr(value, "text", None) or value) == str(path)

"""A job and its folder: nothing of an earlier run is taken over by another one."""

import pytest
from omegaconf import OmegaConf

from pointproj.config import Config, KnnConfig
from pointproj.runtime.run_folder import RunError
from pointproj.training.job import _claimed


def composed(**values):
    config = OmegaConf.structured(Config)
    for section in ("backend", "data", "target", "optimizer", "allocator", "profiler", "logger"):
        config[section].name = "x"
    config.projector = KnnConfig()
    return OmegaConf.merge(config, values)


@pytest.fixture
def earlier(tmp_path):
    """The folder of a run with seed 1."""
    with _claimed(composed(seed=1), tmp_path / "earlier", named=False):
        pass
    (tmp_path / "earlier" / "last.pt").touch()
    return tmp_path / "earlier"


@pytest.mark.parametrize("resume", ["auto", "{}", "{}/last.pt"])
def test_a_run_goes_on_in_its_own_folder(earlier, resume):
    with _claimed(composed(seed=1, resume=resume.format(earlier), device="cpu"), earlier, named=True):
        pass
    assert "device: cpu" in (earlier / "config.yaml").read_text()


@pytest.mark.parametrize(
    "values", [{"seed": 1}, {"seed": 2, "resume": "auto"}, {"seed": 1, "resume": "elsewhere/last.pt"}]
)
def test_another_run_does_not_take_a_folder_over(earlier, values):
    before = (earlier / "config.yaml").read_text()
    with pytest.raises(RunError, match="holds a run already"):
        _claimed(composed(**values), earlier, named=True)
    assert (earlier / "config.yaml").read_text() == before

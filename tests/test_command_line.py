"""Every program takes KEY=VALUE and --KEY VALUE."""

import argparse
import subprocess
import sys

import pytest

from pointproj import __version__, command_line
from pointproj.__main__ import APPLICATION, LIBRARY, main


@pytest.mark.parametrize(
    "arguments",
    [
        "run --device cpu --samples even area --yes",
        "run device=cpu samples=even,area yes=true",
        "device=cpu --yes run samples=even,area",
    ],
)
def test_options_are_written_either_way(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument("--samples", nargs="+")
    parser.add_argument("--yes", action="store_true")
    given = vars(command_line.parse(parser, arguments.split()))
    assert given == {"checkpoint": "run", "device": "cpu", "samples": ["even", "area"], "yes": True}
    assert not command_line.parse(parser, ["a=b", "yes=false"]).yes  # a file may have such a name
    with pytest.raises(SystemExit):
        command_line.parse(parser, ["run", "device=gpu"])


def test_overrides_are_written_either_way():
    given = ["--device", "cpu", "--seed=3", "-m", "--cfg", "job", "compile=true", "--device"]
    wanted = ["device=cpu", "seed=3", "-m", "--cfg", "job", "compile=true", "device="]
    assert command_line.overrides(given, ("device", "seed")) == wanted


@pytest.mark.parametrize("given", [["doctor", "--device", "cpu"], ["doctor", "device=cpu"]])
def test_doctor_takes_both(given, capsys):
    assert main(given) == 0
    assert "device=cpu, on cpu: works" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"pointproj {__version__}\n"


IMPORTED = """
import sys
from pointproj.__main__ import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"torch", "trimesh", "warp", "physicsnemo", "manifold3d"} & {*sys.modules}))"""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["predict", "a.step"], "a.step is of the kind .step: expected .off"),
        (["predict", "run/best.pt", "a.ply", "B.STEP"], "B.STEP is of the kind .STEP"),
        (["predict", "best.pt"], "no FILE to reconstruct after the checkpoint best.pt"),
        *(([command, "--help"], "") for command in LIBRARY | APPLICATION),
    ],
    ids=" ".join,
)
def test_arguments_are_read_before_anything_heavy_is_imported(given, words):
    command = [sys.executable, "-c", IMPORTED, *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == (2 if words else 0)
    assert words in ended.stderr
    assert ended.stdout.endswith("[]\n")

"""Read the Dockerfile and run its steps, in order, in an empty folder instead of an image.

    python -m tools.image_steps FOLDER [ARGUMENT=VALUE ...] [--base=/usr/bin/python3.12] [--skip=STAGE]

FOLDER is the root: the image's folders (``/app``, ``/opt``, ``/cache``) lie in it, and those of an earlier
stage in ``stages/STAGE``. A stage that is skipped is not run, and nothing is copied from it.
Packages of the distribution are not installed; on that distribution, apt is asked whether they exist.
Needs nothing but Python: it runs before anything is installed.
"""

import fnmatch
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
OWN_FOLDERS = re.compile(r"(?<![\w./-])/(?=(?:app|opt|cache)\b)")  # of the image, as they stand in commands
PYTHONS = ("python3", "python3.11")  # names in the Dockerfile for the Python given
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass
class Instruction:
    """One line of a Dockerfile, continued lines joined."""

    name: str  # RUN, COPY, ...
    text: str

    def words(self) -> list[str]:
        """The words of an instruction that takes words, options left out."""
        return [word for word in shlex.split(self.text) if not word.startswith("--")]


@dataclass
class Stage:
    """What follows one FROM."""

    base: str  # the image that it begins with
    name: str  # empty for the last, which nothing is copied from
    instructions: list[Instruction]


def read(path: Path = PROJECT / "Dockerfile") -> list[Stage]:
    """The stages of a Dockerfile; the last one is the image."""
    stages: list[Stage] = []
    for instruction in _instructions(path.read_text(encoding="utf-8")):
        if instruction.name == "FROM":
            base, *named = instruction.words()
            stages.append(Stage(base, named[1] if named else "", []))
        else:
            stages[-1].instructions.append(instruction)
    return stages


def filled(text: str, values: dict[str, str]) -> str:
    """``text`` with variables in place, as Docker fills them in outside of RUN."""
    return VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def copied(sources: list[str], ignored: list[str]) -> Iterator[Path]:
    """Files of the project that a COPY takes, relative to it."""
    for source in sources:
        path = PROJECT / source
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        if not files:
            raise FileNotFoundError(f"COPY {source}: there is no such file")
        yield from (file.relative_to(PROJECT) for file in files if not is_ignored(file, ignored))


def ignore_patterns() -> list[str]:
    """Lines of .dockerignore that say something."""
    lines = (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def is_ignored(file: Path, patterns: list[str]) -> bool:
    """Whether .dockerignore keeps a file of the project out; the last pattern that fits it decides."""
    parts = file.relative_to(PROJECT).parts
    names = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    answer = False
    for pattern in patterns:
        keeps = pattern.startswith("!")
        wanted = pattern.removeprefix("!")
        anywhere = wanted.startswith("**/")
        fits = any(
            fnmatch.fnmatchcase(name.rpartition("/")[2], wanted[3:])
            if anywhere
            else name.count("/") == wanted.count("/") and fnmatch.fnmatchcase(name, wanted)
            for name in names
        )
        if fits:
            answer = not keeps
    return answer


def build(
    root: Path, arguments: dict[str, str], python: str, skipped: str = "", file: Path = PROJECT / "Dockerfile"
) -> "Image":
    """Run the steps of all stages but the skipped one, and return the image of the last."""
    made: dict[str, Image | None] = {}
    for stage in read(file):
        folder = root / "stages" / stage.name if stage.name else root
        made[stage.name] = None if stage.name and stage.name == skipped else Image(folder, arguments, python)
        if image := made[stage.name]:
            image.build(stage, made)
    return made[""]


class Image:
    """A folder that the steps of a stage are run in."""

    def __init__(self, root: Path, arguments: dict[str, str], python: str) -> None:
        self.root = root.resolve()
        self.arguments = arguments
        self.environment = {"PATH": "$PATH"}
        self.folder = self.root
        programs = self.root / "bin"
        programs.mkdir(parents=True)
        for name in PYTHONS:
            shim = programs / name  # not a link: Python would look for its library beside it
            shim.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n', encoding="utf-8")
            shim.chmod(0o755)
        self.path = f"{programs}:{os.environ['PATH']}"
        self.health: list[str] = []
        self.base, self.stages = "", {}

    def build(self, stage: Stage, stages: "dict[str, Image | None]") -> None:
        """Run all steps; ``stages`` are those before, which files are copied from."""
        self.base, self.stages = stage.base, stages
        for instruction in stage.instructions:
            self._take(instruction)

    def run(self, command: str) -> None:
        """Run a shell command as a RUN does; CalledProcessError if it fails."""
        print(f"-- {command}", flush=True)
        values = {name: self._inside(value) for name, value in self.environment.items()}
        values["PATH"] = values.get("PATH", "$PATH").replace("$PATH", self.path)
        environment = {**os.environ, **{name: value for name, value in values.items() if value}}
        subprocess.run(
            ["/bin/sh", "-ec", self._inside(command)], cwd=self.folder, env=environment, check=True
        )

    def _take(self, instruction: Instruction) -> None:
        values = {**self.environment}
        match instruction.name:
            case "ARG":
                self.environment |= _declared(instruction, self.arguments, values)
            case "ENV":
                pairs = (word.partition("=")[::2] for word in shlex.split(instruction.text))
                self.environment |= {name: filled(value, values) for name, value in pairs}
            case "WORKDIR":
                self.folder = Path(self._inside(filled(instruction.text, values)))
                self.folder.mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(instruction)
            case "RUN":
                self._run_step(instruction.text)
            case "HEALTHCHECK":
                self.health = re.findall(r'"([^"]+)"', instruction.text.partition("CMD")[2])

    def _copy(self, instruction: Instruction) -> None:
        *sources, target = instruction.words()
        if other := re.match(r"--from=(\S+)", instruction.text):
            if stage := self.stages[other[1]]:
                for source in map(Path, map(stage._inside, sources)):
                    into = self.folder / target
                    into.parent.mkdir(parents=True, exist_ok=True)
                    copy = shutil.copytree if source.is_dir() else shutil.copy2
                    copy(source, into)
            return
        for file in copied(sources, ignore_patterns()):
            into = self.folder / target / file
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / file, into)

    def _run_step(self, command: str) -> None:
        if "apt-get install" not in command:
            self.run(command)
            return
        packages = re.search(r"apt-get install ((?:-\S+ )*)([^&]+)", command)[2].split()
        known = self.base.replace(":", "").endswith(_distribution())
        known = known and shutil.which("apt-cache") and any(Path("/var/lib/apt/lists").glob("*Packages*"))
        if not known:
            print(f"-- not installed here, nor looked up: {' '.join(packages)}")
            return
        print(f"-- looked up, not installed: {' '.join(packages)}", flush=True)
        subprocess.run(["apt-cache", "show", *packages], check=True, stdout=subprocess.DEVNULL)

    def _inside(self, text: str) -> str:
        """Paths of the image as paths in the folder."""
        return OWN_FOLDERS.sub(f"{self.root}/", text)


def _instructions(text: str) -> Iterator[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        yield Instruction(name.upper(), rest.strip())


def _distribution() -> str:
    """The distribution here, as images name it: ``ubuntu24.04``."""
    facts = platform.freedesktop_os_release()
    return f"{facts['ID']}{facts.get('VERSION_ID', '')}"


def _declared(instruction: Instruction, given: dict[str, str], known: dict[str, str]) -> dict[str, str]:
    """What an ARG sets: the value given, or its default."""
    name, equals, default = instruction.text.partition("=")
    if name in given:
        return {name: given[name]}
    return {name: filled(default, {**given, **known})} if equals else {}


def main(arguments: list[str]) -> None:
    """Build, then do what a container does first: the health check, and a look at the program's config."""
    folder, *rest = arguments
    given = dict(argument.partition("=")[::2] for argument in rest)
    python = given.pop("--base", sys.executable)
    image = build(Path(folder), given, python, given.pop("--skip", ""))
    image.run(shlex.join(image.health))
    image.run("python train.py --cfg job backend=warp compile=true > /dev/null")


if __name__ == "__main__":
    main(sys.argv[1:])

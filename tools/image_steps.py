"""Read the Dockerfile and run its steps, in order, in an empty folder instead of an image.

    python -m tools.image_steps FOLDER [ARGUMENT=VALUE ...] [--base=/usr/bin/python3.12]

FOLDER is the root: the image's folders (``/app``, ``/opt``, ``/cache``) lie in it.
Packages of the distribution are not installed; where apt can tell, it is asked whether they exist.
Needs nothing but Python: it runs before anything is installed.
"""

import fnmatch
import os
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
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass
class Instruction:
    """One line of a Dockerfile, continued lines joined."""

    name: str  # RUN, COPY, ...
    text: str

    def words(self) -> list[str]:
        """The words of an instruction that takes words, options left out."""
        return [word for word in shlex.split(self.text) if not word.startswith("--")]


def read(path: Path = PROJECT / "Dockerfile") -> list[Instruction]:
    """The instructions of its one stage."""
    return list(_instructions(path.read_text(encoding="utf-8")))


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


class Image:
    """A folder that the steps are run in."""

    def __init__(self, root: Path, arguments: dict[str, str], python: str) -> None:
        self.root = root.resolve()
        self.arguments = arguments
        self.environment = {"PATH": "$PATH"}
        self.folder = self.root
        shim = self.root / "bin" / "python3"  # not a link: Python would look for its library beside it
        shim.parent.mkdir(parents=True)
        shim.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} "$@"\n', encoding="utf-8")
        shim.chmod(0o755)
        self.path = f"{shim.parent}:{os.environ['PATH']}"
        self.health: list[str] = []

    def build(self) -> None:
        """Run all steps."""
        for instruction in read():
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
        for file in copied(sources, ignore_patterns()):
            into = self.folder / target / file
            into.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / file, into)

    def _run_step(self, command: str) -> None:
        if "apt-get install" not in command:
            self.run(command)
            return
        packages = re.search(r"apt-get install ((?:-\S+ )*)([^&]+)", command)[2].split()
        known = shutil.which("apt-cache") and any(Path("/var/lib/apt/lists").glob("*Packages*"))
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
    image = Image(Path(folder), given, python)
    image.build()
    image.run(shlex.join(image.health))
    image.run("python train.py --cfg job backend=warp compile=true > /dev/null")


if __name__ == "__main__":
    main(sys.argv[1:])

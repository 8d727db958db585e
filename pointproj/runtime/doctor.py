"""What runs on this machine, and what does not and why.

    python -m pointproj.runtime.doctor                              # versions, devices, backends, allocators
    python -m pointproj.runtime.doctor backend=warp device=cuda     # and 1 as exit code unless that works
    python -m pointproj.runtime.doctor allocator=rmm

A backend asked for is tried on a few points, and its result compared with the specification.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from pointproj.runtime.versions import installed_version

ASKABLE = {"backend": "auto", "device": "auto", "allocator": "torch"}
OPERATORS = ("knn", "radius")
PACKAGES = ("pointproj", "torch", "warp-lang", "triton", "nvidia-physicsnemo", "numpy", "hydra-core")
VARIANTS = {  # one for each CUDA
    "cuml": ("cuml-cu12", "cuml-cu13"),
    "rmm": ("rmm-cu12", "rmm-cu13"),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x"),
}


class Verdict(NamedTuple):
    """Whether something can be used."""

    what: str
    reason: str | None  # None: it can
    found: str = "works"  # what is known then

    def __str__(self) -> str:
        return f"{self.what}: " + (self.found if self.reason is None else f"NOT usable: {self.reason}")


def describe() -> Iterator[str]:
    """Yield the report, line by line."""
    import torch

    from pointproj.ops.registry import names

    yield "versions"
    yield f"  {'python':20s} {sys.version.split()[0]}"
    for package in PACKAGES:
        yield f"  {package:20s} {installed_version(package) or 'not installed'}"
    for library, variants in VARIANTS.items():
        versions = {variant: installed_version(variant) for variant in variants}
        installed = [f"{version} ({variant})" for variant, version in versions.items() if version]
        yield f"  {library:20s} {', '.join(installed) or 'not installed'}"
    yield f"  {'CUDA of torch':20s} {torch.version.cuda or 'none: torch was built for the CPU'}"
    yield "devices"
    yield from _devices()
    yield "backends"
    for name in names():
        for device in ("cpu", "cuda"):
            yield f"  {name:8s} {device:5s} {_usable(name, device)}"
    yield "allocators of GPU memory"
    yield f"  torch    {'yes' if torch.cuda.is_available() else 'no: torch finds no GPU'}"
    yield f"  rmm      {_yes_or_no(_rmm_obstacle())}"


def examine(asked: dict[str, str]) -> list[Verdict]:
    """Try what was asked for.

    Parameters
    ----------
    asked : dict
        Of ``backend``, ``device`` and ``allocator``, as on the command line of ``train.py``.

    Returns
    -------
    list of Verdict
        For each of them that was given.
    """
    verdicts = []
    if "backend" in asked or "device" in asked:
        verdicts.append(_try_backend(**{key: asked.get(key, ASKABLE[key]) for key in ("backend", "device")}))
    if "allocator" in asked:
        verdicts.append(_try_allocator(asked["allocator"]))
    return verdicts


def main(arguments: list[str]) -> int:
    """Print the report; 0 if what was asked for works, 1 if not, 2 if the question makes no sense."""
    asked = dict(argument.partition("=")[::2] for argument in arguments)
    unknown = [argument for argument in arguments if argument.partition("=")[0] not in ASKABLE]
    if unknown or "" in asked.values():
        wrong = unknown[0] if unknown else next(key for key, value in asked.items() if not value)
        print(f"{wrong}: expected {', '.join(f'{key}=NAME' for key in ASKABLE)}", file=sys.stderr)
        return 2
    for line in describe():
        print(line)
    verdicts = examine(asked)
    for verdict in verdicts:
        print(verdict)
    return int(any(verdict.reason for verdict in verdicts))


def _devices() -> Iterator[str]:
    import torch

    from pointproj.runtime.machine import device_name, driver_version

    yield f"  {'cpu':8s} {device_name(torch.device('cpu'))}"
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        memory = facts.total_memory / 2**30
        sm = f"sm_{facts.major}{facts.minor}"
        yield f"  {f'cuda:{number}':8s} {facts.name}, {sm}, {memory:.0f} GiB, driver {driver_version()}"


def _usable(name: str, device_type: str) -> str:
    """Which operators of a backend run on a kind of device, or why none does."""
    import torch

    if device_type == "cuda" and not torch.cuda.is_available():
        return "no: torch finds no GPU"
    obstacles = {operator: _obstacle(name, device_type, operator) for operator in OPERATORS}
    usable = [operator for operator, reason in obstacles.items() if reason is None]
    if not usable:
        return f"no: {obstacles['knn']}"
    lacking = [f"; {operator}: {reason}" for operator, reason in obstacles.items() if reason]
    return f"yes: {', '.join(usable)}{''.join(lacking)}"


def _obstacle(name: str, device_type: str, operator: str) -> str | None:
    from pointproj.ops.registry import BackendUnavailable, resolve

    try:
        resolve(name, device_type, operator)
    except BackendUnavailable as reason:
        return str(reason).removeprefix(f"backend {name!r}: ")
    return None


def _try_backend(backend: str, device: str) -> Verdict:
    """Whether a backend finds on a device what the specification finds."""
    import torch

    from pointproj.ops import reference
    from pointproj.ops.functional import knn
    from pointproj.ops.registry import BackendUnavailable
    from pointproj.runtime.devices import DeviceError, choose_device

    what = f"backend={backend} device={device}"
    generator = torch.Generator().manual_seed(0)
    query, points = (torch.rand(count, 3, generator=generator) for count in (32, 256))
    try:
        on = choose_device(device)
        rows = knn(query.to(on), points.to(on), 7, backend=backend)[1].cpu()
    except (BackendUnavailable, DeviceError, ValueError) as error:
        return Verdict(what, str(error))
    except Exception as error:  # whatever a broken installation raises is the answer
        return Verdict(what, f"{type(error).__name__}: {error}")
    exact = torch.equal(rows, reference.knn_search(query, points, 7))
    return Verdict(f"{what}, on {on}", None if exact else "its neighbours are not the specification's")


def _try_allocator(name: str) -> Verdict:
    import torch

    what = f"allocator={name}"
    if name == "rmm":
        return Verdict(what, _rmm_obstacle(), found="available")
    if name != "torch":
        return Verdict(what, "expected torch or rmm")
    return Verdict(what, None if torch.cuda.is_available() else "torch finds no GPU", found="available")


def _rmm_obstacle() -> str | None:
    from pointproj.runtime.rmm_memory import unavailable

    return unavailable()


def _yes_or_no(obstacle: str | None) -> str:
    return "yes" if obstacle is None else f"no: {obstacle}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

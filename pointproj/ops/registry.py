"""The backends: one module each, found by name.

A backend is a module of :mod:`pointproj.ops.backends`, or a folder when it holds kernels. It defines what
:class:`Backend` lists, registers its torch operators when it is imported, and imports nothing heavy
before :func:`unavailable` has been asked. Adding one means adding that module and one file in
``conf/backend/``; tests and benchmark find it by themselves.
"""

import functools
import importlib
import logging
import pkgutil
from typing import NamedTuple, Protocol

from torch import Tensor, compiler

from pointproj.ops import backends as backends_package

log = logging.getLogger(__name__)

Tables = tuple[Tensor, ...]


class BackendUnavailable(RuntimeError):  # noqa: N818 - a state of the machine, named as users say it
    """A backend asked for by name cannot run here; the message says why and what to do."""


class Clouds(NamedTuple):
    """Query and reference points as every backend takes them: packed, cloud after cloud."""

    query_points: Tensor  # (Q, 3), Q the sum of sizes; contiguous
    query_offsets: Tensor | None  # (count + 1,) int32: cloud b has rows offsets[b]:offsets[b + 1]
    reference_points: Tensor  # (N, 3)
    reference_offsets: Tensor | None  # both None: all clouds are of equal size
    count: int

    def detached(self) -> "Clouds":
        """The same points without their history."""
        return self._replace(
            query_points=self.query_points.detach(), reference_points=self.reference_points.detach()
        )


class Backend(Protocol):
    """What a backend module defines.

    ``tables`` are those of an index the caller has built, or None: then an operator builds what it needs.
    """

    OPERATORS: frozenset[str]  # of {"knn", "radius"}
    RANK: dict[str, int]  # device type -> place in the choice of backend=auto, highest first, as measured
    # Optional: WAITS: str, why calls wait for the device; see :func:`waits`.
    # Optional: unbuilt() -> str | None, how to build what it is made of, if that has yet to be done: asked
    # for by name it builds that itself, auto does not begin it.

    def unavailable(self) -> str | None:
        """None if this backend can run here, else one sentence: what is missing, and how to get it."""

    def build_index(
        self, reference_points: Tensor, reference_offsets: Tensor | None, count: int, radius: float | None
    ) -> Tables:
        """Whatever speeds up searching these packed points, as tensors; ``radius`` None is for kNN."""

    def search(self, clouds: Clouds, tables: Tables | None, k: int) -> Tensor:
        """Packed rows of the k nearest, ``(Q, k)`` int32 or int64, -1 where there are fewer."""

    def aggregate_neighbors(self, clouds: Clouds, features: Tensor, sigma: Tensor, rows: Tensor) -> Tensor:
        """Features aggregated over rows as from ``search``: ``(Q, C)`` in their dtype (fp32 or fp64).

        Differentiable twice.
        """

    def radius_aggregate(
        self, clouds: Clouds, tables: Tables | None, features: Tensor, sigma: Tensor, radius: float
    ) -> Tensor:
        """The same over all points within ``radius``."""


@functools.cache
def names() -> tuple[str, ...]:
    """Names of all backends, installed or not."""
    return tuple(
        sorted(m.name for m in pkgutil.iter_modules(backends_package.__path__) if not m.name.startswith("_"))
    )


def load(name: str) -> Backend:
    """Import the module of backend ``name``."""
    if name not in names():
        raise ValueError(f"backend must be 'auto' or one of {', '.join(names())}; got {name!r}")
    return importlib.import_module(f"{backends_package.__name__}.{name}")


def backends() -> dict[str, str | None]:
    """All backends by name: None where usable on this machine, else the reason in one sentence."""
    return {name: load(name).unavailable() for name in names()}


@functools.cache
def resolve(name: str, device_type: str, operator: str) -> tuple[str, str]:
    """Name of the backend that will run, and why.

    Parameters
    ----------
    name
        A backend, or ``"auto"``.
    device_type
        ``"cpu"`` or ``"cuda"``.
    operator
        ``"knn"`` or ``"radius"``.

    Raises
    ------
    BackendUnavailable
        If a backend asked for by name cannot do this here. It is never replaced by another.
    """
    if name != "auto":
        reason = _obstacle(name, device_type, operator)
        if reason:
            raise BackendUnavailable(f"backend {name!r}: {reason}")
        return name, "asked for by name"
    passed_over = []
    for candidate in sorted(names(), key=lambda n: -load(n).RANK.get(device_type, -1)):
        reason = _obstacle(candidate, device_type, operator) or _unbuilt(candidate)
        if reason is None:  # those of lower rank are not asked: finding out can take seconds
            break
        passed_over.append(f"{candidate}: {reason}")
    why = f"the fastest that runs on {device_type} for {operator}"
    return candidate, why + (f" (passed over: {'; '.join(passed_over)})" if passed_over else "")


def waits(name: str) -> str | None:
    """Why a backend's calls wait for the device, so that no CUDA graph can hold them, or None."""
    return getattr(load(name), "WAITS", None)


def use_options(name: str, algorithm: str | None) -> None:
    """Tell the backend asked for by name what its config says beyond that."""
    if algorithm is not None:
        load(name).use_algorithm(algorithm)


def _unbuilt(name: str) -> str | None:
    how = getattr(load(name), "unbuilt", lambda: None)()
    return how and f"faster here, once it is built; {how}"


def _obstacle(name: str, device_type: str, operator: str) -> str | None:
    backend = load(name)
    if operator not in backend.OPERATORS:
        able = [n for n in names() if operator in load(n).OPERATORS]
        return f"has no {operator} operator; use one of {', '.join(able)}"
    if device_type not in backend.RANK:
        return f"does not run on {device_type}; it runs on {', '.join(backend.RANK)}"
    return backend.unavailable()


@compiler.assume_constant_result
def choose(name: str, device_type: str, operator: str) -> str:
    """The name from :func:`resolve`, with the choice logged once and the module in :data:`modules`."""
    chosen, why = resolve(name, device_type, operator)
    if name == "auto":
        _log_once(f"backend auto -> {chosen}: {why}")
    modules[chosen] = load(chosen)
    return chosen


modules: dict[str, Backend] = {}  # a plain dict: torch.compile can look into it


@functools.cache
def _log_once(message: str) -> None:
    log.info(message)

"""The backends: what each defines, how they are found, and which one runs.

A backend is a module of :mod:`pointproj.ops.backends`, or a folder when it holds kernels. It defines what
:class:`Backend` lists, and imports nothing heavy before ``unavailable`` is called. Adding one means
adding that module and one file in ``conf/backend/``; tests and benchmark find it by themselves.
"""

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pointproj.ops import backends as backends_package
from pointproj.ops.backends import BackendUnavailable
from pointproj.ops.specification.clouds import Clouds
from pointproj.ops.specification.distances import distances_of
from pointproj.ops.specification.records import Summands, Tables

log = logging.getLogger(__name__)


class Backend(Protocol):
    """What a backend module defines; what has a default here it may leave out, see :func:`load`.

    Arguments are checked and packed before they get here: a backend does not check them again.

    Attributes
    ----------
    OPERATORS : frozenset of str
        What it has, of "knn", "radius", "lists", "aggregate", "attend", "edge_mlp", "vector_attend" and
        "farthest_points". ``"knn"`` and ``"radius"`` stand for all functions that aggregate over that search,
        ``"lists"`` for ``radius_search`` and ``radius_list``, ``"aggregate"`` for ``weighted_sums``. Without
        another operator it leaves out the functions named so.
    RANK : dict of str to int
        Device type to place in the choice of ``backend=auto``, highest first, as measured. It does not
        run on a device type that is missing here.
    WAITS : str or None
        Why calls wait for the device, so that they cannot be captured in a CUDA graph.
    EXPORTABLE : frozenset of str
        Device types on which its operators can be traced into a file that runs without this package.
    FUNCTIONS : str or None
        The module in its folder that has all functions that calls need, from ``build_index`` on, and
        ``ONE_INDEX``. It is imported when the backend is chosen. None: they stand beside the others.
    ONE_INDEX : bool
        Whether the same tables serve both searches.
    edge_sums : function or None
        ``(...arguments of edge_mlp but largest, mean, dtype)``: for networks of one activation, sums or means
        in this dtype, and how many pairs each query has, (Q,), in the dtype of sums. Any row that is none of
        the references counts as none.
    linear_of_rows : function or None
        As :func:`pointproj.ops.specification.clouds.linear_of_rows`, or None where it does not serve. Counts
        have no gradient.
    list_weights : function or None
        ``(distances, rows, row_splits, references, reference_weights, sigma, weighting)``, the weights of a
        kernel at the pairs of such lists as ``weighted_sums`` takes, but in which any row that is none of the
        references counts as none; without derivatives, and of a mean with the sum 1. Its ``weighted_sums``
        takes such rows too.
    """

    OPERATORS: frozenset[str]
    RANK: dict[str, int]
    WAITS: str | None = None
    EXPORTABLE: frozenset[str] = frozenset()
    FUNCTIONS: str | None = None
    ONE_INDEX: bool = False
    edge_sums: Callable[..., tuple[Tensor, Tensor]] | None = None
    linear_of_rows: Callable[..., Tensor] | None = None
    list_weights: Callable[..., Tensor] | None = None

    def unavailable(self) -> str | None:
        """None (default) if this backend can run here, else one sentence: what is missing, how to get it."""
        return None

    def unavailable_on(self, device_type: str) -> str | None:
        """As ``unavailable``, of what only one type of device needs, such as a driver; None by default."""
        return None

    def unbuilt(self) -> str | None:
        """How to build what it is made of, if that has yet to be done, else None (default).

        A backend that is named builds itself; ``auto`` passes over a backend that is not built.
        """
        return None

    def build_index(
        self,
        reference_points: Float[Tensor, "n 3"],
        reference_offsets: Int[Tensor, " count+1"] | None,
        count: int,
        radius: float | Float[Tensor, ""] | None,
    ) -> Tables:
        """Whatever speeds up one search among these packed points, as tensors; by default nothing, ``()``.

        Without a radius the tables are for ``search``; with one (a tensor: the largest of several) for those
        within it, which must be right for every other radius too.
        """
        return ()

    def search(self, clouds: Clouds, tables: Tables | None, k: int) -> Int[Tensor, "q k"]:
        """Packed rows of the k nearest, int32 or int64, nearest first, -1 where there are fewer.

        ``tables`` are what ``build_index`` made for this search, or None: then it builds what it needs.
        A backend that has ``nearest`` and ``knn_aggregate`` needs no function for this.
        """

    def nearest(
        self,
        clouds: Clouds,
        tables: Tables | None,
        k: int,
        index_dtype: torch.dtype,
        max_radius: float | None = None,
    ) -> tuple[Float[Tensor, "q k"], Int[Tensor, "q k"]]:
        """Distances and packed rows of the k nearest; by default made from ``search``.

        The points are detached. Distances are in their dtype, sqrt(dx * dx + dy * dy + dz * dz) with every
        operation rounded to nearest, as the reference does; inf where a neighbour is missing, NaN in the
        rows of queries that are not finite. Rows are as from ``search``, in ``index_dtype`` (int32 or
        int64). Both are new tensors, which the caller returns as they are. Neighbours beyond ``max_radius``
        are missing, or stay for the caller to remove.
        """
        rows = self.search(clouds, tables, k)
        return distances_of(clouds, rows), rows.to(index_dtype)

    def aggregate_neighbors(
        self, clouds: Clouds, summands: Summands, rows: Int[Tensor, "q k"]
    ) -> Float[Tensor, "q c"]:
        """Features aggregated over rows as from ``search``, in their dtype (fp32 or fp64).

        The first row is the neighbour that weights are relative to: the nearest, or for ``"weighted"`` the
        nearest with a reference weight. The others may have any order. One without a reference weight may be
        nearer than the first; its weight, above 1, must be finite.
        Differentiable twice in both sets of points, features and sigma.
        """

    def knn_aggregate(
        self, clouds: Clouds, tables: Tables | None, summands: Summands, k: int
    ) -> Float[Tensor, "q c"]:
        """Both at once; by default ``search``, then ``aggregate_neighbors``."""
        rows = self.search(clouds.detached(), tables, k)
        return self.aggregate_neighbors(clouds, summands, rows)

    def radius_aggregate(
        self, clouds: Clouds, tables: Tables | None, summands: Summands, radius: float
    ) -> Float[Tensor, "q c"]:
        """The same over all points within ``radius``; ``tables`` as for ``search``.

        Weights are relative to the same neighbour, which the backend finds by itself.
        """

    def radius_search(
        self,
        clouds: Clouds,
        tables: Tables | None,
        radius: float | Float[Tensor, " q"],
        k: int,
        knn_tables: Tables | None = None,
    ) -> tuple[Float[Tensor, "q k"], Int[Tensor, "q k"], Int[Tensor, " q"]]:
        """Distances and rows of the k nearest within the radius, as ``nearest``, and how many are within it.

        Of more than k, the number is k + 1. ``knn_tables`` are those of ``nearest``, if the index has them.
        Here and in ``radius_list`` the points are detached, a tensor holds the radius of each query, in
        their dtype, and whole numbers are int64.
        """

    def radius_list(
        self, clouds: Clouds, tables: Tables | None, radius: float | Float[Tensor, " q"], capacity: int
    ) -> tuple[Int[Tensor, " q+1"], Int[Tensor, " capacity"], Float[Tensor, " capacity"]]:
        """Where each query's neighbours begin (also beyond the capacity), their packed rows, and distances.

        All rows within the radius, in ascending order for each query, as far as there is room; -1 in slots
        that are not used. Distances as from ``nearest``, there inf.
        """

    def weighted_sums(
        self,
        features: Float[Tensor, "n c"],
        weights: Float[Tensor, "q k"] | Float[Tensor, " slots"],
        rows: Int[Tensor, "q k"] | Int[Tensor, " slots"],
        row_splits: Int[Tensor, " q+1"] | None,
    ) -> Float[Tensor, "q c"]:
        """The sum of weight times feature over each query's pairs, all in fp32 or in fp64; 0 without any.

        The packed rows are int64, N for none: padded lists, or with ``row_splits`` one list after the other.
        Weights are finite also where there is no neighbour. Differentiable twice in features and weights.
        """

    def attend(
        self,
        queries: Float[Tensor, "q channels"],
        keys: Float[Tensor, "n channels"],
        values: Float[Tensor, "n channels"],
        bias: Float[Tensor, "pairs heads"],
        rows: Int[Tensor, "q k"] | Int[Tensor, " slots"],
        row_splits: Int[Tensor, " q+1"] | None,
        heads: int,
        scale: float,
    ) -> Float[Tensor, "q channels"]:
        """Softmax of ``scale * <query, key> + bias`` over each query's rows, times the values; 0 without any.

        All of one dtype, fp32 or fp64, the heads' channels one after another; ``bias`` may have no row. The
        packed rows are int64, -1 for none: padded lists, or with ``row_splits`` one list after the other.
        Differentiable twice in all but the rows.
        """

    def edge_mlp(
        self,
        reference_points: Float[Tensor, "n dims"],
        hidden: Float[Tensor, "n channels_1"],
        factors: Float[Tensor, "n channels"],
        query_points: Float[Tensor, "q dims"],
        of_queries: Float[Tensor, "q channels_1"],
        weights: Float[Tensor, "q k"] | Float[Tensor, " slots"],
        weight_1: Float[Tensor, "channels_1 places"],
        bias_1: Float[Tensor, " channels_1"],
        weight_2: Float[Tensor, "channels_2 channels_1"],
        bias_2: Float[Tensor, " channels_2"],
        weight_3: Float[Tensor, "channels_3 channels_2"],
        bias_3: Float[Tensor, " channels_3"],
        weight_4: Float[Tensor, "channels_4 channels_3"],
        bias_4: Float[Tensor, " channels_4"],
        rows: Int[Tensor, "q k"] | Int[Tensor, " slots"],
        row_splits: Int[Tensor, " q+1"] | None,
        activation: str,
        slope: float,
        active_at_end: bool,
        with_distance: bool,
        largest: bool,
    ) -> Float[Tensor, "q channels"]:
        """Sums of ``v_ij = weight_ij factor_j MLP(...)`` over each query's pairs, or the largest.

        It is 0 without any pair. The first layer makes ``hidden_j + of_queries_i``; given ``bias_1``, it adds
        ``weight_1 r_ij + bias_1``, ``r_ij`` being reference minus query point, and ``with_distance``
        ``|r_ij|`` behind it. Else these are in hidden and of_queries, points are (N, 0) and (Q, 0), and
        weight_1 is (channels_1, 0). The other layers follow, each after the activation, which
        ``active_at_end`` follows the last too. Layers and weights have the dtype of sums, fp32 or fp64;
        hidden, factors and of_queries may be narrower. Tensors without elements stand for what is not given.

        The packed rows are int64, N for none: padded lists, or with ``row_splits`` one list after the other.
        Differentiable twice in all tensors but the rows. Of equally large values the first is chosen.
        """

    def vector_attend(
        self,
        reference_points: Float[Tensor, "n dims"],
        keys: Float[Tensor, "n channels"],
        values: Float[Tensor, "n channels"],
        query_points: Float[Tensor, "q dims"],
        queries: Float[Tensor, "q channels"],
        position_layers: list[Tensor],
        score_layers: list[Tensor],
        rows: Int[Tensor, "q k"] | Int[Tensor, " slots"],
        row_splits: Int[Tensor, " q+1"] | None,
        activations: tuple[str, float, bool, str, float, bool],
    ) -> Float[Tensor, "q channels"]:
        """Vector attention: see :func:`pointproj.vector_attend`, for packed tensors; 0 without any pair.

        Layers are weight, bias, weight, and so on, of one to four layers; activations the name, the slope and
        whether one is at the end, of positions, then of scores. All but the points have one dtype, fp32 or
        fp64. Rows are as for ``edge_mlp``. Differentiable twice in all tensors but the rows.
        """

    def farthest_points(
        self,
        points: Float[Tensor, "n 3"],
        offsets: Int[Tensor, " clouds+1"] | None,
        starts: Int[Tensor, " clouds"],
        steps: int,
    ) -> Int[Tensor, "clouds steps"]:
        """Packed rows of each cloud, int64, in the order in which they are chosen, from its start on.

        Of equally far points the lower row is first, those that are not finite come last, and a cloud without
        points has -1.
        """


# The parts with a default. Modules do not inherit, so they are given what they leave out.
VALUES = ("WAITS", "EXPORTABLE", "FUNCTIONS", "ONE_INDEX", "edge_sums", "linear_of_rows", "list_weights")
FUNCTIONS = ("unavailable", "unavailable_on", "unbuilt", "build_index", "nearest", "knn_aggregate")


@functools.cache
def names() -> tuple[str, ...]:
    """Names of all backends, installed or not."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(backends_package.__path__)))


def load(name: str) -> Backend:
    """Import the module of backend ``name``."""
    if name not in names():
        raise ValueError(f"backend must be 'auto' or one of {', '.join(names())}; got {name!r}")
    return _with_defaults(importlib.import_module(f"{backends_package.__name__}.{name}"))


def functions_of(name: str) -> Backend:
    """Import the module that has the functions of backend ``name``, which can run here."""
    module = load(name)
    if module.FUNCTIONS is None:
        return module
    return _with_defaults(importlib.import_module(f"{module.__name__}.{module.FUNCTIONS}"))


def _with_defaults(module: Any) -> Backend:
    for name in VALUES:
        vars(module).setdefault(name, getattr(Backend, name))
    for name in FUNCTIONS:
        vars(module).setdefault(name, functools.partial(getattr(Backend, name), module))
    return module


def backends() -> dict[str, str | None]:
    """All backends by name: None where usable on this machine, else the reason in one sentence."""
    return {name: load(name).unavailable() for name in names()}


@functools.cache
def resolve(name: str, device_type: str, operator: str) -> tuple[str, str]:
    """Name of the backend that will run one of ``OPERATORS``, and why, as a phrase for the log.

    Raises
    ------
    BackendUnavailable
        If a named backend cannot do this here. It is never replaced by another.
    """
    if name != "auto":
        reason = _obstacle(name, device_type, operator)
        if reason:
            raise BackendUnavailable(f"backend {name!r}: {reason}")
        return name, "asked for by name"
    passed_over = []
    for candidate in _fastest_first(device_type):
        reason = _obstacle(candidate, device_type, operator)
        if reason is None and (how := load(candidate).unbuilt()):
            reason = f"faster here, once it is built; {how}"
        if reason is None:  # whether others could run is not looked up, which can take seconds
            break
        passed_over.append(f"{candidate}: {reason}")
    why = f"the fastest that runs on {device_type} for {operator}"
    return candidate, why + (f" (passed over: {'; '.join(passed_over)})" if passed_over else "")


def exportable(device_type: str) -> tuple[str, ...]:
    """Names of the backends whose operators can be exported for a device type, the fastest first."""
    return tuple(name for name in _fastest_first(device_type) if device_type in load(name).EXPORTABLE)


def _fastest_first(device_type: str) -> list[str]:
    return sorted(names(), key=lambda name: -load(name).RANK.get(device_type, -1))


def _obstacle(name: str, device_type: str, operator: str) -> str | None:
    backend = load(name)
    if operator not in backend.OPERATORS:
        able = [n for n in names() if operator in load(n).OPERATORS]
        return f"has no {operator} operator; use one of {', '.join(able)}"
    if device_type not in backend.RANK:
        return f"does not run on {device_type}; it runs on {', '.join(backend.RANK)}"
    return backend.unavailable() or backend.unavailable_on(device_type)


def choose(name: str, device_type: str, operator: str) -> str:
    """The name from :func:`resolve`, with the choice logged once and its functions in :data:`modules`."""
    chosen, why = resolve(name, device_type, operator)
    if name == "auto":
        _log_once("backend auto -> %s: %s", chosen, why)
    if not hasattr(modules, chosen):
        setattr(modules, chosen, functions_of(chosen))
    return chosen


# As torch.compiler.assume_constant_result marks it, but without importing the compiler: that takes seconds.
choose._dynamo_marked_constant = True


class _Modules:
    """The functions of backends by name, as attributes: a tracer also sees those loaded while it runs."""

    def __getitem__(self, name: str) -> Backend:
        return getattr(self, name)


modules = _Modules()
_log_once = functools.cache(log.info)

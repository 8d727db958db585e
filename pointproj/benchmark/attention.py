"""The workload ``attend``: attention over the 16 nearest of each point, over lists that are ready.

Beside ``pointproj.attend`` what users write with torch, which gathers (points, k, channels), and the
attention of PhysicsNeMo's point transformer, which scores pairs by a network and so computes something else.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pointproj
from pointproj.benchmark.calls import captured
from pointproj.benchmark.config import EXECUTIONS, BenchConfig
from pointproj.benchmark.contenders import backend_names, executions, missing_backend
from pointproj.benchmark.parity import relative_error
from pointproj.benchmark.peers import OURS, import_failure
from pointproj.benchmark.recorder import NoTime, Part, Recorder
from pointproj.benchmark.results import MISSING
from pointproj.benchmark.workloads import uniform
from pointproj.ops.registry import load

SIZES = {"cuda": (10**5, 10**6), "cpu": (10**4,)}
K, CHANNELS, HEADS = 16, 64, 4
CHECKED = 256  # queries that are compared with attention in fp64
MODES = ("aggregate", "operator")


class Asked(NamedTuple):
    """Points, what stands at them, and the neighbours of each."""

    points: Tensor
    neighbors: pointproj.Neighbors
    tensors: tuple[Tensor, Tensor, Tensor]  # queries, keys, values (N, CHANNELS)


Function = Callable[[Asked], Tensor]
Heads = Callable[[Tensor, Tensor, Tensor], Tensor]  # (N, H, D), (N, K, H, D) twice to (N, H, D)


class Attention(NamedTuple):
    """Who attends; ``make`` gives the function, of a device."""

    name: str
    package: str
    make: Callable[[torch.device], Function]
    executions: tuple[str, ...] = ("eager",)
    kind: str = "peer"
    imports: str = "torch"
    note: str = ""  # where it computes something else, which is then not compared


def ours(backend: str, device: torch.device) -> Function:
    return lambda asked: pointproj.attend(*asked.tensors, asked.neighbors, heads=HEADS, backend=backend)


def gathered(attend: Heads, device: torch.device) -> Function:
    """Gather keys and values of the neighbours."""

    def function(asked: Asked) -> Tensor:
        query, *others = (tensor.unflatten(-1, (HEADS, -1)) for tensor in asked.tensors)
        return attend(query, *(other[asked.neighbors.indices] for other in others)).flatten(1)

    return function


def by_torch(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Torch's own function, with a row of one query for each point and head."""
    found = scaled_dot_product_attention(query[:, :, None], keys.transpose(1, 2), values.transpose(1, 2))
    return found[:, :, 0]


def by_einsum(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Products, softmax and sums written out, for a compiler to fuse."""
    weights = torch.einsum("nhd,nkhd->nkh", query / math.sqrt(query.shape[-1]), keys).softmax(1)
    return torch.einsum("nkh,nkhd->nhd", weights, values)


def physicsnemo(device: torch.device) -> Function:
    """The attention of its block alone: neither search nor what follows."""
    from physicsnemo.nn.module.point_transformer_attention import LocalPointTransformerBlock

    sizes = {"dim": CHANNELS, "num_heads": HEADS, "neighbor_k": K, "dilation": 1, "mlp_ratio": 1}
    block = LocalPointTransformerBlock(**sizes, dropout=0.0, use_te=False).to(device)
    return lambda asked: block._attend(*asked.tensors[:2], *[asked.points] * 2, asked.neighbors.indices, None)


OTHERS = (
    Attention("gather + SDPA", "torch", partial(gathered, by_torch)),
    Attention("gather + einsum", "torch", partial(gathered, by_einsum), EXECUTIONS[:2]),
    Attention(
        "PhysicsNeMo",
        "nvidia-physicsnemo",
        physicsnemo,
        imports="physicsnemo.nn.module.point_transformer_attention",
        note="vector attention: a network scores each pair, with projections of its own",
    ),
)


def parts(config: BenchConfig, device_type: str) -> Iterator[Part]:
    """One for each size: backends with attention of their own, then the others."""
    if "attend" not in config.workloads:
        return
    names = [n for n in backend_names(config.backends) if "attend" in load(n).OPERATORS]
    backends = [Attention(n, "pointproj", partial(ours, n), EXECUTIONS, kind="backend") for n in names]
    able = executions(config, device_type)
    planned = [
        (of, mode, execution)
        for of in (*backends, *(OTHERS if config.peers is None else ()))
        for mode in MODES
        for execution in able
        if mode in config.modes
        and execution in of.executions
        # A backend's call is one operator: a compiler gains nothing.
        and (config.execution is not None or of.kind == "peer" or execution != "compiled")
    ]
    for size in sorted(config.sizes or SIZES[device_type]):
        yield Part(len(planned), partial(_measure, size=size, planned=planned))


def question(size: int, device: torch.device) -> Asked:
    """Uniform points with random queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    points = uniform(size)(generator).float().to(device)
    tensors = (torch.randn(size, CHANNELS, generator=generator) for _ in range(3))
    distances, indices = pointproj.knn(points, points, K)
    return Asked(points, pointproj.Neighbors(indices.long(), distances), tuple(t.to(device) for t in tensors))


class Expected:
    """Attention in fp64 of some queries, with the gradients of all tensors."""

    def __init__(self, asked: Asked) -> None:
        generator = torch.Generator().manual_seed(1)
        size = len(asked.points)
        self.rows = torch.randperm(size, generator=generator)[:CHECKED].to(asked.points.device)
        self.numbers = torch.randn(size, CHANNELS, generator=generator).to(asked.points.device)
        self.upstream = torch.zeros_like(self.numbers)
        self.fill_upstream(checked_only=True)
        leaves = [tensor.double().requires_grad_() for tensor in asked.tensors]
        query, key, value = (leaf.unflatten(-1, (HEADS, -1)) for leaf in leaves)
        near = asked.neighbors.indices[self.rows]
        of_rows = by_einsum(query[self.rows], key[near], value[near]).flatten(1)
        gradients = torch.autograd.grad(of_rows, leaves, self.upstream[self.rows].double())
        self.results = of_rows.detach(), *gradients

    def fill_upstream(self, *, checked_only: bool) -> None:
        """Random numbers; zeros for queries that are not checked."""
        self.upstream.zero_() if checked_only else self.upstream.copy_(self.numbers)
        self.upstream[self.rows] = self.numbers[self.rows]

    def error(self, found: tuple[Tensor, ...]) -> float:
        """The largest error of values and gradients, relative in norm."""
        got = found[0][self.rows], *found[1:]
        return max(relative_error(each, of) for each, of in zip(got, self.results, strict=False))


def _measure(recorder: Recorder, size: int, planned: list[tuple[Attention, str, str]]) -> None:
    asked, device = question(size, recorder.device), recorder.device
    expected = Expected(asked)
    sizes = {"queries": size, "references": size, "k": K, "channels": CHANNELS}
    for of, mode, execution in planned:

        def make(of: Attention = of, mode: str = mode, execution: str = execution) -> Callable:
            absent = import_failure(of.imports)
            if of.kind == "backend":
                absent = missing_backend(of.name, device.type, "knn")
            if absent:
                raise NoTime(MISSING, absent)
            expected.fill_upstream(checked_only=True)
            return _call(of.make(device), asked, expected.upstream, mode, execution)

        def error_of(found: tuple[Tensor, ...], of: Attention = of) -> float | None:
            error = None if of.note else expected.error(found)
            expected.fill_upstream(checked_only=False)  # from now on every query counts
            return error

        blank = recorder.blank(
            **{"workload": "attend", "operator": "attend", "mode": mode, "execution": execution, **sizes},
            **{"contender": of.name, "kind": of.kind, "package": of.package, "note": of.note},
        )
        recorder.record(blank, partial(recorder.timed, make=make, error_of=error_of, allowed=OURS))
        torch.compiler.reset()


def _call(function: Function, asked: Asked, upstream: Tensor, mode: str, execution: str) -> Callable:
    compiled = torch.compile(function, fullgraph=True) if execution == "compiled" else function
    leaves = [tensor.detach().clone().requires_grad_() for tensor in asked.tensors]
    given = asked if mode == "aggregate" else asked._replace(tensors=tuple(leaves))

    def call() -> tuple[Tensor, ...]:
        if mode == "aggregate":
            with torch.no_grad():
                return (compiled(given),)
        values = compiled(given)
        return values.detach(), *torch.autograd.grad(values, leaves, upstream, allow_unused=True)

    return captured(call, upstream.device) if execution == "captured" else call

"""Clouds, radii and temperatures at the ends of what a dtype holds: ``python -m tests.ops.extremes DEVICE``.

Every search is compared with the specification, on every backend that runs here. A call that never returns
cannot be stopped from inside, so this runs in a process of its own, which dies if a case takes a minute; what
it printed last is that case.
"""

import signal
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import pointproj
from pointproj.ops.backends import BackendUnavailable
from pointproj.ops.registry import load, names, resolve
from pointproj.ops.specification import reference

SECONDS = 60  # of a case; the slowest takes milliseconds once its kernels are built
K = 4


def _uniform(rows: int, low: float, high: float, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.rand(rows, 3, generator=generator, dtype=torch.float64)
    return (low + (high - low) * made).to(dtype)


def _magnitudes(dtype: torch.dtype, seed: int) -> Tensor:
    """Coordinates of every size, down to subnormal ones."""
    limits = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(64, 3, generator=generator, dtype=torch.float64)
    lowest, highest = (torch.tensor(x, dtype=torch.float64).log() for x in (limits.tiny, limits.max))
    signs = torch.randint(2, (64, 3), generator=generator) * 2 - 1
    return (signs * ((lowest - 4) + (highest - lowest + 4) * exponents).exp()).to(dtype)


def _clouds(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    limits = torch.finfo(dtype)
    most, root = limits.max, limits.tiny**0.5
    dense = _uniform(600, 0, 1, dtype, 0)  # more than one cell of the cell lists holds
    yield "unit", _uniform(90, 0, 1, dtype, 1)
    yield "all of the dtype", torch.cat([_uniform(60, -0.5, 0.5, dtype, 2) * 2 * most, dense[:9]])
    yield "far from the origin", _uniform(60, 0.9, 1, dtype, 3) * most
    yield "squares that overflow", _uniform(60, -1, 1, dtype, 4) * 8 * most**0.5
    yield "squares that are subnormal", _uniform(60, -1, 1, dtype, 5) * root
    yield "squares that vanish", _uniform(60, -1, 1, dtype, 6) * root * 1e-6
    yield "subnormal", _uniform(60, -1, 1, dtype, 7) * limits.tiny
    yield "every size", _magnitudes(dtype, 8)
    yield "dense but for one", torch.cat([dense, torch.full((1, 3), most, dtype=dtype)])
    yield "dense but for two", torch.cat([dense, torch.tensor([[most, 0, 0], [-most, 0, 0]], dtype=dtype)])
    yield "dense inside of a cell", torch.cat([dense * root, _uniform(40, -1, 1, dtype, 9)])
    beside = torch.tensor([[1e30, 0, 0], [1e-30, 0, 0], [0.0, 0, 0], [0, 1e-30, 0]], dtype=dtype)
    yield "three beside a large number", beside
    line = torch.zeros(90, 3, dtype=dtype)
    line[:, 1] = torch.linspace(-most / 2, most / 2, 90, dtype=dtype)
    yield "line through the dtype", line
    yield "one place", torch.full((300, 3), most, dtype=dtype)


def _radii(dtype: torch.dtype) -> tuple[float, ...]:
    limits = torch.finfo(dtype)
    beyond = 10.0 * limits.max if dtype == torch.float32 else sys.float_info.max
    root = limits.tiny**0.5
    if dtype == torch.float64:
        return beyond, 1.0, root * 1e-6
    return beyond, limits.max, limits.max**0.5, 1.0, root, root * 1e-6, limits.tiny / 8, 5e-324


def _check(name: str, points: Tensor, queries: Tensor, radius: float, backend: str, device: str) -> None:
    expected_rows, expected_counts = reference.radius_search(queries, points, radius, K)
    splits, listed = reference.radius_list(queries, points, radius)
    features = torch.arange(1.0, len(points) + 1, dtype=points.dtype)[:, None] / len(points)
    sums = reference.radius_aggregate(queries, points, features, radius)
    here = [t.to(device) for t in (queries, points)]
    lists = backend if "lists" in load(backend).OPERATORS else "torch"
    padded = pointproj.radius_neighbors(*here, radius, max_neighbors=K, backend=lists)
    pairs = pointproj.radius_neighbors(*here, radius, capacity=len(listed) + 1, backend=lists)
    each = torch.full((len(queries),), min(radius, torch.finfo(points.dtype).max), dtype=points.dtype)
    each = each.clamp(min=torch.finfo(points.dtype).tiny).to(device)
    padded_by_each = pointproj.radius_neighbors(*here, each, max_neighbors=K, backend=lists)
    pairs_by_each = pointproj.radius_neighbors(*here, each, capacity=len(listed) + 1, backend=lists)
    for found in (padded, padded_by_each):
        _same(f"{name}: nearest within", found.indices, expected_rows)
        _same(f"{name}: counts", found.counts, expected_counts)
    for found in (pairs, pairs_by_each):
        _same(f"{name}: row splits", found.row_splits, splits)
        _same(f"{name}: list", found.indices[:-1], listed)
    index = pointproj.build_index(here[1], radius=radius, backend=backend)
    for known in (None, index):
        aggregated = pointproj.radius_aggregate(
            *here, features.to(device), radius, index=known, backend=backend
        )
        torch.testing.assert_close(
            aggregated.cpu(), sums, rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: sums\n{m}"
        )
    _, rows = pointproj.knn(*here, min(K, len(points)), max_radius=radius, backend=backend)
    _same(f"{name}: knn", rows, expected_rows[:, : rows.shape[1]])


def _same(name: str, got: Tensor, expected: Tensor) -> None:
    if not torch.equal(got.cpu(), expected):
        wrong = int((got.cpu() != expected).any(-1).sum()) if got.shape == expected.shape else got.shape
        raise AssertionError(f"{name}: {wrong} rows differ")


def _cases(backend: str, device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    for dtype in (torch.float32, torch.float64):
        for cloud, points in _clouds(dtype):
            queries = torch.cat([points[::7], points[:1] * 0, -points[:2]])
            for radius in _radii(dtype):
                name = f"{backend}, {dtype}, {cloud}, radius {radius}"
                yield name, lambda n=name, p=points, q=queries, r=radius: _check(n, p, q, r, backend, device)


def main(device: str) -> int:
    """Run all cases; the number of those that were wrong."""
    failures = 0
    for backend in sys.argv[2:] or names():
        try:
            for operator in ("knn", "radius"):
                resolve(backend, device, operator)
        except BackendUnavailable as reason:
            print(f"without {backend}: {reason}")
            continue
        for dtype in (torch.float32, torch.float64):  # builds kernels, for which there is no limit
            _, points = next(_clouds(dtype))
            _check("unit", points, points, 1.0, backend, device)
        for name, case in _cases(backend, device):
            print(name, flush=True)
            signal.alarm(SECONDS)
            try:
                case()
            except AssertionError as error:
                failures += 1
                print(f"WRONG {error}")
            signal.alarm(0)
    print(f"{failures} wrong")
    return failures


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1]), 1))

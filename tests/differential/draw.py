"""One random call, the same for the same seed and number on every machine."""

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from pointproj.ops.specification.reference import FINITE_SUPPORT, KERNELS

OPERATORS = ("knn", "knn_aggregate", "radius_aggregate", "padded", "csr", "aggregate")
OF_FEATURES = ("knn_aggregate", "radius_aggregate", "aggregate")
STEP = 2.0**-6  # of coordinates in a periodic box: sums and squares of them are exact in fp32
SMALLEST, LARGEST = 1e-35, 1e35  # of sigma and radius, which fp32 must hold
# Of the scale of coordinates, as powers of 10. The dtype must hold squares of distances, and up to the fourth
# power of a sigma that is 10^5 times smaller or larger: where they vanish, so do derivatives.
EXPONENTS = {torch.float32: (-12, 30), torch.float64: (-30, 30)}
EXPONENTS_OF_SUMS = {torch.float32: (-4, 4), torch.float64: (-30, 30)}


@dataclass
class Call:
    """What is called, and with what.

    Attributes
    ----------
    operator : str
        One of :data:`OPERATORS`; ``aggregate`` runs over the lists of ``form``.
    leaves : dict of str to Tensor
        The differentiable inputs by name, in the layout in memory that they are given in.
    offsets : tuple of two Tensors, or None
        Of queries and reference points of a ragged batch.
    form : {"nearest", "padded", "csr"}
        Of the neighbours: the k nearest, the k nearest within the radius, or all within the radius.
    rows : {"all", "holes", "shuffled"} or None
        Neighbours that are given: nearest first, without some, or without some in any order.
    index_radius : float, None or ...
        What the index is built with; ...: none is given.
    """

    number: int
    operator: str
    form: str
    leaves: dict[str, Tensor]
    offsets: tuple[Tensor, Tensor] | None
    k: int = 1
    radius: float | Tensor | None = None
    capacity: str = "exact"
    box: tuple[float, ...] | None = None
    sigma: float = 0.1
    kernel: str = "exponential"
    reduce: str = "mean"
    power: float = 2.0
    eps: float = 1e-8
    rows: str | None = None
    rows_dtype: torch.dtype = torch.int64
    index_radius: object = ...
    layouts: list[str] = field(default_factory=list)
    seed: int = 0

    def ends(self) -> tuple[list[int], list[int]]:
        """Where clouds begin and end in the packed queries and reference points."""
        if self.offsets:
            return tuple(o.tolist() for o in self.offsets)
        query, points = self.leaves["query_points"], self.leaves["reference_points"]
        count = len(query) if query.ndim == 3 else 1
        return tuple([b * t.shape[-2] for b in range(count + 1)] for t in (query, points))

    def generator(self) -> np.random.Generator:
        """For what is drawn later: upstream gradients and directions."""
        return np.random.default_rng([self.seed, self.number, 1])

    def __str__(self) -> str:
        shapes = ", ".join(f"{n} {tuple(t.shape)} {str(t.dtype)[6:]}" for n, t in self.leaves.items())
        options = f"k={self.k} radius={self.radius if not isinstance(self.radius, Tensor) else 'tensor'}"
        return (
            f"{self.operator} {self.form} {self.kernel} {self.reduce} {options} sigma={self.sigma:.3g} "
            f"box={self.box} rows={self.rows} index={self.index_radius} capacity={self.capacity} "
            f"{'ragged ' if self.offsets else ''}layouts={','.join(self.layouts)}; {shapes}"
        )


def draw(seed: int, number: int, operators: tuple[str, ...] = OPERATORS, kernels=KERNELS) -> Call:
    """The call of this number."""
    return _Drawing(seed, number, operators, kernels).call()


class _Drawing:
    def __init__(self, seed: int, number: int, operators: tuple[str, ...], kernels: tuple[str, ...]) -> None:
        self.rng = np.random.default_rng([seed, number])
        self.seed, self.number = seed, number
        self.operator = self.one_of(operators)
        self.kernels = kernels
        lists = {"knn": ("nearest",), "knn_aggregate": ("nearest",), "padded": ("padded",)}
        lists |= {"csr": ("csr",), "radius_aggregate": ("csr",)}
        self.form = self.one_of(lists.get(self.operator, ("nearest", "padded", "csr")))
        self.positions = self.one_of((torch.float32, torch.float32, torch.float64))
        self.dims = 2 if self.chance(0.2) else 3
        self.periodic = self.operator not in ("knn_aggregate", "radius_aggregate") and self.chance(0.2)
        self.scale = self.draw_scale()
        self.layouts: list[str] = []

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one_of(self, choices):
        return choices[self.rng.integers(len(choices))]

    def between(self, low: float, high: float) -> float:
        """10 to a power in between, as fp32 holds it."""
        return float(np.float32(10 ** self.rng.uniform(low, high)))

    def draw_scale(self) -> float:
        if self.periodic:
            return float(2.0 ** self.one_of((0, 0, 0, -20, 20)))
        if self.chance(0.15):
            exponents = EXPONENTS_OF_SUMS if self.operator in OF_FEATURES else EXPONENTS
            return self.between(*exponents[self.positions])
        return self.one_of((1.0, 1.0, self.between(-3, 3)))

    def size(self, most: int) -> int:
        kind = self.rng.random()
        if kind < 0.1:
            return 0 if kind < 0.05 else 1
        return int(self.rng.integers(1, 9 if kind < 0.35 else most // 3 if kind < 0.8 else most))

    def call(self) -> Call:
        batch = self.one_of(("single", "single", "dense", "ragged"))
        clouds = 1 if batch == "single" else int(self.rng.integers(1, 5))
        most = 200 if clouds == 1 else 80
        sizes = [(self.size(most), self.size(most)) for _ in range(clouds)]
        if batch == "dense":
            sizes = sizes[:1] * clouds
        needs_points = self.form == "nearest"
        if needs_points and not sum(n for _, n in sizes):
            sizes = [(q, 3) for q, _ in sizes]
        points = [self.points(n) for _, n in sizes]
        queries = [self.queries(q, p) for (q, _), p in zip(sizes, points, strict=True)]
        shifted = not self.periodic and self.chance(0.1)
        shift = self.scale * self.between(0, 5) * self.rng.normal(size=self.dims) if shifted else 0.0
        inside = self.periodic and self.chance(0.3)
        box = self.box() if self.periodic else None
        points, queries = ([self.placed(p, shift) for p in c] for c in (points, queries))
        if inside:
            lengths = np.array([length if np.isfinite(length) else 1e30 for length in box])
            points = [np.abs(p) % lengths for p in points]
        elif self.chance(0.1):
            self.spoil(points + queries)
        dense = batch == "dense"
        leaves = {n: self.leaf(c, dense) for n, c in zip(NAMES, (queries, points), strict=True)}
        call = Call(
            self.number, self.operator, self.form, leaves, self.offsets(sizes) if batch == "ragged" else None
        )
        call.box, call.seed, call.layouts = box, self.seed, self.layouts
        self.neighborhood(call, inside)
        if self.operator in OF_FEATURES:
            self.weighting(call, dense)
        return call

    def points(self, size: int) -> np.ndarray:
        """Around 1 in size; many equal distances in half of the kinds."""
        shape = size, self.dims
        match self.one_of(
            ("uniform", "uniform", "normal", "lattice", "repeated", "coincident", "flat", "far")
        ):
            case "uniform":
                return self.rng.uniform(-1, 1, shape)
            case "normal":
                return self.rng.normal(size=shape)
            case "lattice":
                return self.rng.integers(-3, 4, shape) / 4
            case "repeated":
                few = self.rng.normal(size=(5, self.dims))
                return few[self.rng.integers(0, 5, size)]
            case "coincident":
                return np.broadcast_to(self.rng.normal(size=self.dims), shape).copy()
            case "flat":
                points = self.rng.uniform(-1, 1, shape)
                points[:, 0] = 0.25
                return points
            case _:
                return self.rng.normal(size=shape) * 10 ** self.rng.uniform(-3, 3, (size, 1))

    def queries(self, size: int, points: np.ndarray) -> np.ndarray:
        """As the reference points, or some of them and others."""
        queries = self.points(size)
        if len(points) and self.chance(0.4):
            taken = self.rng.random(size) < self.one_of((0.3, 1.0))
            queries[taken] = points[self.rng.integers(0, len(points), int(taken.sum()))]
        return queries

    def placed(self, points: np.ndarray, shift: np.ndarray | float) -> np.ndarray:
        if self.periodic:
            points = np.round(points.clip(-15, 15) / STEP) * STEP
        return points * self.scale + shift

    def spoil(self, clouds: list[np.ndarray]) -> None:
        for points in clouds:
            for row in np.flatnonzero(self.rng.random(len(points)) < 0.1):
                points[row, self.rng.integers(self.dims)] = self.one_of((np.nan, np.inf, -np.inf))

    def offsets(self, sizes: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        dtype = self.one_of((torch.int32, torch.int64))
        return tuple(torch.tensor([0, *accumulate(s)], dtype=dtype) for s in zip(*sizes, strict=True))

    def leaf(self, clouds: list[np.ndarray], dense: bool) -> Tensor:
        points = torch.from_numpy(np.stack(clouds) if dense else np.concatenate(clouds))
        return self.laid_out(points.to(self.positions))

    def laid_out(self, values: Tensor) -> Tensor:
        """The values in another layout in memory; an expanded tensor has others, repeated."""
        kind = self.one_of(("contiguous",) * 4 + ("transposed", "strided", "offset", "expanded"))
        self.layouts.append(kind)
        return laid_out(values, kind)

    def box(self) -> tuple[float, ...]:
        lengths = [float(self.rng.integers(40, 200) * STEP * self.scale) for _ in range(self.dims)]
        if self.chance(0.3):
            lengths[self.rng.integers(self.dims)] = float("inf")
        return tuple(lengths)

    def neighborhood(self, call: Call, inside: bool) -> None:
        """k, radii, indices and lists that are given."""
        query, points = call.leaves["query_points"], call.leaves["reference_points"]
        most = points.shape[-2]
        if self.form == "nearest":
            call.k = most if self.chance(0.1) else int(self.rng.integers(1, min(most, 40) + 1))
        else:
            call.k = int(self.rng.integers(1, 50))
        if self.form != "nearest" or self.chance(0.3):
            call.radius = self.radius(call)
        if self.form != "nearest" and self.operator != "radius_aggregate" and self.chance(0.25):
            radii = call.radius * torch.from_numpy(self.rng.uniform(0.01, 1.0, query.shape[:-1]))
            call.radius = self.laid_out(radii.to(self.positions).clamp(min=SMALLEST))
        # A list in a box is cut before it is sorted: which pairs of its last query remain is not said.
        call.capacity = self.one_of(("none", "exact", "more", *(() if self.periodic else ("fewer",))))
        if self.operator == "knn_aggregate" and self.chance(0.25):
            call.rows = self.one_of(("all", "holes", "shuffled"))
            call.rows_dtype = self.one_of((torch.int32, torch.int64))
        if self.chance(0.3) and (inside or not self.periodic):
            call.index_radius = self.one_of((None, self.radius(call)))

    def radius(self, call: Call) -> float:
        """Much less than distances are, much more, about as they are, or exactly one of them."""
        if not call.box and self.chance(0.4) and (distance := self.distance(call)):
            return distance
        radius = self.scale * self.one_of((0.25, 0.5, self.between(-2, 1), self.between(-2, 1), 1e-4, 1e4))
        if call.box:
            radius = min(radius, 0.499 * min(call.box))
        return float(np.float32(min(max(radius, SMALLEST), LARGEST)))

    def distance(self, call: Call) -> float | None:
        """Of a query and a reference point, rounded as their dtype is; None if it is no radius."""
        clouds = (call.leaves[n].reshape(-1, self.dims).numpy() for n in NAMES)
        query, point = (cloud[self.rng.integers(len(cloud))] if len(cloud) else None for cloud in clouds)
        if query is None or point is None:
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            squares = np.square(query - point)
            squared = squares[0] + squares[1] if self.dims == 2 else squares[0] + squares[1] + squares[2]
            distance = float(np.sqrt(squared))
        return distance if SMALLEST <= distance <= LARGEST else None

    def weighting(self, call: Call, dense: bool) -> None:
        """Features, kernel, reduction, and weights that are given."""
        points = call.leaves["reference_points"]
        call.kernel = self.one_of(self.kernels) if self.chance(0.8) else self.kernels[0]
        reductions = ("mean", "sum", "max") if self.operator == "aggregate" else ("mean", "sum")
        call.reduce = self.one_of(reductions)
        if call.kernel in FINITE_SUPPORT and call.radius is None:
            call.radius = self.radius(call)
        call.power, call.eps = self.one_of((1.0, 2.0, 3.5)), self.eps()
        dtypes = torch.float32, torch.float32, torch.float64
        if call.reduce != "max":  # rounded to so few bits, its largest would be several
            dtypes += torch.float16, torch.bfloat16
        dtype = self.one_of(dtypes)
        channels = self.one_of((1, 2, 3, 5, 8, 17))
        features = torch.from_numpy(self.rng.normal(size=(*points.shape[:-1], channels)))
        call.leaves["features"] = self.laid_out(features.to(dtype))
        call.sigma = self.sigma()
        if self.chance(0.7):
            call.leaves["sigma"] = torch.tensor(call.sigma, dtype=self.positions)
        if self.chance(0.25):
            weights = self.rng.uniform(0.1, 2, points.shape[:-1])
            counts = self.rng.random(weights.shape) < self.one_of((1.0, 1.0, 0.8, 0.3))
            if call.reduce == "sum" and self.chance(0.3):  # of a mean they could cancel
                weights *= self.rng.choice([-1.0, 1.0], weights.shape)
            weights = self.laid_out(torch.from_numpy(weights * counts).to(self.positions))
            call.leaves["reference_weights"] = weights
            if self.chance(0.5):
                features = call.leaves["features"]
                call.leaves["features"] = features.masked_fill((weights == 0)[..., None], torch.nan)

    def eps(self) -> float:
        return float(np.float32(min(max(self.scale * self.one_of((1e-6, 0.1, 1.0)), SMALLEST), LARGEST)))

    def sigma(self) -> float:
        """About as distances are, or far below or above."""
        sigma = self.scale * self.one_of((0.1, 0.5, 2.0, self.between(-5, 5)))
        return float(np.float32(min(max(sigma, SMALLEST), LARGEST)))


NAMES = ("query_points", "reference_points")


def laid_out(values: Tensor, kind: str) -> Tensor:
    """The values in a layout of this kind."""
    match kind:
        case "transposed":
            return values.mT.contiguous().mT if values.ndim > 1 else values
        case "strided":
            return values.repeat_interleave(2, dim=-1)[..., ::2]
        case "offset":
            return torch.cat([values.flatten()[:1], values.flatten()])[min(1, values.numel()) :].view(
                values.shape
            )
        case "expanded":
            return values[:1].expand_as(values)
    return values.contiguous()

"""What other libraries do at the edges of a search, beside ours: a table, of the libraries installed here.

    python -m tools.edges

Each row makes valid input, and counts. Libraries that are not installed are left out.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

import pointproj
from pointproj.machine import installed_version

COUNT, K = 4000, 8
SURVEY = (432_100.0, 5_412_300.0, 312.0)  # metres: easting and northing of UTM, and a height
OFFSET = (1000.0, 1000.0, 1000.0)


class Edge(NamedTuple):
    """A question, and the function of each library that answers it."""

    asked: str
    ours: Callable[[], str]
    others: dict[str, Callable[[], str]]  # by distribution


def cloud(place: tuple[float, ...], dtype: torch.dtype, side: float) -> torch.Tensor:
    """Points in a cube of this side, in metres, at a place."""
    points = np.random.default_rng(0).random((COUNT, 3)) * side + np.array(place)
    return torch.from_numpy(points).to(dtype)


def nearest(points: torch.Tensor) -> torch.Tensor:
    """The rows of the nearest, by differences in float64."""
    exact = points.double()
    squares = sum((exact[:, None, axis] - exact[None, :, axis]).square() for axis in range(3))
    return squares.topk(K, largest=False).indices


def wrong(points: torch.Tensor, found: Callable[[torch.Tensor], torch.Tensor]) -> str:
    """The share of wrong lists."""
    differ = (found(points).sort(1).values != nearest(points).sort(1).values).any(1)
    return f"{differ.double().mean():.0%} of lists wrong"


def by_sklearn(points: torch.Tensor) -> torch.Tensor:
    neighbors = importlib.import_module("sklearn.neighbors").NearestNeighbors(algorithm="brute")
    return torch.from_numpy(
        neighbors.fit(points.numpy()).kneighbors(points.numpy(), K, return_distance=False)
    )


def by_cuml(algorithm: str, points: torch.Tensor) -> torch.Tensor:
    neighbors = importlib.import_module("cuml.neighbors").NearestNeighbors(algorithm=algorithm)
    neighbors.fit(points.cuda())
    return torch.as_tensor(neighbors.kneighbors(points.cuda(), K, return_distance=False)).cpu()


def by_cdist(points: torch.Tensor) -> torch.Tensor:
    return torch.cdist(points, points).topk(K, largest=False).indices


def by_pointproj(points: torch.Tensor) -> torch.Tensor:
    return pointproj.knn(points, points, K)[1]


def pairs(found: Callable[[torch.Tensor, float], int]) -> str:
    """How many times too many pairs within a radius are found in float32 at an offset."""
    points, radius = cloud(OFFSET, torch.float32, 1.0), 0.05
    exact = points.double()
    squares = sum((exact[:, None, axis] - exact[None, :, axis]).square() for axis in range(3))
    return f"{found(points, radius) / int((squares <= radius**2).sum()):.1f} times the pairs"


def pairs_of_neuralop(points: torch.Tensor, radius: float) -> int:
    search = importlib.import_module("neuralop.layers.neighbor_search").native_neighbor_search
    return len(search(points, points, radius)["neighbors_index"])


def pairs_of_pointproj(points: torch.Tensor, radius: float) -> int:
    return int(pointproj.radius_neighbors(points, points, radius, capacity=2**20).row_splits[-1])


def at_bound(tree: str, arrays: str) -> str:
    """Whether a point exactly at ``distance_upper_bound`` is a neighbour."""
    module = importlib.import_module(arrays)
    points = module.asarray([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    package, _, name = tree.rpartition(".")
    made = getattr(importlib.import_module(package), name)(points)
    distances, _ = made.query(points[:1], k=2, distance_upper_bound=1.0)
    return "included" if np.isfinite(float(distances[0, 1])) else "excluded"


def at_radius() -> str:
    points = torch.eye(3)[:1]
    found = pointproj.knn(torch.zeros(1, 3), points, 1, max_radius=1.0)[0]
    return "included" if found.isfinite().all() else "excluded"


def missing_neighbors() -> str:
    """What stands for the fourth of three neighbours."""
    lazy = importlib.import_module("pykeops.torch").LazyTensor
    points = torch.eye(3)
    squares = (lazy(points[:, None]) - lazy(points[None])).square().sum(-1)
    return f"row {squares.argKmin(4, dim=1)[0, 3].item()}, with no word"


def refused() -> str:
    try:
        pointproj.knn(torch.eye(3), torch.eye(3), 4)
    except ValueError:
        return "an error that names both numbers"
    return "no error"


def edges() -> Iterator[Edge]:
    """All questions."""
    survey = partial(wrong, cloud(SURVEY, torch.float64, 2.0))
    single = partial(wrong, cloud(OFFSET, torch.float32, 1.0))
    yield Edge(
        "the nearest in survey coordinates, float64, 500 points a cubic metre",
        partial(survey, by_pointproj),
        {"scikit-learn": partial(survey, by_sklearn), "torch": partial(survey, by_cdist)},
    )
    of_cuml = {f"cuml-cu{cuda}": partial(single, partial(by_cuml, "brute")) for cuda in (12, 13)}
    yield Edge(
        "the nearest at an offset of 1000, float32",
        partial(single, by_pointproj),
        {"torch": partial(single, by_cdist), "scikit-learn": partial(single, by_sklearn), **of_cuml},
    )
    yield Edge(
        "pairs within a radius at an offset of 1000, float32",
        partial(pairs, pairs_of_pointproj),
        {"neuraloperator": partial(pairs, pairs_of_neuralop)},
    )
    cupyx = partial(at_bound, "cupyx.scipy.spatial.KDTree", "cupy")
    yield Edge(
        "a point exactly at the largest distance",
        at_radius,
        {
            "scipy": partial(at_bound, "scipy.spatial.cKDTree", "numpy"),
            **{f"cupy-cuda{cuda}x": cupyx for cuda in (12, 13)},
        },
    )
    yield Edge("four neighbours of three points", refused, {"pykeops": missing_neighbors})


def table() -> list[str]:
    """Markdown: a line for each question and library."""
    lines = ["| question | library | it answers | pointproj |", "|---|---|---|---|"]
    for edge in edges():
        for library, answer in edge.others.items():
            version = installed_version(library)
            if version is not None:
                lines.append(f"| {edge.asked} | {library} {version} | {_said(answer)} | {_said(edge.ours)} |")
    return lines


def _said(answer: Callable[[], str]) -> str:
    try:
        return answer()
    except Exception as error:  # a library without its GPU or compiler may raise anything
        return f"{type(error).__name__}"


if __name__ == "__main__":
    print("\n".join(table()))

"""What the search for neighbours costs for a shape, estimated before training, to give processes equal work.

A query visits the cells of a grid around it until it is sure of its neighbours. One far from the points
visits many, and shapes differ by how many of their queries are far. Here such cells are counted, for fewer
queries and points than a step has.
"""

import numpy as np

from pointproj.geometry.meshes import query_grid
from pointproj.geometry.sampling import PointSource

POINTS = 1024
SIDE = 12  # queries a side
POINTS_PER_CELL = 2
THINNEST = 0.05  # assumed extent of a cloud along an axis, at least, in units of the query cube


def search_cost(source: PointSource) -> float:
    """Estimate the work of searching all points of the query cube among those of a shape.

    Parameters
    ----------
    source : PointSource
        Of a shape in the query cube.

    Returns
    -------
    float
        Cells visited by a query in the mean; only ratios between shapes have a meaning.
    """
    from scipy.spatial import cKDTree  # a tenth of what training imports, and prepared shapes need none

    points, _ = source.draw(POINTS, np.random.default_rng(0))
    queries = query_grid(SIDE)
    distances, _ = cKDTree(points).query(queries)
    low, high = points.min(axis=0), points.max(axis=0)
    volume = np.prod(np.maximum(high - low, THINNEST))
    cell = (volume * POINTS_PER_CELL / POINTS) ** (1 / 3)
    radius = distances[:, None] + cell / 2
    visited = np.minimum(queries + radius, high) - np.maximum(queries - radius, low)
    return float(np.prod(np.maximum(visited, 0) / cell + 1, axis=1).mean())

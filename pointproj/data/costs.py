"""What a shape costs the search for neighbours, known beforehand: processes get parts of equal work by it.

A query visits the cells of a grid about itself until it is sure of its neighbours, so one far from the cloud
visits many, and shapes differ by how many of their queries are far. Here such cells are counted, for fewer
queries and points than a step has.
"""

import numpy as np
from scipy.spatial import cKDTree

from pointproj.geometry.meshes import query_grid
from pointproj.geometry.sampling import PointSource

POINTS = 1024
SIDE = 12  # queries a side
POINTS_A_CELL = 2
THINNEST = 0.05  # of a cloud, in units of the query cube: a flat one has cells all the same


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
    points, _ = source.draw(POINTS, np.random.default_rng(0))
    queries = query_grid(SIDE)
    distances, _ = cKDTree(points).query(queries)
    low, high = points.min(axis=0), points.max(axis=0)
    volume = np.prod(np.maximum(high - low, THINNEST))
    cell = (volume * POINTS_A_CELL / POINTS) ** (1 / 3)
    reach = distances[:, None] + cell / 2
    seen = np.minimum(queries + reach, high) - np.maximum(queries - reach, low)
    return float(np.prod(np.maximum(seen, 0) / cell + 1, axis=1).mean())

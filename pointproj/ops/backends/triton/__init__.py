"""The recipe of a backend of Triton kernels, which torch compiles and exports; plain torch on a CPU."""

import importlib.util

OPERATORS = frozenset({"knn", "radius", "edge_mlp", "vector_attend"})
RANK = {"cpu": -1, "cuda": 5}
EXPORTABLE = frozenset({"cuda"})
FUNCTIONS = "operators"


def unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing; install it with: pip install triton"
    return None

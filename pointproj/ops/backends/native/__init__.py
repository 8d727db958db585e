"""The engine, in C++ and CUDA, on all cores of a CPU: a library from the wheel, or built on first use."""

OPERATORS = frozenset({"knn", "radius", "lists", "aggregate", "attend", "farthest_points"})
RANK = {"cpu": 20, "cuda": 20}
FUNCTIONS = "operators"
BUILD_AHEAD = "python -m pointproj build-native"


def unavailable() -> str | None:
    from pointproj.ops.backends.native.build import obstacle

    return obstacle()


def unbuilt() -> str | None:
    from pointproj.ops.backends.native.build import architectures_here, find_build

    return None if find_build(architectures_here()) else f"build it with: {BUILD_AHEAD}"

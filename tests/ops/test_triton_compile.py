"""The Triton compiler takes the kernels, for GPUs that need not be here; the interpreter takes more."""

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from pointproj.ops.backends.triton import (  # noqa: E402
    knn_search,
    neighbor_sums,
    radius_gradients,
    radius_lists,
    radius_sums,
    tree,
)

POSITIONS = [
    "own",
    "queues",
    "queries",
    "points",
    "boxes",
    "frame",
    "points_as_given",
    "distances",
    "coordinates",
    "parts",
    "limit",
    "radii",
    "query_points",
    "reference_points",
]
SUMS = [
    "values",
    "summed",
    "d_features",
    "features",
    "shape",
    "eps",
    "aggregated",
    "softmax",
    "grad",
    "means",
    "d_own",
    "d_query",
    "d_sigma",
    "d_reference",
    "weights",
    "products",
]
ROWS = [
    "own_rows",
    "own_clouds",
    "lists_of_all",
    "query_rows",
    "query_clouds",
    "row_of",
    "cloud_of",
    "cloud_at",
    "spans",
    "found",
    "counts",
    "offsets",
    "neighbor_indices",
    "keys",
    "leaf_keys",
]
LISTS = ["order", "row_splits", "unsorted", "listed", "made"]
DEFAULT = {"KERNEL": 0, "MEAN": True}
WITHIN = {"BATCHED": True, **DEFAULT, "BLOCK": 32, "TILE": 16}
SUMS_WITHIN = {**WITHIN, "TILE": radius_sums.TILE, "STEP": radius_sums.STEP}
NEIGHBORS = {**DEFAULT, "BLOCK": 32, "TILE": 16}
SEARCH = {"FIRST": 0, "K": 7, "SLOTS": 8, "BITS": 10, "BATCHED": False, "RADII": 0, "TILE": 8}
LIST = {"BATCHED": True, "RADII": 2, "TILE": 16, "STEP": 64}
ENCODE = {"SIDE": 1, "BITS": 8, "LAYOUT": 2, "PARTS": 64, "BLOCK": 1024}
KERNELS = {
    "bound": (tree.bound_kernel, {"PARTS": 64, "BLOCK": 1024}),
    "encode": (tree.encode_kernel, ENCODE),
    "arrange": (tree.arrange_kernel, {"LAYOUT": 2}),
    "search": (knn_search.search_kernel, SEARCH),
    "search-on": (knn_search.search_kernel, {**SEARCH, "FIRST": 32, "BATCHED": True}),
    "search-within": (knn_search.search_kernel, {**SEARCH, "RADII": 1}),
    "lists-count": (radius_lists.list_kernel, {**LIST, "FILLS": False}),
    "lists-fill": (radius_lists.list_kernel, {**LIST, "FILLS": True}),
    "lists-sort": (radius_lists.sort_kernel, {"BLOCK": 64, "STEP": 64}),
    "neighbors-aggregate": (neighbor_sums.aggregate_kernel, NEIGHBORS),
    "neighbors-features": (neighbor_sums.feature_kernel, {"BLOCK": 32, "TILE": 16}),
    "neighbors-positions": (neighbor_sums.position_kernel, NEIGHBORS),
    "sums": (radius_sums.sums_kernel, {**SUMS_WITHIN, "FOR_REFERENCES": False}),
    "sums-for-references": (radius_sums.sums_kernel, {**SUMS_WITHIN, "FOR_REFERENCES": True}),
    "positions": (radius_gradients.position_kernel, {**WITHIN, "OF_QUERIES": True}),
    "positions-of-references": (radius_gradients.position_kernel, {**WITHIN, "OF_QUERIES": False}),
    "neighbors-inverse": (neighbor_sums.aggregate_kernel, {**NEIGHBORS, "KERNEL": 2}),
    "sums-compact": (
        radius_sums.sums_kernel,
        {**SUMS_WITHIN, "FOR_REFERENCES": False, "KERNEL": 4, "MEAN": False},
    ),
    "positions-gaussian": (
        radius_gradients.position_kernel,
        {**WITHIN, "OF_QUERIES": True, "KERNEL": 1, "MEAN": False},
    ),
}


def compiled(name: str, architecture: int, real: str, size: str, warps: int = 2) -> Any:
    """A kernel as Triton compiles it for one architecture; dtypes of positions and sums, and of sizes."""
    kernel, constants = KERNELS[name]
    kernel = kernel if isinstance(kernel, triton.JITFunction) else kernel.fn  # of those that are tuned
    pointers = dict.fromkeys(POSITIONS + SUMS, f"*{real}") | dict.fromkeys(ROWS, "*i32")
    pointers |= dict.fromkeys(LISTS, "*i64")
    if "BATCHED" in constants:
        pointers["clouds"] = "*i32"  # of each point; to the kernels that build a tree it is their number
    if name.startswith("neighbors") or name == "lists-sort":
        pointers.pop("queries")  # here that is a number too
    signature = {n: "constexpr" if n in constants else pointers.get(n, size) for n in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    target = GPUTarget("cuda", architecture, 32)
    return triton.compile(source, target=target, options={"num_warps": warps})


@pytest.mark.slow
@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted")
@pytest.mark.parametrize(
    ("architecture", "real", "size", "names"),
    [
        (90, "fp32", "i64", KERNELS),  # as in a package, which keeps sizes open
        (80, "fp32", "i32", ["search"]),
        (90, "fp64", "i32", ["search", "lists-fill", "sums"]),
    ],
    ids=["sm90", "sm80", "sm90-fp64"],
)
def test_kernels_compile(architecture: int, real: str, size: str, names: list[str]):
    for name in names:
        assembly = compiled(name, architecture, real, size).asm["ptx"]
        assert f".target sm_{architecture}" in assembly, name
        if name.startswith(("search", "lists")):  # distances are rounded after each operation, unlike middles
            assert assembly.count("fma.rn") <= 3, name

"""The Triton compiler takes the kernels, for GPUs that need not be here; the interpreter takes more."""

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from pointproj.ops.backends.triton import (  # noqa: E402
    cell_list,
    edge_chains,
    edge_kernels,
    gradients,
    knn_search,
    linear_rows,
    sums,
    vector_kernels,
    vector_narrow,
)

POSITIONS = ["query_points", "points", "points_as_given", "frame", "limit"]
SUMS = ["features", "parameter", "eps", "aggregated", "softmax", "grad"]
SUMS += ["d_query", "d_reference", "d_features", "d_sigma", "query_points", "reference_points", "hidden"]
SUMS += ["of_queries", "weights", "layer", "sums", "d_hidden", "d_of_queries", "d_weights", "d_layer"]
SUMS += ["counts", "weight", "bias", "made", "d_rows", "places", "of_places", "d_places"]
ROWS = ["clouds", "clouds_of", "cells", "rows", "first", "found"]
DEFAULT = {"KERNEL": 0, "REDUCE": 0, "BLOCK": 32, "TILE": sums.LAUNCH["TILE"], "STEP": sums.LAUNCH["STEP"]}
WITHIN = {**DEFAULT, "LISTED": False, "BATCHED": True}
LISTED = {**DEFAULT, "LISTED": True, "BATCHED": False}
SEARCH = {"CONTINUES": False, "BATCHED": False, "SLOTS": 8, "TILE": 32, "STEP": 4}
EDGES = {"PADDED": False, "HIDDEN": True, "OF_QUERIES": True, "WEIGHTED": True, "DISTANCE": True}
EDGES |= {"ACTIVATION": 0, "SLOPE": 0.01, "BLOCK": 64, "TILE": 2, "PLACES": True}
SHORT = {**EDGES, "MEAN": True, "ROUGH": True}
FOLDED = {**SHORT, "ROUGH": False, "PLACES": False, "DISTANCE": False}
CHAIN = {**EDGES, "FACTORS": True, "ENDS": True, "LARGEST": True, "PRODUCTS": 2, "PRECISION": "tf32"}
CHAIN |= {"N2": 16, "LAST": 32, "BLOCK": 16, "STEP": 8, "channels": 20, "n2": 10, "outputs": 30}
ATTEND = {"PADDED": True, "GROUPS": 2, "DEPTH": 8, "LASTS": 16, "PRECISION": "tf32", "EXACT": False}
ATTEND |= {"TILE": 2, "STEP": 8, "BLOCK": 16, "scores": 9, "groups": 2, "depth": 5, "channels": 10}
NARROW = {**ATTEND, "SCORES": 16, "POSITION_ACT": 0, "POSITION_SLOPE": 0.01}
NARROW |= {"SCORE_ACT": 2, "SCORE_SLOPE": 0.01, "inputs": 20}
NARROW |= {"POSITION_ENDS": False, "SCORE_ENDS": False}
NARROW_GRADIENTS = {**NARROW, "PLACES": True, "FIRST": True}
ENDED = {**NARROW_GRADIENTS, "POSITION_ENDS": True, "SCORE_ENDS": True}
ATTEND |= {"ACT": 0, "SLOPE": 0.01, "ENDS": True}
INPUTS = {"PADDED": True, "PLACES": True, "FIRST": True, "ACT": 0, "SLOPE": 0.01, "BLOCK": 32}
INPUTS |= {"TILE": 8, "STEP": 4, "inputs": 20}
NUMBERS = ["items", "references", "k", "first_item", "last_item"]
NUMBERS += ["of_copy", "first_query", "last_query", "first_slot", "last_slot"]
LINEAR = {
    "BIAS": True,
    "COUNTED": True,
    "PLACES": True,
    "ANY": True,
    "PRECISION": "tf32",
    "IN": 16,
    "OUT": 32,
    "TILE": 16,
}
LINEAR_GRADIENTS = {"OF_ROWS": True, "OF_POINTS": True, "OF_LAYER": True}
GRADIENTS = {"FEATURES": True, "POSITIONS": True}
KERNELS = {
    "numbers": (cell_list.number_kernel, {"BATCHED": True, "BLOCK": 256}),
    "search": (knn_search.search_kernel, SEARCH),
    "search-on": (knn_search.search_kernel, {**SEARCH, "SLOTS": 32, "CONTINUES": True, "BATCHED": True}),
    "sums": (sums.sum_kernel, WITHIN),
    "sums-lists": (sums.sum_kernel, LISTED),
    "sums-inverse": (sums.sum_kernel, {**LISTED, "KERNEL": 2}),
    "sums-compact": (sums.sum_kernel, {**WITHIN, "KERNEL": 4, "REDUCE": 1}),
    "gradients": (gradients.gradient_kernel, {**WITHIN, **GRADIENTS}),
    "gradients-lists": (gradients.gradient_kernel, {**LISTED, **GRADIENTS}),
    "edges": (edge_kernels.sum_kernel, SHORT),
    "edges-folded": (edge_kernels.sum_kernel, FOLDED),
    "edge-gradients-folded": (edge_kernels.gradient_kernel, {**FOLDED, "FLAGS": 26}),
    "edge-gradients": (edge_kernels.gradient_kernel, {**SHORT, "FLAGS": 63}),
    "linear": (linear_rows.linear_kernel, LINEAR),
    "linear-gradients": (linear_rows.linear_gradient_kernel, {**LINEAR, **LINEAR_GRADIENTS}),
    "pairs-chain": (edge_chains.chain_kernel, CHAIN),
    "pairs-chain-gradients": (edge_chains.chain_gradient_kernel, {**CHAIN, "FLAGS": 127}),
    "pairs-narrow": (vector_narrow.narrow_kernel, NARROW),
    "pairs-narrow-ended": (vector_narrow.narrow_gradient_kernel, ENDED),
    "pairs-narrow-gradients": (vector_narrow.narrow_gradient_kernel, NARROW_GRADIENTS),
    "pairs-attend": (vector_kernels.attend_kernel, ATTEND),
    "pairs-attend-gradients": (vector_kernels.attend_gradient_kernel, ATTEND),
    "pairs-inputs": (vector_kernels.inputs_kernel, {**INPUTS, "BACKWARD": False}),
    "pairs-inputs-gradients": (vector_kernels.inputs_kernel, {**INPUTS, "BACKWARD": True}),
    "gradients-gaussian": (gradients.gradient_kernel, {**WITHIN, **GRADIENTS, "KERNEL": 1, "REDUCE": 1}),
}


def compiled(name: str, architecture: int, real: str, size: str, warps: int = 1) -> Any:
    """A kernel as Triton compiles it for one architecture; dtypes of positions and sums, and of sizes."""
    kernel, constants = KERNELS[name]
    kernel = kernel if isinstance(kernel, triton.JITFunction) else kernel.fn  # of those that are tuned
    pointers = dict.fromkeys(POSITIONS + SUMS, f"*{real}") | dict.fromkeys(ROWS, "*i32") | {"order": "*i64"}
    if name.startswith("pairs"):
        pointers = {n: f"*{real}" for n in kernel.arg_names if n not in NUMBERS}
        pointers |= {"query_of": "*i64", "winners": "*i32"}
    if name.startswith(("edge", "pairs")):
        pointers |= {"rows": "*i64", "row_splits": "*i64"}
    if name.startswith("linear"):
        pointers["rows"] = f"*{real}"
    if name == "numbers":
        pointers.pop("clouds")  # here that is their number
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
        (90, "fp64", "i32", ["search", "search-on", "sums", "gradients"]),
    ],
    ids=["sm90", "sm80", "sm90-fp64"],
)
def test_kernels_compile(architecture: int, real: str, size: str, names: list[str]):
    for name in names:
        assembly = compiled(name, architecture, real, size).asm["ptx"]
        assert f".target sm_{architecture}" in assembly, name
        if name.startswith(("numbers", "search")):  # which point is nearer is rounded after each operation
            assert "fma.rn" not in assembly, name

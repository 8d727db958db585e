"""Plain torch: no kernels, every device. Pairs are formed in chunks, so memory stays bounded."""

OPERATORS = frozenset(
    {"knn", "radius", "lists", "aggregate", "attend", "edge_mlp", "farthest_points", "vector_attend"}
)
RANK = {"cpu": 0, "cuda": 0}
EXPORTABLE = frozenset({"cpu", "cuda"})
FUNCTIONS = "operators"

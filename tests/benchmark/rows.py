"""Rows of results that tests make up."""

import dataclasses

from pointproj.benchmark.results import OK, Row


def row(**changes: object) -> Row:
    """A row of W1 with a time."""
    made = Row(
        **{"workload": "w1", "operator": "knn", "implementation": "warp", "kind": "backend", "mode": "step"},
        **{"execution": "captured", "queries": 27_000, "references": 100_000, "clouds": 1, "k": 7},
        **{"radius": None, "channels": 25, "dtype": "float32", "status": OK, "p20_ms": 0.25, "p50_ms": 0.28},
        **{"p80_ms": 0.3, "repetitions": 500, "peak_mib": 123.4, "parity_error": 1.5e-7},
        **{"device": "NVIDIA H200", "driver": "580.1", "torch": "2.11", "cuda": "13.0", "warp": "1.19"},
        **{"python": "3.12.3", "commit": "abc", "date": "2026-01-02T03:04:05+00:00"},
    )
    return dataclasses.replace(made, **changes)

"""Random calls of every operator on every backend, against an independent formula in float64.

``DIFFERENTIAL_CASES=10000 pytest tests/ops/test_differential.py -k native-cpu`` draws so many calls, and
compares values, every gradient by name and second derivatives.
"""

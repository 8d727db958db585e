"""Random calls of every operator on every backend, against an independent formula in float64.

``python -m tests.differential --backend native --cases 10000 --seed 0`` draws so many calls, compares values,
every gradient by name and second derivatives, and prints one line for each call that differs, with the
command that repeats it.
"""

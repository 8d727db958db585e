"""The benchmark behind ``bench.py``: every backend and its peers, on the same work, in one run.

A run is a list of rows. A row has a workload, an implementation (one of our backends, or another library: a
peer), a mode (what is called) and an execution (eager, compiled, captured).
:mod:`~pointproj.benchmark.selection` lists the rows of a workload, :mod:`~pointproj.benchmark.run` checks and
times them, :mod:`~pointproj.benchmark.results` writes and reads them.
"""

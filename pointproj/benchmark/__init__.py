"""The benchmark behind ``bench.py``: every backend and its peers, on the same work, in one run.

A run is a list of rows: a workload, a contender (one of our backends, or a peer), a mode (what is called)
and an execution (eager, compiled, captured). :mod:`~pointproj.benchmark.contenders` lists them,
:mod:`~pointproj.benchmark.run` checks and times them, :mod:`~pointproj.benchmark.results` keeps them.
"""

"""The training of a network.

From ``train.py`` to the first step: :mod:`~pointproj.training.job` (a run and its folder),
:mod:`~pointproj.training.loop` (device, backend, data; then steps, validations, checkpoints, report) and
:mod:`~pointproj.training.step`. The inputs of a step come from ``networks`` and ``loader``.
"""

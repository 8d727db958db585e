"""Measured and simulated fields: which files are samples, how they are prepared, and what batches hold.

In the order of use: :mod:`.flow` makes the embedded set; :mod:`.samples` finds the samples of a folder;
:mod:`.preparation` reads and checks each, once; :mod:`.statistics` scales all by the training samples;
:mod:`.dataset` draws from them. Single files are read by :mod:`pointproj.geometry.files.measured`.
"""

"""Functions of other libraries, by their names and signatures, on the operators of pointproj.

One module for each library; a caller changes one import line. ``docs/operators/compat.md`` lists what is the
same and what differs. To import a module here imports nothing of the library that it stands for.
"""

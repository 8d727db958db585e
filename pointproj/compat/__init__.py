"""Functions of other libraries, by their names and signatures, on the operators of pointproj.

There is one module for each library; a caller changes one import line. ``docs/operators/compat.md`` lists
what is the same and what differs. Importing a module does not import the library that it replaces.
"""

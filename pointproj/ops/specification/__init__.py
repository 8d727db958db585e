"""What the operators are, in plain torch: the reference, and the same in bounded memory, with derivatives.

Nothing here is an operator of torch: :mod:`pointproj.ops.backends.torch` makes them of this.
"""

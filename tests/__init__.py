"""Threads of torch that wait must not keep a core busy: beside other work most of the time would go there.

The OpenMP library reads this when torch loads it, so it is said before any test or fixture is imported.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

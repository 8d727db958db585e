"""What torch.compile leaves on disk belongs to one version of this package.

It holds sizes of our operators' outputs, which are nobody's but ours: torch's key for it knows the operators'
names alone. After an update, code of an earlier layout would be found and run.
"""

import functools
import hashlib
from pathlib import Path

import torch

OPERATORS = Path(__file__).parents[1]  # their sources, in all languages


def key_by_version() -> None:
    """Make our sources part of the key of all that torch.compile keeps, whoever else adds to it."""
    tag, own = torch.compiler.config.cache_key_tag, f"pointproj-{fingerprint()}"
    if own not in tag:
        torch.compiler.config.cache_key_tag = f"{tag} {own}".lstrip()


@functools.cache
def fingerprint() -> str:
    """Return 16 digits that follow from our sources, in all languages."""
    digest = hashlib.sha256()
    for path in sorted(p for p in OPERATORS.rglob("*") if p.suffix in (".py", ".h", ".cpp", ".cu", ".cuh")):
        digest.update(path.relative_to(OPERATORS).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]

"""Versions of what is installed."""

from importlib import metadata


def installed_version(package: str) -> str | None:
    """Return the version of a distribution, as ``2.13.0+cu130`` for torch, whose metadata lack the build.

    Parameters
    ----------
    package : str
        Name of the distribution.

    Returns
    -------
    str or None
        None if it is not installed.
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    if package == "torch":
        import torch

        version = torch.__version__
    return version

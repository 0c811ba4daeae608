"""Which versions of libraries are installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_version(package: str) -> str | None:
    """
    Return the version of a package, or None where it is not installed.

    Reading a package's metadata takes some 10 ms, and a run asks for the same ones over and over.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None

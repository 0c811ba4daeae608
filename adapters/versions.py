"""Looks up the installed versions of libraries."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed_version(package: str) -> str | None:
    """
    Return the version of a package, or None if it is not installed.

    The result is cached, since reading a package's metadata takes about 10 ms, and a run looks up
    the same packages repeatedly.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None

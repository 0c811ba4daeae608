"""Looks up which libraries are installed, and their versions."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packplan.core.equality import FLASH_3


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


def has_flash_package(attn_impl: str) -> bool:
    """
    Return whether the package that flash attention needs is installed: flash-attn-3 for version 3,
    else flash-attn.
    """
    return find_spec("flash_attn_interface" if attn_impl == FLASH_3 else "flash_attn") is not None

"""
Files at places that fsspec reads: S3, Google Cloud, hubs, Azure.

Its file systems try again by themselves; what they raise is final.
"""

from __future__ import annotations

import os
from typing import Any, BinaryIO

from packplan.adapters.samples.remote.transport import (
    PART_BYTES,
    Part,
    Patience,
    RefusedError,
    Standing,
    traffic,
    without_secrets,
)
from packplan.core.errors import counted
from packplan.core.samples import PACKAGES, scheme_of

_VERSIONS = ("ETag", "etag", "md5Hash", "generation", "oid", "blob_id", "LastModified", "last_modified", "created")
"""Entries of what file systems say of a file, the first of which is its version."""

_DENIED = ("Credential", "Forbidden", "Unauthorized", "AccessDenied", "NoAuth")
"""Parts of the names of errors where credentials are missing, or do not suffice."""


_systems: dict[tuple[int, str], Any] = {}
"""
Process and scheme -> file system, with its connections for all threads. A process that is forked
makes its own, and keeps those of its parent, whose connections it must not close.
"""


class FsspecTransport:
    """A `Transport` by fsspec's file systems, which find credentials as their libraries do."""

    def part(self, place: str, start: int, stop: int, *, most: int, patience: Patience) -> Part:  # noqa: ARG002
        """
        Return bytes of a file; see `Transport`.

        Args:
            place: Place of the file.
            start: First byte.
            stop: End, which may lie behind the file's.
            most: Bytes that the file may have.
            patience: Not looked at: the file system has times of its own.

        Raises:
            RefusedError: They are not to be had.
        """
        system, path = _system(place)
        standing = _standing(system, path)
        if standing.size > most:
            raise RefusedError(f"it has more than {most:,} bytes")
        end = min(stop, standing.size)
        if start >= end:
            return Part(b"", standing)
        held = _called(system.cat_file, path, start=start, end=end)
        traffic.count(len(held))
        if len(held) != end - start:
            raise RefusedError(f"{len(held):,} of {counted(end - start, 'byte')} came")
        return Part(held, standing)

    def copy(self, place: str, file: BinaryIO, *, most: int, patience: Patience) -> None:
        """
        Write all of a file; see `Transport`.

        Args:
            place: Place of the file.
            file: File to write to; what an earlier attempt wrote is dropped.
            most: Bytes that the file may have.
            patience: Not looked at.
        """
        file.seek(0)
        file.truncate()
        while held := self.part(place, file.tell(), file.tell() + PART_BYTES, most=most, patience=patience).held:
            file.write(held)

    def listed(self, pattern: str) -> list[str]:
        """Return the places of a pattern's files, by name; RefusedError if that cannot be asked."""
        system, path = _system(pattern)
        found = _called(system.glob, path)
        traffic.count(0)
        return sorted(system.unstrip_protocol(one) for one in found)


def _system(place: str) -> tuple[Any, str]:
    """Return the file system of a place, and its path there."""
    import fsspec

    scheme = scheme_of(place)
    assert scheme is not None  # noqa: S101  # it is a place
    key = os.getpid(), scheme
    try:
        system = _systems.get(key) or _systems.setdefault(key, fsspec.filesystem(scheme, use_listings_cache=False))
    except ImportError as error:
        package = PACKAGES[scheme]
        raise RefusedError(f"{scheme}:// is read by another package: pip install {package or error.name}") from None
    except Exception as error:  # noqa: BLE001  # whatever a library raises that finds no credentials
        raise _named(error) from None
    return system, str(system._strip_protocol(place))  # noqa: SLF001  # each file system's public way to take names


def _standing(system: Any, path: str) -> Standing:
    """Return the size and version of a file."""
    about = _called(system.info, path)
    traffic.count(0)
    if about.get("type") == "directory" or about.get("size") is None:
        raise RefusedError("it is no file, but a folder")
    version = next((about[name] for name in _VERSIONS if about.get(name)), "")
    return Standing(int(about["size"]), str(version))


def _called(call: Any, *arguments: Any, **options: Any) -> Any:
    """Call a function, and return its result; RefusedError if it fails."""
    try:
        return call(*arguments, **options)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # file systems raise errors of their own libraries
        raise _named(error) from None


def _named(error: Exception) -> RefusedError:
    """Return the error that says why a file system gives nothing."""
    kind = type(error).__name__
    if isinstance(error, FileNotFoundError):
        return RefusedError("there is no such file")
    text = f"{kind}: {without_secrets(error)}"
    if isinstance(error, PermissionError) or any(part in kind for part in _DENIED):
        return RefusedError(f"it asks for credentials, or for other ones ({text})")
    return RefusedError(text)

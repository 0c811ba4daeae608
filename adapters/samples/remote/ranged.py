"""A file at a place, read where its reader looks: the header and the index of a video, not all."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Self

from packplan.adapters.samples.remote.transport import (
    Part,
    Patience,
    RefusedError,
    Standing,
    read_part,
)
from packplan.core.samples import without_credentials

BLOCK = 2**16
"""Bytes that are asked for at once, at first."""

_MOST_BLOCKS = 16
"""Blocks that are asked for at once where a reader reads on."""

_KEPT = 64
"""Blocks that are kept."""


class Ranged(str):
    """
    Name of a video, or of a frame, at a place, of which parts are read.

    As a text, it is the place without credentials. Parts that came are kept with it. Where reading
    goes on behind the last part, the next one is twice as large.
    """

    __slots__ = ("_ahead", "_asked", "_blocks", "_next", "_standing", "sends_parts")

    sends_parts: bool
    """Whether its place sends parts; known once the first came."""

    _asked: Callable[[int, int], Part]
    _blocks: dict[int, bytes]
    _next: int
    _ahead: int
    _standing: Standing | None

    def __new__(cls, place: str, *, most: int, patience: Patience) -> Self:
        """
        Return the name of a file.

        Args:
            place: Place of the file.
            most: Bytes that it may have.
            patience: Times to wait for a part.
        """
        ranged = super().__new__(cls, without_credentials(place))
        ranged._asked = partial(read_part, place, most=most, patience=patience)
        ranged._blocks, ranged._next, ranged._ahead, ranged._standing = {}, -1, 1, None
        return ranged

    def open(self) -> RangedFile:
        """Open it; ValueError if it is not to be had."""
        return RangedFile(self)

    @property
    def size(self) -> int:
        """Bytes of the file; ValueError if it is not to be had."""
        if self._standing is None:
            self.block(0)
        assert self._standing is not None  # noqa: S101  # the first block came
        return self._standing.size

    def block(self, number: int) -> bytes:
        """Return `BLOCK` bytes, or those up to the end; ValueError if they are not to be had."""
        if number not in self._blocks:
            self._ahead = min(2 * self._ahead, _MOST_BLOCKS) if self._next == number else 1
            self._load(number, number + self._ahead)
            self._next = number + self._ahead
        return self._blocks[number]

    def _load(self, start: int, stop: int) -> None:
        """Ask for blocks, and drop the oldest ones that are kept, but for the first."""
        try:
            part = self._asked(start * BLOCK, stop * BLOCK)
        except RefusedError as error:
            message = f"the video {self} cannot be read: {error}"
            raise ValueError(message) from None
        if self._standing not in {None, part.standing}:
            message = f"the video {self} changed while it was read"
            raise ValueError(message)
        self._standing, self.sends_parts = part.standing, part.is_part
        for number in range(start, stop):
            self._blocks[number] = part.held[(number - start) * BLOCK : (number - start + 1) * BLOCK]
        for oldest in [*self._blocks][1 : max(1, len(self._blocks) - _KEPT)]:
            del self._blocks[oldest]


class RangedFile(io.RawIOBase):
    """A file of which parts are asked for as they are read."""

    def __init__(self, ranged: Ranged) -> None:
        """
        Ask for its size; ValueError if it is not to be had.

        Args:
            ranged: The file.
        """
        super().__init__()
        self._ranged, self._size, self._place = ranged, ranged.size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, and return its place."""
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        """Return so many bytes, or those up to the end; ValueError if they are not to be had."""
        stop = self._size if size is None or size < 0 else min(self._place + size, self._size)
        parts = []
        while self._place < stop:
            number, inside = divmod(self._place, BLOCK)
            parts.append(self._ranged.block(number)[inside : inside + stop - self._place])
            self._place += len(parts[-1])
        return b"".join(parts)

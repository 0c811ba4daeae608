"""A JSON array of records, whose places are found without parsing them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

from packplan.adapters.samples.formats.mapped import MappedFile
from packplan.adapters.samples.formats.spans import CHUNK, SpanFile, has_media_tag
from packplan.core.errors import DataSetError

_START = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*+\[[ \t\r\n]*+")
_NEXT = re.compile(rb"[ \t\r\n]*+(?:(,)[ \t\r\n]*+|(\]))")

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
"""A string whole; possessive, so that a long one takes no memory."""

_SCALAR = re.compile(_STRING + rb"|[^\s,\[\]{}\"]++", re.DOTALL)

_NESTING = re.compile(_STRING + rb'|[\[\]{}"]', re.DOTALL)
"""Marks that open or close; a quote by itself is that of a string that does not end."""

_OPENING = frozenset(b"[{")


class ArrayFile(SpanFile):
    """Records of one file that holds a JSON array; they are counted from 1."""

    unit = "row"

    def _find(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield the places of the array's values; DataSetError if it is no whole array."""
        mapped, row = MappedFile(self.path), 0
        held = mapped.bytes
        opening = _START.match(held)
        if opening is None:
            self._fail(1, "is no JSON array: it has to begin with [")
        place = opening.end()
        ended = held[place : place + 1] == b"]"
        place += ended
        while not ended:
            row += 1
            end = self._end_of_value(held, place, row)
            yield place, end, row, _is_tagged(held, place, end)
            mapped.pass_by(end - place)
            following = _NEXT.match(held, end)
            if following is None:
                self._fail(row, "is not followed by a comma or the end of the array: the file may be cut off")
            place, ended = following.end(), following[1] is None
        if held[place:].strip():
            self._fail(row, "is the last of the array, but more follows it in the file")

    def _end_of_value(self, held: Any, start: int, row: int) -> int:
        """Return the byte behind the value at *start*; DataSetError if *row* has no end."""
        if start == len(held) or held[start] not in _OPENING:
            scalar = _SCALAR.match(held, start)
            if scalar is None:
                self._fail(row, "holds no JSON value: the file may be cut off")
            return scalar.end()
        depth = 0
        for found in _NESTING.finditer(held, start):
            first = held[found.start()]
            if first == ord('"'):
                if found.end() - found.start() == 1:
                    self._fail(row, "has a text that does not end: the file may be cut off")
                continue
            depth += 1 if first in _OPENING else -1
            if not depth:
                return found.end()
        return self._fail(row, "does not end: the file may be cut off")

    def _fail(self, row: int, reason: str) -> NoReturn:
        message = f"{self.named.name}, row {row}: {reason}"
        raise DataSetError(message)


def _is_tagged(held: Any, start: int, end: int) -> bool:
    return any(has_media_tag(held[place : min(place + CHUNK, end)]) for place in range(start, end, CHUNK))

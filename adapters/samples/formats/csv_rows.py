"""A table of text: a record a row, named by the header; nothing is taken for a number."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator
from typing import Any

from packplan.adapters.samples.formats.mapped import MappedFile
from packplan.adapters.samples.formats.spans import SpanFile, has_media_tag
from packplan.core.errors import DataSetError, RecordError, counted
from packplan.core.samples import VIDEO_KEYS

_BOM = b"\xef\xbb\xbf"

LONGEST_HEADER = 2**20

csv.field_size_limit(sys.maxsize)


class CsvFile(SpanFile):
    """Records of one CSV file; rows are counted from 1, the header is none."""

    unit = "row"

    comma = b","

    def _find(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield the places of the rows; DataSetError if one does not end."""
        mapped, pattern, number = MappedFile(self.path), _row_pattern(self.comma), 0
        held = mapped.bytes
        place = len(_BOM) if held[: len(_BOM)] == _BOM else 0
        while place < len(held):
            found = pattern.match(held, place)
            if found is None:
                message = f"{self.named.name}, row {number + 1}: a quote opens a text that does not end"
                raise DataSetError(message)
            start, place = place, found.end()
            mapped.pass_by(place - start)
            if place - start <= 2 and not held[start:place].strip():
                continue
            if not self.facts:
                self.facts["columns"] = self._header(held[start : min(place, start + LONGEST_HEADER)].rstrip(b"\r\n"))
                continue
            number += 1
            yield start, place, number, self._has_media_tag(held[start:place])

    def _has_media_tag(self, row: bytes) -> bool:
        """Return whether a row says <video> or <audio> without such media."""
        if not has_media_tag(row):
            return False
        try:
            record = self._value(row.rstrip(b"\r\n"), "")
        except RecordError:
            return True
        return has_media_tag(row, has_videos=any(record.get(name, "[]") != "[]" for name in VIDEO_KEYS))

    def _header(self, text: bytes) -> list[str]:
        try:
            columns = [name.strip() for name in self._fields(text)]
        except UnicodeDecodeError:
            message = f"{self.named.name} is not UTF-8 text: save it as UTF-8"
            raise DataSetError(message) from None
        if twice := next((name for name in columns if name and columns.count(name) > 1), None):
            message = f"{self.named.name} names the column {twice!r} twice in its header: rename one"
            raise DataSetError(message)
        return columns

    def _fields(self, text: bytes) -> list[str]:
        """Return the texts of a row, without the quotes around them."""
        return next(csv.reader(io.StringIO(text.decode(), newline=""), delimiter=self.comma.decode()), [""])

    def _value(self, text: bytes, where: str) -> Any:
        try:
            fields = self._fields(text)
        except UnicodeDecodeError:
            raise RecordError(where, "is not UTF-8 text") from None
        columns = self.facts["columns"]
        if len(fields) != len(columns):
            reason = f"has {counted(len(fields), 'field')}, but the header names {len(columns)}"
            raise RecordError(where, f"{reason}: put quotes around a text that has commas")
        return {name: field for name, field in zip(columns, fields, strict=True) if field}

    def _bounds(self, held: Any, start: int, end: int) -> tuple[int, int]:
        """Return the start and the end of a row, with its blanks, which may be fields."""
        return start, end - len(held[max(start, end - 2) : end]) + len(held[max(start, end - 2) : end].rstrip(b"\r\n"))


class TsvFile(CsvFile):
    """Records of one file whose fields tabs separate."""

    comma = b"\t"


def _row_pattern(comma: bytes) -> re.Pattern[bytes]:
    """Return the pattern of a row whose fields *comma* separates."""
    plain = rb"[^" + comma + rb"\r\n]*+"
    field = rb'(?:"(?:[^"]++|"")*+"' + plain + rb'|(?!")' + plain + rb")"
    return re.compile(field + rb"(?:" + comma + field + rb")*+(?:\r\n|\n|\r|\Z)", re.DOTALL)

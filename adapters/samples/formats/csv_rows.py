"""A table of text: a record a row, named by the header; nothing is taken for a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.mapped import MappedFile
from packplan.adapters.samples.formats.spans import SpanFile, Spans, has_media_tag
from packplan.core.errors import DataSetError, RecordError, counted
from packplan.core.samples import VIDEO_KEYS

_BOM = b"\xef\xbb\xbf"

_QUOTED = re.compile(r'"((?:[^"]++|"")*+)"(.*)', re.DOTALL)

LONGEST_HEADER = 2**20


class CsvFile(SpanFile):
    """Records of one CSV file; rows are counted from 1, the header is none."""

    unit = "row"

    comma = b","

    def _scan(self) -> tuple[NDArray[np.int64], int]:
        """Return the spans of the rows; DataSetError if one does not end."""
        self._field, row = _patterns(self.comma)
        mapped, rows, num_with_tags = MappedFile(self.path), Spans(), 0
        held = mapped.bytes
        place, self.columns = len(_BOM) if held[: len(_BOM)] == _BOM else 0, list[str]()
        bar = progress(total=len(held), desc=f"reading {self.path.name}", unit=" bytes", leave=False, delay=BRIEF_S)
        with bar:
            while place < len(held):
                found = row.match(held, place)
                if found is None:
                    message = f"{self.named.name}, row {len(rows) + 1}: a quote opens a text that does not end"
                    raise DataSetError(message)
                start, place = place, found.end()
                bar.update(place - start)
                mapped.pass_by(place - start)
                if place - start <= 2 and not held[start:place].strip():
                    continue
                if not self.columns:
                    self.columns = self._header(held[start : min(place, start + LONGEST_HEADER)].rstrip(b"\r\n"))
                    continue
                rows.add(start, place, len(rows) + 1)
                num_with_tags += self._has_media_tag(held[start:place])
        return rows.as_array(), num_with_tags

    def _has_media_tag(self, row: bytes) -> bool:
        """Return whether a row says <video> or <audio> without such media."""
        if not has_media_tag(row):
            return False
        try:
            record = self._value(row.rstrip(b"\r\n"), "")
        except RecordError:
            return True
        return has_media_tag(row, has_videos=any(record.get(name, "[]") != "[]" for name in VIDEO_KEYS))

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "columns": self.columns}

    def _take_facts(self, facts: Mapping[str, Any]) -> None:
        self._field, _ = _patterns(self.comma)
        self.columns = list(facts["columns"])

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
        fields, place = list[str](), 0
        while True:
            found = self._field.match(text, place)
            assert found is not None  # noqa: S101  # the scan found the whole row
            fields.append(_unquoted(found[0].decode()))
            place = found.end() + 1
            if place > len(text):
                return fields

    def _value(self, text: bytes, where: str) -> Any:
        try:
            fields = self._fields(text)
        except UnicodeDecodeError:
            raise RecordError(where, "is not UTF-8 text") from None
        if len(fields) != len(self.columns):
            reason = f"has {counted(len(fields), 'field')}, but the header names {len(self.columns)}"
            raise RecordError(where, f"{reason}: put quotes around a text that has commas")
        return {name: field for name, field in zip(self.columns, fields, strict=True) if field}

    def _bounds(self, held: Any, start: int, end: int) -> tuple[int, int]:
        """Return where a row begins and ends: a blank may be a field."""
        return start, end - len(held[max(start, end - 2) : end]) + len(held[max(start, end - 2) : end].rstrip(b"\r\n"))


class TsvFile(CsvFile):
    """Records of one file whose fields tabs separate."""

    comma = b"\t"


def _patterns(comma: bytes) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Return what a field is, and what a row is, where *comma* separates fields."""
    plain = rb"[^" + comma + rb"\r\n]*+"
    field = rb'(?:"(?:[^"]++|"")*+"' + plain + rb'|(?!")' + plain + rb")"
    row = field + rb"(?:" + comma + field + rb")*+(?:\r\n|\n|\r|\Z)"
    return re.compile(field, re.DOTALL), re.compile(row, re.DOTALL)


def _unquoted(field: str) -> str:
    quoted = _QUOTED.fullmatch(field)
    return field if quoted is None else quoted[1].replace('""', '"') + quoted[2]

"""JSON Lines: a record a line; blank lines are no records."""

from __future__ import annotations

from collections.abc import Iterator

from packplan.adapters.samples.formats.spans import CHUNK, SpanFile, has_media_tag


class LinesFile(SpanFile):
    """Records of one JSON Lines file."""

    def _find(self) -> Iterator[tuple[int, int, int, bool]]:
        """
        Yield each record's first byte, its end, its line, and whether it says <video> or <audio>;
        no line is read whole.
        """
        with self.path.open("rb") as file:
            start, line = 0, 0
            while text := file.readline(CHUNK):
                line, end = line + 1, start + len(text)
                says, tagged = not text.isspace(), has_media_tag(text)
                while len(text) == CHUNK and not text.endswith(b"\n"):
                    text = file.readline(CHUNK)
                    end, says, tagged = end + len(text), says or bool(text.strip()), tagged or has_media_tag(text)
                if says:
                    yield start, end, line, tagged
                start = end

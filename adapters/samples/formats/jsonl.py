"""JSON Lines: a record a line; blank lines are no records."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.spans import CHUNK, SpanFile, Spans, has_media_tag


class LinesFile(SpanFile):
    """Records of one JSON Lines file."""

    def _scan(self) -> tuple[NDArray[np.int64], int]:
        """
        Return first byte, end and line of every record, and how many say <video> or <audio>; no
        line is read whole.
        """
        rows = Spans()
        num_with_tags = 0
        size = self.path.stat().st_size
        bar = progress(total=size, desc=f"reading {self.path.name}", unit=" bytes", leave=False, delay=BRIEF_S)
        with self.path.open("rb") as file, bar:
            start, line = 0, 0
            while text := file.readline(CHUNK):
                line, end = line + 1, start + len(text)
                says, tagged = not text.isspace(), has_media_tag(text)
                while len(text) == CHUNK and not text.endswith(b"\n"):
                    text = file.readline(CHUNK)
                    end, says, tagged = end + len(text), says or bool(text.strip()), tagged or has_media_tag(text)
                if says:
                    rows.add(start, end, line)
                    num_with_tags += tagged
                bar.update(end - start)
                start = end
        return rows.as_array(), num_with_tags

"""Records, the samples that they become, and measurements of samples."""

from __future__ import annotations

from packplan.core.samples.entries import DataEntry, DrawnRecords, draw_records, parse_entry
from packplan.core.samples.identity import DIGEST_BYTES, HEAD_BYTES, digest_of, inline_image, unreadable_digest
from packplan.core.samples.images import Image, is_url, to_images
from packplan.core.samples.measurement import (
    BAD,
    COLUMNS,
    MEDIA_COLUMNS,
    MeasuredSample,
    Measurement,
    MediaFacts,
    MediaTable,
    Outcome,
    ShortcutError,
    Table,
    column,
    from_row,
    from_tables,
    num_media,
    sample_indices,
    to_row,
    to_tables,
    video_totals,
)
from packplan.core.samples.records import REFUSED, shaped, to_messages
from packplan.core.samples.shapes import IMAGE_KEYS, MIXABLE, READ, VIDEO_KEYS, Shaped
from packplan.core.samples.sources import BadRecord, DataFile, Where
from packplan.core.samples.tools import CALL, RESPONSE
from packplan.core.samples.values import UnusableRecordError
from packplan.core.samples.videos import Video

__all__ = [
    "BAD",
    "CALL",
    "COLUMNS",
    "DIGEST_BYTES",
    "HEAD_BYTES",
    "IMAGE_KEYS",
    "MEDIA_COLUMNS",
    "MIXABLE",
    "READ",
    "REFUSED",
    "RESPONSE",
    "VIDEO_KEYS",
    "BadRecord",
    "DataEntry",
    "DataFile",
    "DrawnRecords",
    "Image",
    "MeasuredSample",
    "Measurement",
    "MediaFacts",
    "MediaTable",
    "Outcome",
    "Shaped",
    "ShortcutError",
    "Table",
    "UnusableRecordError",
    "Video",
    "Where",
    "column",
    "digest_of",
    "draw_records",
    "from_row",
    "from_tables",
    "inline_image",
    "is_url",
    "num_media",
    "parse_entry",
    "sample_indices",
    "shaped",
    "to_images",
    "to_messages",
    "to_row",
    "to_tables",
    "unreadable_digest",
    "video_totals",
]

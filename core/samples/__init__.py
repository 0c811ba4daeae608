"""What is known of a sample: what its record says, what measuring it gave."""

from __future__ import annotations

from core.samples.bad import BadRecord
from core.samples.entries import DataEntry, Draw, draw, parse_entry
from core.samples.identity import DIGEST_BYTES, HEAD_BYTES, digest_of, inline_image, unreadable_digest
from core.samples.images import Image, is_url, to_images
from core.samples.measurement import (
    COLUMNS,
    IMAGE_COLUMNS,
    ImageFacts,
    ImageTable,
    Measured,
    Measurement,
    Outcome,
    ShortcutError,
    Table,
    VideoTotals,
    column,
    from_row,
    from_tables,
    num_media,
    to_row,
    to_tables,
    video_totals,
)
from core.samples.place import Place
from core.samples.records import MAX_MESSAGES, REFUSED, SUPPORTED, shaped, to_messages
from core.samples.shapes import IMAGE_KEYS, MIXABLE, READ, VIDEO_KEYS, Shaped
from core.samples.sources import DataFile
from core.samples.tools import CALL, RESPONSE
from core.samples.videos import VIDEO_TAG, Video, to_videos

__all__ = [
    "CALL",
    "COLUMNS",
    "DIGEST_BYTES",
    "HEAD_BYTES",
    "IMAGE_COLUMNS",
    "IMAGE_KEYS",
    "MAX_MESSAGES",
    "MIXABLE",
    "READ",
    "REFUSED",
    "RESPONSE",
    "SUPPORTED",
    "VIDEO_KEYS",
    "VIDEO_TAG",
    "BadRecord",
    "DataEntry",
    "DataFile",
    "Draw",
    "Image",
    "ImageFacts",
    "ImageTable",
    "Measured",
    "Measurement",
    "Outcome",
    "Place",
    "Shaped",
    "ShortcutError",
    "Table",
    "Video",
    "VideoTotals",
    "column",
    "digest_of",
    "draw",
    "from_row",
    "from_tables",
    "inline_image",
    "is_url",
    "num_media",
    "parse_entry",
    "shaped",
    "to_images",
    "to_messages",
    "to_row",
    "to_tables",
    "to_videos",
    "unreadable_digest",
    "video_totals",
]

"""Records, the samples that they become, and measurements of samples."""

from __future__ import annotations

from packplan.core.samples.identity import DIGEST_BYTES, HEAD_BYTES, digest_of, inline_image, unreadable_digest
from packplan.core.samples.images import IMAGE_KEYS, VIDEO_KEYS, Image, to_images
from packplan.core.samples.known import UNKNOWN, KnownLengths, media_identity
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
from packplan.core.samples.places import (
    PACKAGES,
    folder_of,
    is_place,
    located,
    place_fault,
    scheme_of,
    without_credentials,
    without_signature,
)
from packplan.core.samples.records import REFUSED, shaped, to_messages
from packplan.core.samples.shapes import MIXABLE, READ, Shaped, with_moved_media
from packplan.core.samples.sources import BadRecord, DataFile, Where, by_source
from packplan.core.samples.tools import CALL, RESPONSE
from packplan.core.samples.values import UnusableRecordError
from packplan.core.samples.videos import Video, to_videos

__all__ = [
    "BAD",
    "CALL",
    "COLUMNS",
    "DIGEST_BYTES",
    "HEAD_BYTES",
    "IMAGE_KEYS",
    "MEDIA_COLUMNS",
    "MIXABLE",
    "PACKAGES",
    "READ",
    "REFUSED",
    "RESPONSE",
    "UNKNOWN",
    "VIDEO_KEYS",
    "BadRecord",
    "DataFile",
    "Image",
    "KnownLengths",
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
    "by_source",
    "column",
    "digest_of",
    "folder_of",
    "from_row",
    "from_tables",
    "inline_image",
    "is_place",
    "located",
    "media_identity",
    "num_media",
    "place_fault",
    "sample_indices",
    "scheme_of",
    "shaped",
    "to_images",
    "to_messages",
    "to_row",
    "to_tables",
    "to_videos",
    "unreadable_digest",
    "video_totals",
    "with_moved_media",
    "without_credentials",
    "without_signature",
]

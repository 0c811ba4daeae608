"""Records, the samples that they become, and measurements of samples."""

from packplan.core.samples.identity import DIGEST_BYTES, HEAD_BYTES, digest_of, inline_image, unreadable_digest
from packplan.core.samples.measurement import (
    BAD,
    COLUMNS,
    MEDIA_COLUMNS,
    UNKNOWN,
    BadRecord,
    DataFile,
    KnownLengths,
    MeasuredSample,
    Measurement,
    MediaFacts,
    MediaTable,
    Outcome,
    ShortcutError,
    Table,
    Where,
    by_source,
    column,
    from_row,
    from_tables,
    media_identity,
    num_media,
    sample_indices,
    to_row,
    to_tables,
    video_totals,
)
from packplan.core.samples.media import Image, Video
from packplan.core.samples.places import (
    PACKAGES,
    folder_of,
    is_place,
    join_place,
    place_fault,
    scheme_of,
    without_credentials,
    without_signature,
)
from packplan.core.samples.records import REFUSED, read_shape, to_messages
from packplan.core.samples.shapes import MIXABLE, READ, Shaped
from packplan.core.samples.tools import CALL, RESPONSE
from packplan.core.samples.values import UnusableRecordError

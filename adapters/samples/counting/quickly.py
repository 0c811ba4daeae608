"""
Many samples measured at once: from the texts that the template makes, and what the headers of
images and the containers of videos say.

Some are encoded in full on the way, and compared: the first of each kind of record in each process,
and one in `AUDITED_ONE_IN` of all; of those with videos, with others in the videos' place, since
decoding one takes as long as asking hundreds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.adapters.samples.counting.pieces import PieceCounter, Pieces, prove_stand_in
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.image_headers import image_facts
from packplan.adapters.samples.image_lengths import ImageCost, ImageLengths
from packplan.adapters.samples.video import VideoCost, VideoFacts, VideoLengths
from packplan.core.errors import RecordError
from packplan.core.samples import (
    DIGEST_BYTES,
    Image,
    MeasuredSample,
    Measurement,
    MediaFacts,
    MediaTable,
    Outcome,
    ShortcutError,
    Table,
    from_tables,
    to_row,
    to_tables,
)

log = logging.getLogger(__name__)

AUDITED_ONE_IN = 512
"""Samples of which one is encoded in full too."""

_MOST_KINDS = 64
"""Kinds of records that a process audits the first of."""

_SAYS_MORE = re.compile(r"<\|\w+\|>|</?think>|<(?:image|video|audio|bbox|ref-object|cot-process|start-image)>")
"""A text that a template may treat otherwise than others: tokens, thoughts, tags."""


class MeasureOne(Protocol):
    """Measures a sample by itself; RecordError if it cannot become one."""

    def __call__(self, index: int, /) -> Measurement:
        """Return the measurement of sample *index*."""


@attrs.frozen
class _Read:
    """A sample that was read, and the texts that it becomes."""

    index: int
    sample: dict[str, Any]
    facts: tuple[MediaFacts, ...]
    beyond: list[ImageCost]
    """What its images cost beyond stand-ins."""

    shown: list[VideoCost]
    """What its videos cost beyond stand-ins."""

    pieces: Pieces | None
    """None if it has to be measured by itself."""


@attrs.frozen(eq=False)
class MeasuredBatch:
    """What was measured of some records, small to send from one process to another."""

    indices: range
    """Records, one behind the other."""

    digests: NDArray[np.uint8]
    """Digest of each record, all zero where it is not known; shape (num_records, DIGEST_BYTES)."""

    table: Table
    media: MediaTable

    errors: dict[int, RecordError]
    """Row -> why that record cannot become a sample."""

    @classmethod
    def from_outcomes(cls, indices: range, outcomes: Sequence[Outcome], digests: Sequence[bytes] = ()) -> MeasuredBatch:
        """
        Put outcomes into arrays.

        Args:
            indices: Records, one behind the other.
            outcomes: Measurement or error of each record.
            digests: Digest of each record, empty where it is not known.
        """
        known = np.zeros((len(indices), DIGEST_BYTES), np.uint8)
        for row, digest in enumerate(digests):
            if digest:
                known[row] = np.frombuffer(digest, np.uint8)
        errors = {row: one for row, one in enumerate(outcomes) if isinstance(one, RecordError)}
        return cls(indices, known, *to_tables(outcomes), errors)

    def outcomes(self) -> Iterator[Outcome]:
        """Yield the measurement or error of each record, in their order."""
        for row, measured in enumerate(from_tables(self.table, self.media, range(len(self.table)))):
            yield self.errors.get(row, measured)


class QuickMeasurer:
    """Measures samples of an encoder without encoding each."""

    def __init__(
        self,
        encoder: SwiftEncoder,
        counter: PieceCounter,
        lengths: ImageLengths | None,
        *,
        alone: MeasureOne,
        in_full: MeasureOne,
    ) -> None:
        """
        Measure what an encoder encodes.

        Args:
            encoder: Gives the samples.
            counter: Counts the texts of its template.
            lengths: What images cost; None measures those samples by themselves.
            alone: Measures one that cannot be measured with others.
            in_full: Measures one by encoding it.
        """
        self._encoder, self._alone, self._in_full = encoder, alone, in_full
        self._counter, self._of_images = counter, lengths
        self._kinds: set[object] = set()

    @cached_property
    def _of_videos(self) -> VideoLengths | None:
        """What videos cost; None measures those samples by themselves."""
        lengths = self._encoder.video_lengths
        try:
            if lengths is not None and prove_stand_in(self._encoder.template, self._counter, "video"):
                return lengths
        except Exception as error:  # noqa: BLE001  # a full encode says with the record's place what else is wrong
            self._counter.stand_ins.pop("video", None)
            log.info("samples with videos are measured one by one: %s: %s", type(error).__name__, error)
        return None

    def measure(self, indices: Sequence[int]) -> tuple[list[Outcome], list[bytes]]:
        """
        Measure samples, and return the digests of their records too, empty where they are not
        known; ShortcutError if one of those that are encoded too is measured otherwise then.
        """
        digests = [b""] * len(indices)
        read: list[_Read | RecordError] = []
        for place, index in enumerate(indices):
            try:
                record, digests[place] = self._encoder.records.read(index)
                read.append(self._read(index, record))
            except RecordError as error:
                read.append(error)
        ready = [one.pieces for one in read if isinstance(one, _Read) and one.pieces is not None]
        counted = iter(self._counter.measure(ready))
        return [one if isinstance(one, RecordError) else self._outcome(one, counted) for one in read], digests

    def _read(self, index: int, record: object) -> _Read:
        """
        Return a record as a sample, with what its images' headers and its videos' containers say;
        RecordError if it is none.
        """
        sample, images = self._encoder.sample_of(index, record)
        facts = self.facts(index, images)
        videos = [self._encoder.video_facts(index, video) for video in sample.get("videos", ())]
        kept = (*facts, *(self._encoder.stored_facts(one) for one in videos))
        if (
            (images and self._of_images is None)
            or (videos and self._of_videos is None)
            or any(one.doubt for one in videos)
        ):
            return _Read(index, sample, kept, [], [], None)
        beyond, shown = self._costs(index, facts, videos)
        try:
            pieces = self._counter.pieces(sample, image=len(images), video=len(videos))
        except Exception:  # noqa: BLE001  # whatever the template raises, a full encode says with the record's place
            pieces = None
        return _Read(index, sample, kept, beyond, shown, pieces)

    def _costs(
        self, index: int, images: Sequence[MediaFacts], videos: Sequence[VideoFacts]
    ) -> tuple[list[ImageCost], list[VideoCost]]:
        """
        Return what the media of a sample cost beyond stand-ins; RecordError if one is refused.
        """
        try:
            seen = [self._of_images.beyond_stand_in(one.width, one.height) for one in images] if self._of_images else []
        except ValueError as error:
            raise self._encoder.fault(index, f"an image cannot be encoded: {error}") from None
        return seen, [self._of_videos.beyond_stand_in(one) for one in videos] if videos and self._of_videos else []

    def facts(self, index: int, images: Sequence[Image]) -> tuple[MediaFacts, ...]:
        """
        Return what the images of a sample are now; RecordError if one cannot be read.

        Args:
            index: Of the sample.
            images: Paths of its images, or what their files would hold.
        """
        try:
            return tuple(image_facts(image) for image in images)
        except ValueError as error:
            raise self._encoder.fault(index, str(error)) from None

    def _outcome(self, one: _Read, counted: Iterator[Measurement | None]) -> Outcome:
        """Return the measurement of a sample that was read."""
        quick = None if one.pieces is None else next(counted)
        limit = self._encoder.template.max_length
        if quick is not None:
            tokens = sum(more.tokens for more in one.beyond) + sum(more.tokens for more in one.shown)
            quick = attrs.evolve(
                quick,
                length=quick.length + tokens,
                patches=quick.patches + sum(more.patches for more in one.beyond),
                frames=quick.frames + sum(more.frames for more in one.shown),
                video_patches=quick.video_patches + sum(more.patches for more in one.shown),
            )
        try:
            # Which tokens a truncated sample keeps is the template's to say.
            if quick is None or (limit is not None and quick.length > limit):
                return MeasuredSample(self._alone(one.index), one.facts)
        except RecordError as error:
            return error
        if self._audits(one):
            self._audit(one, quick)
        return MeasuredSample(quick, one.facts)

    def _audits(self, one: _Read) -> bool:
        """Return whether a sample is encoded in full too."""
        kind = _kind(one.sample)
        is_new = kind not in self._kinds and len(self._kinds) < _MOST_KINDS
        if is_new:
            self._kinds.add(kind)
        return is_new or one.index % AUDITED_ONE_IN == 0

    def _audit(self, one: _Read, quick: Measurement) -> None:
        """
        Compare a measurement with that of an encode: a full one, where a sample has no videos.

        Raises:
            ShortcutError: They are not the same.
        """
        try:
            encoded = (self._alone if one.shown else self._in_full)(one.index)
        except RecordError:
            # As a damaged image behind a sound header: which of them are found must not depend on
            # which are encoded.
            return
        if encoded != quick:
            raise ShortcutError(str(self._encoder.records.where(one.index)), to_row(quick), to_row(encoded))


def _kind(sample: dict[str, Any]) -> object:
    """Return what decides how a template treats a sample: roles, keys, tags."""
    messages = sample["messages"]
    texts = [text for message in messages if isinstance(text := message["content"], str)]
    said = {tag for text in texts if "<" in text for tag in _SAYS_MORE.findall(text)[:8]}
    return (
        tuple((message["role"], *sorted(message.keys() - {"role", "content"})) for message in messages[:4]),
        min(len(messages), 5),
        frozenset(sample.keys()),
        any(text[:1].isspace() or text[-1:].isspace() for text in texts),
        frozenset(said),
    )

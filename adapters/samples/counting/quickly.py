"""
Many samples measured at once: from the texts that the template makes, and what the headers of
images and the containers of videos say.

Some are encoded in full on the way, and compared: the first of each kind of record in each process,
and one in `AUDITED_ONE_IN` of all; of those with videos, with others in the videos' place, since
decoding one takes as long as asking hundreds.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any

import attrs

from packplan.adapters.samples.counting.pieces import STAND_INS, PieceCounter, Pieces, prove_pieces, prove_stand_in
from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.image_lengths import ImageLengths, prove_lengths
from packplan.adapters.samples.media import MediaCost, untruncated
from packplan.adapters.samples.video.reading import reads_videos
from packplan.core.errors import RecordError
from packplan.core.samples import (
    DIGEST_BYTES,
    MeasuredSample,
    Measurement,
    MediaFacts,
    Outcome,
    ShortcutError,
    to_row,
)

log = logging.getLogger(__name__)

AUDITED_ONE_IN = 512
"""Samples of which one is encoded in full too."""

_MOST_KINDS = 64
"""Kinds of records that a process audits the first of."""

_SAYS_MORE = re.compile(r"<\|\w+\|>|</?think>|<(?:image|video|audio|bbox|ref-object|cot-process|start-image)>")
"""A text that a template may treat otherwise than others: tokens, thoughts, tags."""


@attrs.frozen
class _Read:
    """A sample that was read, and the texts that it becomes."""

    index: int
    sample: dict[str, Any]
    facts: tuple[MediaFacts, ...]

    images: MediaCost | None
    """Cost of its images beyond stand-ins; None if a header does not tell that of all its media."""

    videos: MediaCost
    """Cost of its videos beyond stand-ins."""

    pieces: Pieces | None
    """None if it has to be measured by itself."""

    def with_media(self, measured: Measurement) -> Measurement:
        """Return a measurement, of stand-ins, with the cost of what they stand for."""
        if not self.facts:
            return measured
        images = self.images or MediaCost()
        return attrs.evolve(
            measured,
            length=measured.length + images.tokens + self.videos.tokens,
            patches=measured.patches + images.patches,
            frames=measured.frames + self.videos.frames,
            video_patches=measured.video_patches + self.videos.patches,
        )


class QuickMeasurer:
    """Measures samples of an encoder without encoding each as it is."""

    def __init__(self, encoder: SwiftEncoder, *, in_full: Callable[[int], Measurement]) -> None:
        """
        Measure what an encoder encodes.

        Args:
            encoder: Gives the samples.
            in_full: Measures one by encoding it.
        """
        self._encoder, self._in_full = encoder, in_full
        self._kinds: set[object] = set()

    @cached_property
    def _counter(self) -> PieceCounter | None:
        """Counter of many samples at once; None if each is to be encoded."""
        template, tokens = self._encoder.template, self._encoder.image_tokens
        media = {} if tokens is None else {"image": tokens.token}
        if tokens is not None and reads_videos(template):
            media["video"] = template.video_token_id
        counter, why_not = prove_pieces(template, tokens=media)
        if counter is None:
            self._log_once(f"every sample is encoded by itself to be measured: {why_not}")
        return counter

    @cached_property
    def image_lengths(self) -> tuple[ImageLengths | None, str]:
        """Lengths of images by their headers, and how; or None, and why there are none."""
        lengths, why = prove_lengths(self._encoder.template)
        if lengths is None:
            self._log_once(f"every sample with images is encoded in full: {why}")
        else:
            self._log_once(f"lengths of images come from their headers, by {why}")
        return lengths, why

    @cached_property
    def _counts_videos(self) -> bool:
        """Whether samples with videos are counted with others."""
        assert self._counter is not None  # noqa: S101  # it counts all others
        try:
            return prove_stand_in(self._encoder.template, self._counter, "video")
        except Exception as error:  # noqa: BLE001  # a full encode says with the record's place what else is wrong
            self._counter.stand_ins.pop("video", None)
            log.info("samples with videos are measured one by one: %s: %s", type(error).__name__, error)
        return False

    def _log_once(self, text: str) -> None:
        _log_once(f"{self._encoder.template.template_meta.template_type}: {text}")

    def measure(self, indices: Sequence[int]) -> tuple[list[Outcome], bytes]:
        """
        Measure samples, and return the digests of their records too, all zero where they are not
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
        counted = iter(self._counter.measure(ready) if self._counter is not None else ())
        outcomes = [one if isinstance(one, RecordError) else self._outcome(one, counted) for one in read]
        return outcomes, b"".join(digest or bytes(DIGEST_BYTES) for digest in digests)

    def by_headers(self, index: int) -> Measurement:
        """
        Measure sample *index* with others in place of its images and videos, and add what these
        cost by their headers, where that is proven to be exact; else in full.
        """
        return self._by_stand_ins(self._read(index, self._encoder.records.read(index)[0]))

    def _read(self, index: int, record: object) -> _Read:
        """
        Return a record as a sample, with what its images' headers and its videos' containers say;
        RecordError if it is none.
        """
        encoder = self._encoder
        sample = encoder.sample_of(index, record)
        images = sample.get("images", ())
        facts = encoder.image_facts(index, images)
        videos = [encoder.video_facts(index, video) for video in sample.get("videos", ())]
        kept = (*facts, *map(encoder.stored_facts, videos))
        of_images = self.image_lengths[0] if images else None
        of_videos = encoder.video_lengths if videos else None
        if (why := encoder.why_in_full(sample)) is not None:
            self._log_once(why)
        if why or any(one.doubt for one in videos) or (images and of_images is None) or (videos and of_videos is None):
            return _Read(index, sample, kept, None, MediaCost(), None)
        with encoder.named(index, "an image cannot be encoded: "):
            costs = [of_images.beyond_stand_in(one.width, one.height) for one in facts] if of_images else []
        shown = [of_videos.beyond_stand_in(one) for one in videos] if of_videos else []
        pieces = self._pieces(sample, image=len(images), video=len(videos))
        return _Read(index, sample, kept, sum(costs, MediaCost()), sum(shown, MediaCost()), pieces)

    def _pieces(self, sample: dict[str, Any], **counts: int) -> Pieces | None:
        """Return the texts of a sample; None if it has to be measured by itself."""
        counter = self._counter
        if counter is None or (counts["video"] and not self._counts_videos):
            return None
        if counts["image"] and "image" not in counter.stand_ins:
            return None
        try:
            return counter.pieces(sample, **counts)
        except Exception:  # noqa: BLE001  # whatever the template raises, a full encode says with the record's place
            return None

    def _by_stand_ins(self, one: _Read) -> Measurement:
        """Encode and measure a sample, with stand-ins for its media if their cost is known."""
        encoder, images, videos = self._encoder, one.sample.get("images", ()), one.sample.get("videos", ())
        if not (images or videos) or one.images is None:
            return self._in_full(one.index)
        standing = {
            **one.sample,
            "images": [STAND_INS["image"]] * len(images),
            "videos": [STAND_INS["video"]] * len(videos),
        }
        limit = encoder.template.max_length
        with untruncated(encoder.template):
            found = one.with_media(encoder.measured(one.index, encoder.encode_messages(one.index, standing)))
        # Where the template truncates, what goes depends on where the images stand.
        return found if limit is None or found.length <= limit else self._in_full(one.index)

    def _outcome(self, one: _Read, counted: Iterator[Measurement | None]) -> Outcome:
        """Return the measurement of a sample that was read."""
        quick = None if one.pieces is None else next(counted)
        limit = self._encoder.template.max_length
        quick = None if quick is None else one.with_media(quick)
        try:
            # Which tokens a truncated sample keeps is the template's to say.
            if quick is None or (limit is not None and quick.length > limit):
                return MeasuredSample(self._by_stand_ins(one), one.facts)
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
            encoded = self._by_stand_ins(one) if quick.videos else self._in_full(one.index)
        except RecordError:
            # As a damaged image behind a sound header: which of them are found must not depend on
            # which are encoded.
            return
        if encoded != quick:
            raise ShortcutError(str(self._encoder.records.where(one.index)), to_row(quick), to_row(encoded))


@cache
def _log_once(text: str) -> None:
    log.info("%s", text)


def _kind(sample: dict[str, Any]) -> object:
    """Return the roles, keys and tags by which a template treats a sample."""
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

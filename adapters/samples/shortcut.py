"""
Measurements of many samples at once: tokens of the texts that ms-swift's template makes of them,
and costs of media by the headers of images and the containers of videos.

The template itself says which texts a sample is, and which of them are trained; only the tokenizer
is asked for many samples together, and for numbers of tokens instead of lists of them. What a full
encode does with the tokens afterwards is done here with the texts: an end of turn behind an answer
is trained, the first position is not, and each image adds what one of its size does, each video
what one of its frames does.

Some samples are encoded in full too, and compared: the first of each kind of record in each
process, and one in `AUDITED_ONE_IN` of those without videos, since decoding one takes as long as
counting hundreds.
"""

# ruff: noqa: SLF001  # the template has no public way to ask for its texts

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import groupby
from typing import Any

import attrs
from PIL import Image
from swift.template import StdTemplateInputs, Template
from transformers import PreTrainedTokenizerFast

from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.samples.media import DUMMY_SIZE, FRAMES_OF_LAYER, MediaCost, measure_encoded, without_truncation
from packplan.adapters.samples.media_lengths import ImageLengths, prove_image_lengths
from packplan.adapters.samples.video_reading import reads_videos
from packplan.core.errors import RecordError
from packplan.core.samples.identity import DIGEST_BYTES
from packplan.core.samples.tables import MeasuredSample, Measurement, MediaFacts, RecordOutcome, ShortcutError, to_row

log = logging.getLogger(__name__)

AUDITED_ONE_IN = 512
"""Samples of which one is encoded in full too."""

_MOST_KINDS = 64
"""Kinds of records that a process audits the first of."""

_SAYS_MORE = re.compile(r"<\|\w+\|>|</?think>|<(?:image|video|audio|bbox|ref-object|cot-process|start-image)>")
"""A text that a template may treat otherwise than others: tokens, thoughts, tags."""

_REDONE = (
    "encode", "_encode_truncated", "_encode_context_list", "_add_dynamic_eos", "_get_length", "_tokenize",
    "_split_special_tokens",
)  # fmt: skip
"""
Methods that this replaces: a template with one of its own encodes each sample in full.
"""

_ANSWER = {"role": "assistant", "content": "So."}

_PROOFS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Why?"}, _ANSWER]},
    {"messages": [{"role": "user", "content": "Why?"}, _ANSWER, {"role": "user", "content": "And?"}, _ANSWER]},
)
"""Samples that are compared before a template's texts are trusted."""

STAND_INS: Mapping[str, Any] = {
    "image": Image.new("RGB", DUMMY_SIZE),
    "video": [Image.new("RGB", DUMMY_SIZE)] * FRAMES_OF_LAYER,
}
"""Kinds of media -> what stands in a sample for each of them."""

_FIND_TAG = re.compile("|".join(map(re.escape, Template.special_tokens))).search


@attrs.frozen
class Piece:
    """A part of a sample: a text, or tokens that the template knows already."""

    content: str | list[int]

    trained: bool


@attrs.frozen
class Pieces:
    """A sample, before it is tokenized."""

    parts: list[Piece]

    counts: Mapping[str, int]
    """Kinds of media -> how many of them it has; none of a kind that it lacks."""


@attrs.frozen
class StandIn:
    """An image of `DUMMY_SIZE`, or a video of two such frames, in a sample."""

    tokens: int
    """Tokens of it, beyond those of the texts that the template writes for it."""

    patches: int

    mentions: int
    """How often those texts say its kind's own token."""


class PieceCounter:
    """Measures samples by the texts that a template makes of them."""

    def __init__(self, template: Template, *, tokens: Mapping[str, int]) -> None:
        """
        Count for a template; what its samples have in common is found by `prove_pieces`.

        Args:
            template: In training mode.
            tokens: Kinds of media that samples may have -> the token that stands for parts of one.
        """
        # A copy: what is changed here is not changed for full encodes, which audit this.
        self._template = copy.copy(template)
        self._template.max_length = None
        self._template._split_special_tokens = _split_special_tokens
        self._template.replace_tag = self._tag_of
        self._tag = template.replace_tag
        self._tags: dict[tuple[str, int], list[Any]] = {}
        self._tokenizer = template.tokenizer
        self._in_batches = _is_plain(template.tokenizer)
        suffix = self._template._encode_context_list(self._template.template_meta.suffix)[0]
        self._suffix: list[int] = suffix
        self._said = {kind: self._tokenizer.convert_ids_to_tokens(token) for kind, token in tokens.items()}
        self.stand_ins: dict[str, StandIn] = {}
        """Kinds of media -> what one is in a sample; samples with others cannot be counted."""

    def pieces(self, sample: dict[str, Any], **counts: int) -> Pieces:
        """
        Return the texts that a sample becomes; whatever the template raises.

        Args:
            sample: As `SwiftEncoder.read` gives it.
            **counts: Number of each kind of media, `image` and `video`.
        """
        template = self._template
        inputs = StdTemplateInputs.from_dict({**sample, "images": [], "videos": []})
        template._preprocess_inputs(inputs)
        for kind, number in counts.items():
            setattr(inputs, f"{kind}s", [STAND_INS[kind]] * number)
        template._swift_prepare_inputs(inputs)
        contexts, weights, _ = template._swift_encode(inputs)
        contexts, weights = template._simplify_context_list(contexts, weights, inputs)
        held = {kind: number for kind, number in counts.items() if number}
        return Pieces([Piece(one, weight > 0) for one, weight in zip(contexts, weights, strict=True)], held)

    def _tag_of(self, media_type: str, index: int, inputs: StdTemplateInputs) -> list[Any]:
        """
        Return the template's text for an image or a video at a position; asked once for all.
        """
        place = (media_type, index)
        if place not in self._tags:
            self._tags[place] = list(self._tag(media_type, index, inputs))
        return self._tags[place]

    def measure(self, samples: Sequence[Pieces]) -> list[Measurement | None]:
        """
        Return the measurement of each sample, its media as stand-ins; None where a text has a token
        of media itself.
        """
        texts = [part.content for sample in samples for part in sample.parts if isinstance(part.content, str)]
        tokens = iter(self._tokenize(texts))
        return [self._measurement(sample, tokens) for sample in samples]

    def _tokenize(self, texts: list[str]) -> list[_Tokens]:
        """Return the tokens of each text."""
        if self._in_batches:
            found = self._tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        else:
            found = map(self._template._tokenize, texts)
        return [_Tokens(one) for one in found]

    def _measurement(self, sample: Pieces, tokens: Iterator[Any]) -> Measurement | None:
        parts = [
            (part, next(tokens) if isinstance(part.content, str) else _Tokens(part.content)) for part in sample.parts
        ]
        held = [(kind, self.stand_ins[kind], number) for kind, number in sample.counts.items()]
        if self.count_media_tokens(sample) != Counter({kind: one.mentions * number for kind, one, number in held}):
            return None
        parts = [(part, ids) for part, ids in parts if len(ids)]
        supervised = sum(len(ids) for part, ids in parts if part.trained)
        if parts and parts[0][0].trained:
            supervised -= 1  # nothing comes before the first token
        patches = {kind: one.patches * number for kind, one, number in held}
        return Measurement(
            length=sum(len(ids) for _, ids in parts) + sum(one.tokens * number for _, one, number in held),
            supervised=supervised + self._trained_ends(parts),
            images=sample.counts.get("image", 0),
            patches=patches.get("image", 0),
            videos=sample.counts.get("video", 0),
            frames=FRAMES_OF_LAYER * sample.counts.get("video", 0),
            video_patches=patches.get("video", 0),
        )

    def count_media_tokens(self, sample: Pieces) -> Counter[str]:
        """Return the number of tokens of each kind of media in the texts of a sample."""
        texts = [part.content for part in sample.parts if isinstance(part.content, str)]
        return Counter({kind: sum(text.count(token) for text in texts) for kind, token in self._said.items()})

    def _trained_ends(self, parts: list[tuple[Piece, Any]]) -> int:
        """Return the number of trained tokens that end answers whose end is not trained as text."""
        found, answered, size = 0, False, len(self._suffix)
        for trained, run in groupby(parts, key=lambda one: one[0].trained):
            if not trained and answered:
                start: list[int] = []
                for _, ids in run:
                    start += ids.first(size - len(start)) if len(start) < size else []
                found += size if start == self._suffix else 0
            answered = answered or trained
        return found


@attrs.frozen
class _Tokens:
    """Tokens that are known, or that the tokenizer's library gave for a text."""

    held: Any

    def __len__(self) -> int:
        return len(self.held)

    def first(self, number: int) -> list[int]:
        """Return the ids of the first tokens."""
        ids: list[int] = getattr(self.held, "ids", self.held)
        return ids[:number]


def _is_plain(tokenizer: Any) -> bool:
    """Return whether a tokenizer does nothing but call its library."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.__call__ is PreTrainedTokenizerFast.__call__
    )


def _split_special_tokens(contexts: list[Any], weights: list[float]) -> tuple[list[Any], list[float]]:
    """Return texts cut at the tags that stand for media; most have none."""
    kept: list[Any] = []
    theirs: list[float] = []
    for context, weight in zip(contexts, weights, strict=True):
        if isinstance(context, str) and not _FIND_TAG(context):
            more, more_weights = ([context], [weight]) if context else ([], [])
        else:
            more, more_weights = Template._split_special_tokens([context], [weight])
        kept += more
        theirs += more_weights
    return kept, theirs


def prove_pieces(template: Template, *, tokens: Mapping[str, int]) -> tuple[PieceCounter | None, str]:
    """
    Return a counter of a template's samples that agrees with full encodes of a few; or None, and
    the reason. Samples with media of which it has no `stand_ins` are none of them.

    Args:
        template: In training mode.
        tokens: Kinds of media that samples may have -> the token that stands for parts of one; none
            for a model of text.
    """
    kind, base = type(template), Template
    if template.task_type != "causal_lm" or template.template_backend != "swift" or template.is_encoder_decoder:
        return None, f"it is for {template.task_type} by {template.template_backend}"
    redone = _REDONE if tokens else (*_REDONE, "_encode")
    own = [name for name in redone if inspect.getattr_static(kind, name) is not inspect.getattr_static(base, name)]
    if own:
        return None, f"its template has a way of its own to {own[0].strip('_')}"
    counter = PieceCounter(template, tokens=tokens)
    try:
        for sample in _PROOFS:
            (found,) = counter.measure([counter.pieces(sample)])
            if found != _measure_in_full(template, sample):
                return None, "its texts are not all that its samples are"
    except Exception as error:  # noqa: BLE001  # whatever a template does not take is said of the records that have it
        return None, f"a sample of its texts alone cannot be made ({type(error).__name__}: {error})"
    for medium in tokens:
        try:
            _prove_stand_in(template, counter, medium)
        except Exception as error:  # noqa: BLE001  # a full encode says with the record's place what else is wrong
            counter.stand_ins.pop(medium, None)
            log.debug("samples with a medium, %s, are encoded in full: %s: %s", medium, type(error).__name__, error)
    return counter, ""


def _prove_stand_in(template: Template, counter: PieceCounter, medium: str) -> None:
    """
    Let a counter know what stands for an image or a video in a sample, if that is the same each
    time, and beside the media that it knows.
    """
    samples = [{medium: 1}, {medium: 2}]
    if counter.stand_ins:
        samples.append(dict.fromkeys((*counter.stand_ins, medium), 1))
    for number, counts in enumerate(samples):
        tags = "".join(f"<{kind}>" * count for kind, count in counts.items())
        sample = {"messages": [{"role": "user", "content": f"{tags}?"}, _ANSWER]}
        pieces = counter.pieces(sample, **counts)
        encoded = _measure_in_full(template, sample, **counts)
        if number == 0:
            counter.stand_ins[medium] = StandIn(0, 0, counter.count_media_tokens(pieces)[medium])
            (found,) = counter.measure([pieces])
            if found is not None:
                tokens, patches = encoded.length - found.length, encoded.patches + encoded.video_patches
                counter.stand_ins[medium] = StandIn(tokens, patches, counter.count_media_tokens(pieces)[medium])
        if counter.measure([pieces]) != [encoded]:
            del counter.stand_ins[medium]
            return


def _measure_in_full(template: Template, sample: dict[str, Any], **counts: int) -> Measurement:
    """Return the measurement of a full encode."""
    media = {f"{kind}s": [STAND_INS[kind]] * number for kind, number in counts.items()}
    with without_truncation(template):
        encoded = template.encode({**sample, **media}, return_length=True)
    return measure_encoded(template, encoded, images=counts.get("image", 0), videos=counts.get("video", 0))


@attrs.frozen
class _Read:
    """A sample that was read, and the texts that it becomes."""

    index: int
    sample: dict[str, Any]
    facts: tuple[MediaFacts, ...]

    pieces: Pieces | None = None
    """None if it has to be encoded in full."""

    images: MediaCost = attrs.field(factory=MediaCost)
    """Cost of its images beyond stand-ins."""

    videos: MediaCost = attrs.field(factory=MediaCost)
    """Cost of its videos beyond stand-ins."""

    def with_media(self, measured: Measurement) -> Measurement:
        """Return a measurement, of stand-ins, with the cost of what they stand for."""
        if not self.facts:
            return measured
        return attrs.evolve(
            measured,
            length=measured.length + self.images.tokens + self.videos.tokens,
            patches=measured.patches + self.images.patches,
            frames=measured.frames + self.videos.frames,
            video_patches=measured.video_patches + self.videos.patches,
        )


class ShortcutMeasurer:
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
        counter, reason = prove_pieces(template, tokens=media)
        if counter is None:
            self._log_once(f"every sample is encoded by itself to be measured: {reason}")
        return counter

    @cached_property
    def image_lengths(self) -> ImageLengths | None:
        """Lengths of images by their headers; None if samples with images are encoded in full."""
        lengths = prove_image_lengths(self._encoder.template)
        if lengths is None:
            self._log_once("no arithmetic gives the lengths of images, so samples with some are encoded in full")
        else:
            self._log_once(f"lengths of images come from their headers, by {lengths.name}")
        return lengths

    def _log_once(self, text: str) -> None:
        _log_once(f"{self._encoder.template.template_meta.template_type}: {text}")

    def measure(self, indices: Sequence[int]) -> tuple[list[RecordOutcome], bytes]:
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

    def _read(self, index: int, record: object) -> _Read:
        """
        Return a record as a sample, with what its images' headers and its videos' containers say;
        RecordError if it is none.
        """
        encoder = self._encoder
        sample = encoder.to_sample(index, record)
        images = sample.get("images", ())
        facts = encoder.image_facts(index, images)
        videos = [encoder.video_facts(index, video) for video in sample.get("videos", ())]
        kept = (*facts, *map(encoder.stored_facts, videos))
        of_images = self.image_lengths if images else None
        of_videos = encoder.video_lengths if videos else None
        if (why := encoder.full_encode_reason(sample)) is not None:
            self._log_once(why)
        if why or any(one.doubt for one in videos) or (images and of_images is None) or (videos and of_videos is None):
            return _Read(index, sample, kept)
        with encoder.records.name_errors(index, "an image cannot be encoded: "):
            costs = [of_images.beyond_stand_in(one.width, one.height) for one in facts] if of_images else []
        shown = [of_videos.beyond_stand_in(one) for one in videos] if of_videos else []
        pieces = self._pieces(sample, image=len(images), video=len(videos))
        return _Read(index, sample, kept, pieces, sum(costs, MediaCost()), sum(shown, MediaCost()))

    def _pieces(self, sample: dict[str, Any], **counts: int) -> Pieces | None:
        """Return the texts of a sample; None if it has to be encoded in full."""
        counter = self._counter
        if counter is None or any(number and kind not in counter.stand_ins for kind, number in counts.items()):
            return None
        try:
            return counter.pieces(sample, **counts)
        except Exception:  # noqa: BLE001  # whatever the template raises, a full encode says with the record's place
            return None

    def _outcome(self, one: _Read, counted: Iterator[Measurement | None]) -> RecordOutcome:
        """
        Return the measurement of a sample that was read; ShortcutError if it is audited, and
        encodes to another.
        """
        quick = None if one.pieces is None else next(counted)
        limit = self._encoder.template.max_length
        quick = None if quick is None else one.with_media(quick)
        # Which tokens a truncated sample keeps is the template's to say.
        is_counted = quick is not None and (limit is None or quick.length <= limit)
        if quick is not None and is_counted and not self._audits(one):
            return MeasuredSample(quick, one.facts)
        try:
            encoded = self._in_full(one.index)
        except RecordError as error:
            # As a damaged image behind a sound header: which of them are found must not depend on
            # which are audited.
            return MeasuredSample(quick, one.facts) if quick is not None and is_counted else error
        if quick is not None and is_counted and encoded != quick:
            raise ShortcutError(str(self._encoder.records.location(one.index)), to_row(quick), to_row(encoded))
        return MeasuredSample(encoded, one.facts)

    def _audits(self, one: _Read) -> bool:
        """Return whether a sample is encoded in full too."""
        kind = _kind(one.sample)
        if kind not in self._kinds and len(self._kinds) < _MOST_KINDS:
            self._kinds.add(kind)
            return True
        return one.index % AUDITED_ONE_IN == 0 and "videos" not in one.sample


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

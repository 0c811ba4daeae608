"""
Lengths of many samples at once, by counting the tokens of the texts that ms-swift's template makes.

The template itself says which texts a sample is, and which of them are trained; only the tokenizer
is asked for many samples together, and for numbers of tokens instead of lists of them. What a full
encode does with the tokens afterwards is done here with the texts: an end of turn behind an answer
is trained, the first position is not, and each image adds what one of its size does, each video
what one of its frames does.
"""

# ruff: noqa: SLF001  # the template has no public way to ask for its texts

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs
from PIL import Image
from swift.template import StdTemplateInputs, Template
from transformers import PreTrainedTokenizerFast

from packplan.adapters.samples.media import DUMMY_SIZE, FRAMES_OF_LAYER, measured, untruncated
from packplan.core.samples import Measurement

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

_PLAIN, _PLAIN_MESSAGE = {"messages", "images", "videos", "channel"}, {"role", "content"}
"""
Keys of samples and messages that are texts alone. ms-swift's own way for all keys takes a tenth of
a sample's time.
"""


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

    said: int
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
        inputs = _plain_inputs(sample) or StdTemplateInputs.from_dict({**sample, "images": [], "videos": []})
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
        if self.said(sample) != Counter({kind: one.said * number for kind, one, number in held}):
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

    def said(self, sample: Pieces) -> Counter[str]:
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


def _plain_inputs(sample: dict[str, Any]) -> StdTemplateInputs | None:
    """Return the template's inputs of a sample of texts alone; None if there is more to it."""
    messages = sample["messages"]
    if not sample.keys() <= _PLAIN or not all(message.keys() <= _PLAIN_MESSAGE for message in messages):
        return None
    system = None
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    if any(message["role"] not in {"user", "assistant"} or type(message["content"]) is not str for message in messages):
        return None
    return StdTemplateInputs([dict(message) for message in messages], system)


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
    Return what measures a template's samples by their texts, as a few of them encode; or None, and
    why nothing does. Samples with images are none of them where it has no `stand_ins` for one; for
    videos, `prove_stand_in` is asked when the first comes.

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
        if "image" in tokens:
            prove_stand_in(template, counter, "image")
    except Exception as error:  # noqa: BLE001  # whatever a template does not take is said of the records that have it
        return None, f"a sample of its texts alone cannot be made ({type(error).__name__}: {error})"
    return counter, ""


def prove_stand_in(template: Template, counter: PieceCounter, medium: str) -> bool:
    """
    Let a counter know what stands for an image or a video in a sample; return whether it does: if
    that is the same each time, and beside the media that it knows.

    Args:
        template: Template of a model that sees.
        counter: Measures its texts.
        medium: `image` or `video`.
    """
    found: Measurement | None
    samples = [{medium: 1}, {medium: 2}]
    if counter.stand_ins:
        samples.append(dict.fromkeys((*counter.stand_ins, medium), 1))
    for number, counts in enumerate(samples):
        tags = "".join(f"<{kind}>" * count for kind, count in counts.items())
        sample = {"messages": [{"role": "user", "content": f"{tags}?"}, _ANSWER]}
        pieces = counter.pieces(sample, **counts)
        encoded = _measure_in_full(template, sample, **counts)
        if number == 0:
            counter.stand_ins[medium] = StandIn(0, 0, counter.said(pieces)[medium])
            (found,) = counter.measure([pieces])
            if found is not None:
                tokens, patches = encoded.length - found.length, encoded.patches + encoded.video_patches
                counter.stand_ins[medium] = StandIn(tokens, patches, counter.said(pieces)[medium])
        (found,) = counter.measure([pieces])
        if found != encoded:
            del counter.stand_ins[medium]
            return False
    return True


def _measure_in_full(template: Template, sample: dict[str, Any], **counts: int) -> Measurement:
    """Return the measurement of a full encode."""
    media = {f"{kind}s": [STAND_INS[kind]] * number for kind, number in counts.items()}
    with untruncated(template):
        encoded = template.encode({**sample, **media}, return_length=True)
    return measured(template, encoded, images=counts.get("image", 0), videos=counts.get("video", 0))

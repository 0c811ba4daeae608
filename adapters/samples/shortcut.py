"""
Measures many samples in one call without encoding each of them, which is called the shortcut.

ms-swift's template splits a sample into pieces of text. Each piece is trained as a whole, or not at
all. The tokenizer counts the tokens in the pieces of many samples in one call. The costs of images
and videos are computed from headers and containers, as differences from stand-ins that are encoded
once. Two rules of ms-swift's encode are repeated in this module. After a trained answer, the
end-of-turn tokens are trained too. The first position is never trained.
"""

# ruff: noqa: SLF001  # the template has no public way to ask for its texts

import copy
import inspect
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs
from PIL import Image
from swift.template import StdTemplateInputs, Template
from transformers import PreTrainedTokenizerFast

from packplan.adapters.models import replace_attributes
from packplan.adapters.samples.media import DUMMY_SIZE, FRAMES_PER_LAYER, measure_encoded
from packplan.core.samples.tables import NOTHING, Measurement

log = logging.getLogger(__name__)

_REPLACED = (
    "encode", "_encode_truncated", "_encode_context_list", "_add_dynamic_eos", "_get_length", "_tokenize",
    "_split_special_tokens",
)  # fmt: skip
"""
Methods of `Template` that the shortcut replaces. If a template overrides one of these methods, each
sample is encoded in full.
"""

_ANSWER = {"role": "assistant", "content": "So."}

_PROOFS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Why?"}, _ANSWER]},
    {"messages": [{"role": "user", "content": "Why?"}, _ANSWER, {"role": "user", "content": "And?"}, _ANSWER]},
)
"""Text samples for which the shortcut has to agree with full encodes."""

STAND_INS: Mapping[str, Any] = {
    "image": Image.new("RGB", DUMMY_SIZE),
    "video": [Image.new("RGB", DUMMY_SIZE)] * FRAMES_PER_LAYER,
}
"""Black image and black video that stand in for media, by the kind of medium."""

_FIND_TAG = re.compile("|".join(map(re.escape, Template.special_tokens))).search


@attrs.frozen
class Piece:
    """Part of a sample: a text that is tokenized separately, or token ids."""

    content: str | list[int]
    """Text, or token ids that the template wrote."""

    trained: bool
    """Whether the loss counts the tokens of the piece."""


@attrs.frozen
class SplitSample:
    """Sample that is split into pieces, which are not yet tokenized."""

    pieces: list[Piece]

    media: Mapping[str, int]
    """
    Number of media in the sample by kind, `image` or `video`; kinds that the sample lacks have no
    entry.
    """

    extra: Measurement
    """Cost of the sample's media beyond the cost of their stand-ins."""


@attrs.frozen
class StandInCost:
    """Cost of the black image or video that stands in for one medium of a sample."""

    cost: Measurement
    """Measurement that the stand-in adds to a sample, beyond the tokens of the sample's texts."""

    mentions: int
    """Number of media tokens in the texts that the template writes for the stand-in."""


class PieceCounter:
    """Measures samples by counting tokens in the pieces into which a template splits them."""

    def __init__(self, template: Template, *, tokens: Mapping[str, int]) -> None:
        """
        Prepare a template to split samples; `find_piece_counter` adds the stand-ins.

        Args:
            template: Template in training mode.
            tokens: Id of the media token of each kind of medium that samples may have.
        """
        # Changes of a copy do not affect full encodes, which check this shortcut.
        self._template = copy.copy(template)
        self._template.max_length = None
        self._template._split_special_tokens = _split_special_tokens
        self._template.replace_tag, self._replace_tag = self._cached_stand_in, template.replace_tag
        self._tags: dict[tuple[str, int], list[Any]] = {}
        self._tokenizer = template.tokenizer
        self._counts_in_batches = _is_plain_fast_tokenizer(template.tokenizer)
        self._suffix: list[int] = self._template._encode_context_list(self._template.template_meta.suffix)[0]
        self._media_tokens = {kind: self._tokenizer.convert_ids_to_tokens(token) for kind, token in tokens.items()}
        self.stand_ins: dict[str, StandInCost] = {}
        """Cost of the stand-in by kind of medium; samples with other kinds are encoded in full."""

    def split(self, sample: dict[str, Any], extra: Measurement = NOTHING, /, **media: int) -> SplitSample:
        """
        Split a sample into pieces; any error of the template is raised unchanged.

        Args:
            sample: Sample from `SwiftEncoder.read_sample`, which is not changed.
            extra: Cost of the sample's media beyond the cost of their stand-ins.
            **media: Number of media of each kind, `image` and `video`.
        """
        template = self._template
        inputs = StdTemplateInputs.from_dict({**sample, "images": [], "videos": []})
        template._preprocess_inputs(inputs)
        for kind, number in media.items():
            setattr(inputs, f"{kind}s", [STAND_INS[kind]] * number)
        template._swift_prepare_inputs(inputs)
        contexts, weights, _ = template._swift_encode(inputs)
        contexts, weights = template._simplify_context_list(contexts, weights, inputs)
        pieces = [Piece(one, weight > 0) for one, weight in zip(contexts, weights, strict=True)]
        return SplitSample(pieces, {kind: number for kind, number in media.items() if number}, extra)

    def _cached_stand_in(self, media_type: str, index: int, inputs: StdTemplateInputs) -> list[Any]:
        """Return the template's texts and tokens for a stand-in, cached by kind and index."""
        if (key := (media_type, index)) not in self._tags:
            self._tags[key] = list(self._replace_tag(media_type, index, inputs))
        return self._tags[key]

    def count(self, samples: Sequence[SplitSample]) -> list[Measurement | None]:
        """
        Return each sample's measurement: the tokens of its pieces and the cost of its media.

        The entry of a sample whose own text contains a media token is None.
        """
        texts = [piece.content for sample in samples for piece in sample.pieces if isinstance(piece.content, str)]
        if self._counts_in_batches:
            tokens = iter(self._tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        else:
            tokens = map(self._template._tokenize, texts)
        return [self._add_up_pieces(sample, tokens) for sample in samples]

    def _add_up_pieces(self, sample: SplitSample, tokens: Iterator[Any]) -> Measurement | None:
        pieces = [(one, next(tokens) if isinstance(one.content, str) else one.content) for one in sample.pieces]
        stand_ins = [(kind, self.stand_ins[kind], number) for kind, number in sample.media.items()]
        if self.count_media_tokens(sample) != Counter({kind: one.mentions * number for kind, one, number in stand_ins}):
            return None
        pieces = [(piece, ids) for piece, ids in pieces if len(ids)]
        supervised = sum(len(ids) for piece, ids in pieces if piece.trained)
        if pieces and pieces[0][0].trained:
            supervised -= 1  # no logits predict the first token
        length = sum(len(ids) for _, ids in pieces)
        texts = attrs.evolve(NOTHING, length=length, supervised=supervised + self._count_trained_turn_ends(pieces))
        return sum((one.cost for _, one, number in stand_ins for _ in range(number)), texts + sample.extra)

    def count_media_tokens(self, sample: SplitSample) -> Counter[str]:
        """Return how often the media token of each kind occurs in the texts of a sample."""
        texts = [piece.content for piece in sample.pieces if isinstance(piece.content, str)]
        return Counter({kind: sum(text.count(token) for text in texts) for kind, token in self._media_tokens.items()})

    def _count_trained_turn_ends(self, pieces: list[tuple[Piece, Any]]) -> int:
        """Return the number of end-of-turn tokens that are trained after a trained answer."""
        found, answered, size = 0, False, len(self._suffix)
        for trained, run in groupby(pieces, key=lambda one: one[0].trained):
            if not trained and answered:
                start: list[int] = []
                for _, ids in run:
                    start += getattr(ids, "ids", ids)[: size - len(start)] if len(start) < size else []
                found += size if start == self._suffix else 0
            answered = answered or trained
        return found


def _is_plain_fast_tokenizer(tokenizer: Any) -> bool:
    """Return whether a tokenizer is a `PreTrainedTokenizerFast` with unchanged encoding methods."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.__call__ is PreTrainedTokenizerFast.__call__
    )


def _split_special_tokens(contexts: list[Any], weights: list[float]) -> tuple[list[Any], list[float]]:
    """Split texts at media tags, and return the parts with their weights."""
    split: list[Any] = []
    split_weights: list[float] = []
    for context, weight in zip(contexts, weights, strict=True):
        if isinstance(context, str) and not _FIND_TAG(context):
            more, more_weights = ([context], [weight]) if context else ([], [])
        else:
            more, more_weights = Template._split_special_tokens([context], [weight])
        split += more
        split_weights += more_weights
    return split, split_weights


def find_piece_counter(template: Template, *, tokens: Mapping[str, int]) -> tuple[PieceCounter | None, str]:
    """
    Return a counter that agrees with full encodes of test samples, or None and a reason.

    Args:
        template: Template in training mode.
        tokens: Id of the media token of each kind of medium that samples may have; empty for a
            text-only model.
    """
    kind, base = type(template), Template
    if template.task_type != "causal_lm" or template.template_backend != "swift" or template.is_encoder_decoder:
        return None, f"the template is for the task {template.task_type} with the backend {template.template_backend}"
    replaced = _REPLACED if tokens else (*_REPLACED, "_encode")
    own = [name for name in replaced if inspect.getattr_static(kind, name) is not inspect.getattr_static(base, name)]
    if own:
        return None, f"the template overrides {own[0].strip('_')}"
    counter = PieceCounter(template, tokens=tokens)
    try:
        for sample in _PROOFS:
            if counter.count([counter.split(sample)]) != [_measure_with_stand_ins(template, sample)]:
                return None, "for test samples, the shortcut counts other numbers of tokens"
    except Exception as error:  # noqa: BLE001  # an error about a record is reported when the record is read
        return None, f"a sample with text only cannot be split ({type(error).__name__}: {error})"
    for medium in tokens:
        try:
            _add_stand_in(template, counter, medium)
        except Exception as error:  # noqa: BLE001  # a full encode reports errors with the record's file and line
            counter.stand_ins.pop(medium, None)
            log.debug("samples with the medium %s are encoded in full: %s: %s", medium, type(error).__name__, error)
    return counter, ""


def _add_stand_in(template: Template, counter: PieceCounter, medium: str) -> None:
    """
    Add the stand-in of a kind of medium to *counter* if its cost is constant.

    The cost has to be the same in a sample with one stand-in, with two, and with stand-ins of other
    kinds.
    """
    samples = [{medium: 1}, {medium: 2}]
    if counter.stand_ins:
        samples.append(dict.fromkeys((*counter.stand_ins, medium), 1))
    for media in samples:
        tags = "".join(f"<{kind}>" * number for kind, number in media.items())
        sample = {"messages": [{"role": "user", "content": f"{tags}?"}, _ANSWER]}
        split, encoded = counter.split(sample, **media), _measure_with_stand_ins(template, sample, **media)
        if medium not in counter.stand_ins:
            mentions = counter.count_media_tokens(split)[medium]
            counter.stand_ins[medium] = StandInCost(NOTHING, mentions)
            (texts,) = counter.count([split])
            counter.stand_ins[medium] = StandInCost(encoded - (texts or NOTHING), mentions)
        if counter.count([split]) != [encoded]:
            del counter.stand_ins[medium]
            return


def _measure_with_stand_ins(template: Template, sample: dict[str, Any], **media: int) -> Measurement:
    """Encode a sample in full with stand-ins for its media, and return the measurement."""
    stand_ins = {f"{kind}s": [STAND_INS[kind]] * number for kind, number in media.items()}
    with replace_attributes(template, max_length=None):
        encoded = template.encode({**sample, **stand_ins}, return_length=True)
    return measure_encoded(template, encoded, images=media.get("image", 0), videos=media.get("video", 0))

"""
Lengths of many samples at once, by counting the tokens of the texts that ms-swift's template makes.

The template itself says which texts a sample is, and which of them are trained; only the tokenizer
is asked for many samples together, and for numbers of tokens instead of lists of them. What a full
encode does with the tokens afterwards is done here with the texts: an end of turn behind an answer
is trained, the first position is not, and each image's place is as long as its patches say.
"""

# ruff: noqa: SLF001  # the template has no public way to ask for its texts

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from adapters import torchvision_shim  # noqa: F401  # before transformers and swift  # isort: skip

import attrs
from swift.template import StdTemplateInputs, Template
from transformers import PreTrainedTokenizerFast

from adapters.samples.image_headers import PROVEN
from core.samples import Measurement

_REDONE = (
    "encode", "_encode_truncated", "_encode_context_list", "_add_dynamic_eos", "_get_length", "_tokenize",
    "_split_special_tokens",
)  # fmt: skip
"""
What this does in the template's place: one that does it otherwise encodes each sample in full.
"""

_PLAIN = {"messages", "images", "channel"}
_PLAIN_MESSAGE = {"role", "content"}

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What the proven templates write for an image, before it is as long as its patches say."""


@attrs.frozen
class Piece:
    """A part of a sample: a text, or tokens that the template knows already."""

    content: str | list[int]

    trained: bool


@attrs.frozen
class Pieces:
    """A sample, before it is tokenized."""

    parts: list[Piece]

    num_images: int


class PieceCounter:
    """Measures samples by the texts that a template makes of them."""

    def __init__(self, template: Template) -> None:
        # A copy: what is changed here is not changed for full encodes, which audit this.
        self._template = copy.copy(template)
        self._template._split_special_tokens = _split_special_tokens
        self._template.replace_tag = _image_tag
        self._tokenizer = template.tokenizer
        self._in_batches = _is_plain(template.tokenizer)
        suffix = self._template._encode_context_list(self._template.template_meta.suffix)[0]
        self._suffix: list[int] = suffix
        self._image_token = getattr(template, "image_token_id", None)
        self._image_text = None
        if self._image_token is not None:
            self._image_text = self._tokenizer.convert_ids_to_tokens(self._image_token)

    @staticmethod
    def why_not(template: Template) -> str | None:
        """Return why a template's samples have to be encoded one by one; None if they need not."""
        kind, base = type(template), Template
        if template.task_type != "causal_lm" or template.template_backend != "swift" or template.is_encoder_decoder:
            return f"it is for {template.task_type} by {template.template_backend}"
        own = [name for name in _REDONE if inspect.getattr_static(kind, name) is not inspect.getattr_static(base, name)]
        if kind._encode is not base._encode and template.template_meta.template_type not in PROVEN:
            own.append("_encode")
        return f"it has its own {own[0]}" if own else None

    def pieces(self, sample: dict[str, Any], *, num_images: int) -> Pieces:
        """
        Return the texts that a sample becomes; whatever the template raises.

        Args:
            sample: As `SwiftEncoder.read` gives it.

            num_images: Images that it has.
        """
        template = self._template
        inputs = _plain_inputs(sample) or StdTemplateInputs.from_dict({**sample, "images": []})
        template._preprocess_inputs(inputs)
        inputs.images = [None] * num_images
        template._swift_prepare_inputs(inputs)
        contexts, weights, _ = template._swift_encode(inputs)
        contexts, weights = template._simplify_context_list(contexts, weights, inputs)
        return Pieces([Piece(one, weight > 0) for one, weight in zip(contexts, weights, strict=True)], num_images)

    def measure(self, samples: Sequence[Pieces]) -> list[Measurement | None]:
        """
        Return the measurement of each sample, its images as one token each; None where a text has
        the token of an image itself.
        """
        texts = [part.content for sample in samples for part in sample.parts if isinstance(part.content, str)]
        tokens = iter(self._tokenized(texts))
        return [self._measurement(sample, tokens) for sample in samples]

    def _tokenized(self, texts: list[str]) -> Sequence[Any]:
        """Return what has the length, and as `ids` the tokens, of each text."""
        if self._in_batches:
            encoded: Sequence[Any] = self._tokenizer.backend_tokenizer.encode_batch_fast(
                texts, add_special_tokens=False
            )
            return encoded
        return [_Tokens(self._template._tokenize(text)) for text in texts]

    def _measurement(self, sample: Pieces, tokens: Iterator[Any]) -> Measurement | None:
        parts = [
            (part, next(tokens) if isinstance(part.content, str) else _Tokens(part.content)) for part in sample.parts
        ]
        if self._image_text is not None:
            said = sum(part.content.count(self._image_text) for part, _ in parts if isinstance(part.content, str))
            if said != sample.num_images:
                return None
        parts = [(part, ids) for part, ids in parts if len(ids)]
        supervised = sum(len(ids) for part, ids in parts if part.trained)
        if parts and parts[0][0].trained:
            supervised -= 1  # nothing comes before the first token
        return Measurement(
            length=sum(len(ids) for _, ids in parts),
            supervised=supervised + self._trained_ends(parts),
            images=sample.num_images,
            patches=0,
        )

    def _trained_ends(self, parts: list[tuple[Piece, Any]]) -> int:
        """Return how many tokens that end an answer are trained though their text is not."""
        found, answered, size = 0, False, len(self._suffix)
        for trained, run in groupby(parts, key=lambda one: one[0].trained):
            if not trained and answered:
                start: list[int] = []
                for _, ids in run:
                    start += ids.ids[: size - len(start)] if len(start) < size else []
                found += size if start == self._suffix else 0
            answered = answered or trained
        return found


@attrs.frozen
class _Tokens:
    """Tokens that are known, as the tokenizer gives those of a text."""

    ids: list[int]

    def __len__(self) -> int:
        return len(self.ids)


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
        if isinstance(context, str) and not any(tag in context for tag in Template.special_tokens):
            more, more_weights = ([context], [weight]) if context else ([], [])
        else:
            more, more_weights = Template._split_special_tokens([context], [weight])
        kept += more
        theirs += more_weights
    return kept, theirs


def _image_tag(*_: Any) -> list[str]:
    return [IMAGE]

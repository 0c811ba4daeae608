"""
What a model that sees needs beside a row of tokens: its media, the positions that it gives them,
and a vision tower that runs on every batch, also on one without images.

Where weights or gradients are shared between ranks, a rank that skips the tower while another uses
it would leave that one waiting: in FSDP and ZeRO-3 for the tower's weights, in DDP for its
gradients.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import torch
from swift.template import Template
from swift.utils import get_packed_seq_params
from torch import nn
from torch.utils._pytree import tree_leaves

from packplan.adapters.families import trained_config
from packplan.adapters.samples.media import DUMMY_SIZE, IMAGES, VIDEOS, encode_image
from packplan.core.errors import ConfigError

_TYPES = "mm_token_type_ids"

_POSITIONS = "position_ids"

_SECONDS = "second_per_grid_ts"
"""Key of the seconds that a layer of patches of each video stands for."""


def plain_model(model: Any) -> Any:
    """Return a model without its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def takes(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's arguments."""
    return set(inspect.signature(function).parameters)


def token_types(config: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """
    Return which tokens stand for images, 1, or videos, 2; 0 for text; of the tokens' shape.

    Args:
        config: Of a model that sees.
        input_ids: Tokens.
    """
    types: torch.Tensor = (input_ids == config.image_token_id).long()
    return (
        types if getattr(config, "video_token_id", None) is None else types + 2 * (input_ids == config.video_token_id)
    )


def model_media(model: Any, encoded: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """
    Return what of an encoded sample its model takes beside its tokens, as a batch of one.

    Args:
        model: Of transformers, perhaps with adapters.
        encoded: The sample, as its template gives it.
    """
    plain = plain_model(model)
    taken = takes(plain.forward) - {"input_ids", "labels", "attention_mask", _POSITIONS}
    # ms-swift makes them for inference: without a copy, no gradient would pass.
    media = {key: value.clone() for key, value in encoded.items() if key in taken and isinstance(value, torch.Tensor)}
    tokens = torch.tensor(encoded["input_ids"])[None]
    if _TYPES in media:
        media[_TYPES] = media[_TYPES].view(tokens.shape)
    elif _TYPES in taken and (IMAGES.rows(encoded) is not None or VIDEOS.rows(encoded) is not None):
        media[_TYPES] = token_types(trained_config(plain.config), tokens)
    if _SECONDS in taken and encoded.get(_SECONDS) is not None:
        media[_SECONDS] = torch.tensor(encoded[_SECONDS])
    return media


def rope_of(model: nn.Module) -> Callable[..., Any] | None:
    """
    Return a model's own function that gives tokens and images their positions; None if it has
    none.
    """
    parts: Iterator[Any] = model.modules()
    return next((part.get_rope_index for part in parts if hasattr(part, "get_rope_index")), None)


def complete(batch: dict[str, Any], template: Template, samples: list[dict[str, Any]], *, packed: bool) -> None:
    """
    Give a collated batch what its model takes and its template does not make: positions in three
    rows, and the text's apart; and a place for pixels that are not there.

    Args:
        batch: As ms-swift collates it; it is added to.
        template: It knows its model.
        samples: Encoded samples, in the order of the batch.
        packed: They share one row; else each has a row of its own, padded.
    """
    batch.setdefault(IMAGES.pixels, None)  # which some templates take without asking
    text = batch.get(_POSITIONS)
    if text is not None and text.dim() == 3:
        return
    rope = rope_of(template._get_model())  # noqa: SLF001  # loader workers have one without weights
    if rope is None:
        return
    given, parts = takes(rope), []
    for sample in samples:
        tokens = torch.tensor(sample["input_ids"])[None]
        named = {**sample, "input_ids": tokens, _TYPES: token_types(trained_config(template.config), tokens)}
        parts.append(rope(**{key: value for key, value in named.items() if key in given})[0])
    if packed:
        batch |= {_POSITIONS: torch.cat(parts, -1), "text_position_ids": text, **get_packed_seq_params(text)}
    else:
        batch[_POSITIONS] = template._pad_3d_position_ids(parts)  # noqa: SLF001  # on the side that it pads


def _reader_of(part: Any) -> str | None:
    """
    Return the name of the language model of a part that says what an image's features are; None of
    other parts.
    """
    if not hasattr(part, "get_image_features"):
        return None
    names = ("language_model", "model")  # a thinker's is called as a whole model's inner part
    readers = (name for name in names if isinstance(getattr(part, name, None), nn.Module))
    return next((name for name in readers if not hasattr(getattr(part, name), "get_image_features")), None)


@attrs.frozen(eq=False)
class DummyImage:
    """A black image, and the part of a model that sees it."""

    inner: Any
    """Has the vision tower and the language model, and says what an image's features are."""

    reader: str
    """Name of that part's language model."""

    media: Mapping[str, torch.Tensor]
    """The image, as arguments of that part's `get_image_features`."""

    @classmethod
    def from_model(cls, model: nn.Module, template: Template) -> DummyImage:
        """
        Encode the image for a model.

        Args:
            model: That takes images.
            template: Encodes them.

        Raises:
            ConfigError: The model does not say what an image's features are.
        """
        found = [(part, name) for part in model.modules() if (name := _reader_of(part)) is not None]
        if not found:
            reason = (
                f"is a {type(plain_model(model)).__name__}, which does not say what an image's features are: a rank "
                "without images would leave the others waiting; train on one process"
            )
            raise ConfigError.at("model.model", reason)
        inner: Any = found[-1][0]  # the innermost: others may hand on to it
        taken = takes(inner.get_image_features)
        encoded = encode_image(template, DUMMY_SIZE)
        return cls(inner, found[-1][1], {key: value for key, value in encoded.items() if key in taken})

    @property
    def language_model(self) -> nn.Module:
        """What reads the text, and the images' features in it."""
        reader: nn.Module = self.inner.get_submodule(self.reader)
        return reader

    @property
    def towers(self) -> list[str]:
        """Names of the parts that images pass before they are read."""
        heads = {id(getattr(self.inner, name, None)) for name in ("lm_head", "audio_tower")}
        return [name for name, part in self.inner.named_children() if name != self.reader and id(part) not in heads]

    def nothing(self, device: torch.device) -> torch.Tensor:
        """Return a zero that depends on all that the image's features depend on."""
        # ms-swift makes them for inference: without a copy, no gradient would pass.
        seen = self.inner.get_image_features(**{key: value.to(device).clone() for key, value in self.media.items()})
        leaves = [leaf for leaf in tree_leaves(dict(seen)) if isinstance(leaf, torch.Tensor)]
        return torch.stack([leaf.mean() for leaf in leaves]).sum() * 0

    def unreached(self) -> list[str]:
        """Return the names of the weights that are trained, and on which no image depends."""
        vision = {
            f"{tower}.{name}": weight
            for tower in self.towers
            for name, weight in self.inner.get_submodule(tower).named_parameters()
            if weight.requires_grad
        }
        if not vision:
            return []
        nothing = self.nothing(next(iter(vision.values())).device)
        reached = torch.autograd.grad(nothing, list(vision.values()), allow_unused=True)
        return [name for name, gradient in zip(vision, reached, strict=True) if gradient is None]

    def ensure_seen(self, *, passes: int = 1) -> None:
        """
        Let the model see the image, which changes nothing, where a batch has none, until its tower
        has run so many *passes*; more than one where ranks meet in each pass, and images and videos
        take one each.

        ms-swift does so itself for some models and engines; then nothing is added.
        """
        seen = Counter[str]()

        def note(name: str, *_: Any) -> None:
            seen[name] += 1

        def see(
            __: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            for _ in range(passes - max(seen.values(), default=0)):
                embeds = named["inputs_embeds"]
                named = {**named, "inputs_embeds": embeds + self.nothing(embeds.device).to(embeds.dtype)}
            seen.clear()
            return positional, named

        for name in self.towers:
            self.inner.get_submodule(name).register_forward_hook(partial(note, name))
        self.language_model.register_forward_pre_hook(see, with_kwargs=True)

"""Inputs of vision models besides tokens: media, token types, and a dummy image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from swift.template import Template
from torch import nn

from packplan.adapters.families import trained_config
from packplan.adapters.loaders.rows import MEDIA_TYPE_IDS, POSITIONS
from packplan.adapters.models import plain_model
from packplan.adapters.samples.media import DUMMY_SIZE, IMAGES, VIDEOS, encode_image
from packplan.adapters.vision_tower import DummyImage, parameter_names
from packplan.core.errors import ConfigError

_SECONDS = "second_per_grid_ts"
"""Key of the seconds that one temporal step of patches covers, for each video."""


def token_types(config: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """
    Return the type of each token, in the shape of *input_ids*: 0 for text, 1 for images, 2 for
    videos.

    Args:
        config: Configuration of a model that takes images.
        input_ids: Token ids; int64, of any shape.

    >>> from types import SimpleNamespace
    >>> sees = SimpleNamespace(image_token_id=8, video_token_id=9)
    >>> token_types(sees, torch.tensor([[7, 8, 9]])).tolist()
    [[0, 1, 2]]
    """
    images: torch.Tensor = (input_ids == config.image_token_id).long()
    video = getattr(config, "video_token_id", None)
    return images if video is None else images + 2 * (input_ids == video)


def find_rope_index(model: nn.Module) -> Callable[..., Any] | None:
    """
    Return a model's method `get_rope_index`, which computes multimodal position ids; None if the
    model has no such method.
    """
    parts: Iterator[Any] = model.modules()
    return next((part.get_rope_index for part in parts if hasattr(part, "get_rope_index")), None)


def media_inputs(model: Any, encoded: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """
    Return the media of a sample or batch as inputs of the model, such as pixels and token types.

    Args:
        model: Model of transformers, perhaps with adapters.
        encoded: Sample that its template has encoded, or padded batch that its collator has made.
    """
    plain = plain_model(model)
    known = parameter_names(plain.forward) - {"input_ids", "labels", "attention_mask", POSITIONS}
    # ms-swift creates them in inference mode: gradients need a copy.
    media = {key: value.clone() for key, value in encoded.items() if key in known and isinstance(value, torch.Tensor)}
    tokens = torch.as_tensor(encoded["input_ids"])
    tokens = tokens.view(-1, tokens.shape[-1])
    if MEDIA_TYPE_IDS in media:
        media[MEDIA_TYPE_IDS] = media[MEDIA_TYPE_IDS].view(tokens.shape)
    elif MEDIA_TYPE_IDS in known and (IMAGES.count(encoded) is not None or VIDEOS.count(encoded) is not None):
        media[MEDIA_TYPE_IDS] = token_types(trained_config(plain.config), tokens)
    if _SECONDS in known and encoded.get(_SECONDS) is not None:
        media[_SECONDS] = torch.tensor(encoded[_SECONDS])
    return media


def dummy_image(model: nn.Module, template: Template) -> DummyImage:
    """
    Return a black image as an input for a vision model.

    Args:
        model: Model that takes images.
        template: Template that encodes the image.

    Raises:
        ConfigError: The model has no function for image features.
    """
    dummy = DummyImage.from_inputs(model, encode_image(template, DUMMY_SIZE))
    if dummy is None:
        reason = (
            f"is a {type(plain_model(model)).__name__}, which has no function for image features, so a rank without "
            "images would leave the other ranks waiting: train on one process"
        )
        raise ConfigError.for_key("model.model", reason)
    return dummy

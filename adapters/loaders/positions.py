"""Types of tokens (text, image, video), and a model's own function for their positions."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

MEDIA_TYPE_IDS = "mm_token_type_ids"
"""Key of the type of each token in transformers: 0 for text, 1 for images, 2 for videos."""


def parameter_names(function: Callable[..., Any]) -> set[str]:
    """Return the parameter names of a function."""
    return set(inspect.signature(function).parameters)


def token_types(config: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """
    Return the type of each token: 1 for images, 2 for videos, 0 for text; of the tokens' shape.

    Args:
        config: Configuration of a model that takes images.
        input_ids: Token ids.

    >>> from types import SimpleNamespace
    >>> sees = SimpleNamespace(image_token_id=8, video_token_id=9)
    >>> token_types(sees, torch.tensor([[7, 8, 9]])).tolist()
    [[0, 1, 2]]
    """
    images: torch.Tensor = (input_ids == config.image_token_id).long()
    video = getattr(config, "video_token_id", None)
    return images if video is None else images + 2 * (input_ids == video)


def find_rope_index(model: nn.Module) -> Callable[..., Any] | None:
    """Return a model's function for multimodal positions, `get_rope_index`; None without one."""
    parts: Iterator[Any] = model.modules()
    return next((part.get_rope_index for part in parts if hasattr(part, "get_rope_index")), None)

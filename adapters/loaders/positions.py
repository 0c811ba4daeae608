"""Positions of tokens and images, by a model's own function for them, also without its weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from packplan.adapters.families import trained_config

TYPES = "mm_token_type_ids"
"""Key of the kind of each token: 0 for text, 1 for images, 2 for videos."""


def takes(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's arguments."""
    return set(inspect.signature(function).parameters)


def token_types(config: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """
    Return 1 for tokens of images, 2 for tokens of videos, and 0 for text; of the tokens' shape.

    Args:
        config: Configuration of a model that takes images.
        input_ids: Token ids.

    >>> from types import SimpleNamespace
    >>> sees = SimpleNamespace(image_token_id=8, video_token_id=9)
    >>> token_types(sees, torch.tensor([[7, 8, 9]])).tolist()
    [[0, 1, 2]]
    """
    types: torch.Tensor = (input_ids == config.image_token_id).long()
    return (
        types if getattr(config, "video_token_id", None) is None else types + 2 * (input_ids == config.video_token_id)
    )


def rope_of(model: nn.Module) -> Callable[..., Any] | None:
    """Return a model's own function for positions of tokens and images; None if it has none."""
    parts: Iterator[Any] = model.modules()
    return next((part.get_rope_index for part in parts if hasattr(part, "get_rope_index")), None)


def positions_of(model: Any) -> Callable[[Mapping[str, Any]], torch.Tensor] | None:
    """
    Return the function that gives the positions of a row's tokens and images.

    It takes a row of a processor, and returns int64 of shape (3, 1, tokens). None for a model of
    text, which counts its tokens.
    """
    rope = rope_of(model)
    return None if rope is None else _RowPositions(_without_weights(rope), trained_config(model.config))


class _RowPositions:
    """Positions of one row."""

    def __init__(self, rope: Callable[..., Any], config: Any) -> None:
        self._rope, self._config = rope, config
        self._given = takes(rope)

    def __call__(self, row: Mapping[str, Any]) -> torch.Tensor:
        tokens = torch.as_tensor(row["input_ids"]).reshape(1, -1).long()
        named = {**row, "input_ids": tokens, TYPES: token_types(self._config, tokens)}
        given = {
            key: value if key in (TYPES, "input_ids") else torch.as_tensor(value)
            for key, value in named.items()
            if key in self._given and key != "attention_mask" and value is not None
        }
        positions: torch.Tensor = self._rope(**given)[0]
        return positions


def _without_weights(method: Any) -> Callable[..., Any]:
    """Return a model's method on an object of its class that has the configuration alone."""
    owner = method.__self__
    bare = object.__new__(type(owner))
    bare.__dict__["config"] = owner.config
    return getattr(bare, method.__name__)  # type: ignore[no-any-return]  # a bound method

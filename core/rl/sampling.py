"""Sampling of answers by the model, for training on them."""

from __future__ import annotations

import attrs


@attrs.frozen
class Sampling:
    """Number, length and temperature of the answers to a prompt."""

    completions: int
    """Answers to each prompt."""

    keep: int
    """Number of the best answers that become training samples."""

    max_new_tokens: int
    temperature: float

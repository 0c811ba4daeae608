"""How the model answers prompts that it is then trained on."""

from __future__ import annotations

import attrs


@attrs.frozen
class Sampling:
    """How a prompt is answered."""

    completions: int
    """Answers to each prompt."""

    keep: int
    """The best so many become training samples."""

    max_new_tokens: int
    temperature: float

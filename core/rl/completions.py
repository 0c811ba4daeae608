"""Answers to prompts, from the policy itself or from another engine."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray


@attrs.frozen(eq=False)
class Completion:
    """Tokens that were drawn for a prompt."""

    tokens: NDArray[np.int64]
    """Token ids, the one that ends the answer included; at least one."""

    log_probabilities: NDArray[np.float32] | None
    """
    Log-probability of each token under the distribution that it was drawn from; None if the engine
    does not give them.
    """

    version: int
    """Number of steps that the policy had been trained for when its weights gave the answer."""

    is_exact: bool = True
    """Whether the tokens are those that were drawn, not a new encoding of their text."""

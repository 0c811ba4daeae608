"""
Assertions for your own model, collator and trainer, explained in `docs/use-it-in/prove.md`.

    from packplan import testing

    batch = collator([dataset[i] for i in range(4)])
    testing.assert_isolated(model, batch)
    testing.assert_equal_to_alone(model, batch)
    testing.assert_step_loss(trainer)
    testing.assert_unpadded_equal(trainer)

The assertions need torch, which the extra `hf` installs. Assertions about trainers also need
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from packplan.adapters.proof.checks import assert_equal_to_alone, assert_isolated
from packplan.adapters.proof.steps import assert_step_loss

if TYPE_CHECKING:
    from packplan.adapters.hf.unpad import assert_unpadded_equal

__all__ = ["assert_equal_to_alone", "assert_isolated", "assert_step_loss", "assert_unpadded_equal"]


def __getattr__(name: str) -> object:
    if name != "assert_unpadded_equal":
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return import_module("packplan.adapters.hf.unpad").assert_unpadded_equal  # needs transformers

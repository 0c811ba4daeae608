"""
Assertions for your own model, collator and trainer: `docs/use-it-in/prove.md`.

    from packplan.testing import assert_equal_to_alone, assert_isolated, assert_step_loss

    batch = collator([dataset[i] for i in range(4)])
    assert_isolated(model, batch)
    assert_equal_to_alone(model, batch)
    assert_step_loss(trainer)

They need torch alone, from the extra `hf`; a trainer of transformers needs its library too.
"""

from __future__ import annotations

from packplan.adapters.proof import assert_equal_to_alone, assert_isolated, assert_step_loss

__all__ = ["assert_equal_to_alone", "assert_isolated", "assert_step_loss"]

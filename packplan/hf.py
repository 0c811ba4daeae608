"""
Packing in trainers of transformers and TRL: `docs/use-it-in/`.

    from packplan.hf import balance, unpad, use_plan

    unpad(trainer.model)  # any trainer of padded batches computes no padding
    balance(trainer, max_tokens=8192)  # and its microbatches are cut by tokens, not by rows
    schedule = use_plan(trainer, plan)  # or: the trainer trains the packs of a plan

They need the extra `hf`.
"""

from __future__ import annotations

from packplan.adapters.hf import balance, separate_samples, unpad, use_plan

__all__ = ["balance", "separate_samples", "unpad", "use_plan"]

"""
Packing in trainers of transformers and TRL, and in your own training loops. The pages in
`docs/use-it-in/` explain each use.

    from packplan.hf import balance, unpad, use_plan

    unpad(trainer.model)  # any trainer of padded batches: the model computes no padding
    balance(trainer, max_tokens=8192)  # GRPO and RLOO: microbatches are cut by tokens, not by rows
    schedule = use_plan(trainer, 4096)  # or: the trainer trains planned packs of 4,096 tokens

Importing this module registers Packplan's attention for `from_pretrained(…,
attn_implementation="packplan")`. The module needs the extra `hf`.
"""

from __future__ import annotations

try:
    from packplan.adapters.hf.balance import balance
    from packplan.adapters.hf.training import row_lengths, token_mean, use_plan
    from packplan.adapters.hf.unpad import separate_samples, unpad
    from packplan.adapters.loaders.batches import PackBatches
    from packplan.adapters.loaders.packs import PACK, PackInputs, RowsOfPacks, flatten, refuse_other_packs
    from packplan.adapters.loaders.rows import count_supervised
    from packplan.adapters.vision_tower import ensure_vision_forward
except ModuleNotFoundError as error:
    if error.name in {"torch", "transformers", "accelerate", "peft", "pyarrow"}:
        error.msg = f"packplan.hf needs {error.name}: pip install 'packplan[hf]'"
    raise

__all__ = [
    "PACK", "PackBatches", "PackInputs", "RowsOfPacks", "balance", "count_supervised", "ensure_vision_forward",
    "flatten", "refuse_other_packs", "row_lengths", "separate_samples", "token_mean", "unpad", "use_plan",
]  # fmt: skip

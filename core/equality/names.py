"""Names of attentions, as runs ask for them and as they take them."""

from __future__ import annotations

AUTO = "auto"

VARLEN = "varlen"
"""Our attention of variable length: each sample of a pack by itself, without a mask."""

MASKED = "masked"
"""
Ours where attention of variable length does not fit: the model's own mask, with samples apart.
"""

NATIVE = "sdpa"
"""What transformers attends by on its own, and references are computed by where it is exact."""

SHARED_ROWS = "context_parallel"
"""
The attention of ranks that share a row; outside of shared rows, the model attends by `NATIVE`.
"""

FLEX = "flex_attention"

FLASH_BACKENDS = ("flash_attention_2", "flash_attention_3", "flash_attn")

BACKENDS = (AUTO, VARLEN, NATIVE, "eager", FLEX, *FLASH_BACKENDS)
"""
Names that a run may ask for; transformers has others, of kernels from a hub (with a slash)
and paged ones (with a bar).
"""

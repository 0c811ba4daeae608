"""Names of attentions, as runs ask for them and as they take them."""

from __future__ import annotations

AUTO = "auto"

VARLEN = "varlen"
"""Packplan's attention of variable length: each sample of a pack by itself, without a mask."""

MASKED = "masked"
"""
Packplan's attention by the model's own mask, with samples apart, for models that varlen does not
fit.
"""

NATIVE = "sdpa"
"""Default attention of transformers. It computes references if it is exact."""

FLEX = "flex_attention"

FLASH_BACKENDS = ("flash_attention_2", "flash_attention_3", "flash_attn")

BACKENDS = (AUTO, VARLEN, NATIVE, "eager", FLEX, *FLASH_BACKENDS)
"""
Names that a run may ask for; transformers has others, of kernels from a hub (with a slash)
and paged ones (with a bar).
"""

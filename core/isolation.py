"""
Which attention backends keep the samples of a pack apart, by measurement.

Without a mask, samples of one pack attend to each other, silently. Established here means: packed logits equal
unpacked logits within float error, in a test of this project, with the fourth position row and the cache off.
Variable-length attention (flash) separates by cu_seqlens, which is its own contract.
"""

from __future__ import annotations

from core.errors import IsolationError

_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attn")

_FLEX = "flex_attention"

ESTABLISHED = {
    "qwen2_5_vl": ("sdpa", "eager", *_FLASH),
    "qwen3_vl": ("sdpa", "eager", *_FLASH),
    "qwen2": ("sdpa", "eager", _FLEX, *_FLASH),
    "qwen3": ("sdpa", "eager", _FLEX, *_FLASH),
}
"""Model type, as in its config.json -> attention backends."""


def check_isolation(model_type: str, attn_impl: str, *, flash_installed: bool, on_cpu: bool) -> None:
    """
    Refuse a backend under which packed samples might see each other, or that cannot train.

    Raises:
        IsolationError: The pair is not established, flash attention is not installed, or flex attention is to train on
            a CPU, where it has no backward pass.
    """
    established = ESTABLISHED.get(model_type, ())
    missing = {} if flash_installed else dict.fromkeys(_FLASH, ", because the package flash-attn is not installed")
    if on_cpu:
        missing[_FLEX] = ", because flex attention has no backward pass on a CPU"
    if attn_impl not in established or attn_impl in missing:
        usable = tuple(name for name in established if name not in missing)
        detail = missing.get(attn_impl, "") if attn_impl in established else ""
        raise IsolationError(model_type, attn_impl, usable, detail)

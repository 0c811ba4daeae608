"""
Which attention backends keep the samples of a pack apart, by measurement.

Without a mask, samples of one pack attend to each other, silently. Established here means: packed logits equal
unpacked logits within float error, in a test of this project, with the fourth position row and the cache off.
Variable-length attention (flash) separates by cu_seqlens, which is its own contract.
"""

from __future__ import annotations

from core.errors import IsolationError

_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attn")

ESTABLISHED = {
    "qwen2_5_vl": ("sdpa", "eager", *_FLASH),
    "qwen3_vl": ("sdpa", "eager", *_FLASH),
    "qwen2": ("sdpa", "eager", *_FLASH),
    "qwen3": ("sdpa", "eager", *_FLASH),
}
"""Model type, as in its config.json -> attention backends."""


def check_isolation(model_type: str, attn_impl: str, *, flash_installed: bool) -> None:
    """
    Refuse a backend under which packed samples might see each other.

    Raises:
        IsolationError: The pair is not established, or flash attention is not installed.
    """
    established = ESTABLISHED.get(model_type, ())
    if attn_impl not in established:
        usable = tuple(name for name in established if flash_installed or name not in _FLASH)
        raise IsolationError(model_type, attn_impl, usable)
    if attn_impl in _FLASH and not flash_installed:
        detail = ", because the package flash-attn is not installed"
        raise IsolationError(model_type, attn_impl, ("sdpa", "eager"), detail)

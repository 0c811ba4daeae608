"""
Which attention a run takes, and which attention backends keep the samples of a pack apart, by
measurement.

Without a mask, samples of one pack attend to each other, silently. Established here means: packed
logits equal unpacked logits within float error, in a test of this project, with the fourth position
row and the cache off. Flash attention separates by cu_seqlens, which is its own contract.
"""

from __future__ import annotations

import attrs

from core.errors import AttentionError, IsolationError

AUTO = "auto"

VARLEN = "varlen"
"""Our attention of variable length: each sample of a pack by itself, without a mask."""

NATIVE = "sdpa"
"""What transformers attends by on its own, and what references are computed by."""

SHARED_ROWS = "context_parallel"
"""
The attention of ranks that share a row; outside of shared rows, the model attends by `NATIVE`.
"""

_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attn")

_FLEX = "flex_attention"

BACKENDS = (AUTO, VARLEN, NATIVE, "eager", _FLEX, *_FLASH)
"""
Names that `model.attn_impl` takes; transformers has others, of kernels from a hub (with a slash)
and paged ones (with a bar).
"""

ESTABLISHED = {
    "qwen2_5_vl": (VARLEN, "sdpa", "eager", *_FLASH),
    "qwen3_vl": (VARLEN, "sdpa", "eager", *_FLASH),
    "qwen2": (VARLEN, "sdpa", "eager", _FLEX, *_FLASH),
    "qwen3": (VARLEN, "sdpa", "eager", _FLEX, *_FLASH),
}
"""Model type, as in its config.json -> attention backends."""


@attrs.frozen
class Attention:
    """The attention that a run takes."""

    name: str
    """A backend: `varlen`, `context_parallel`, or a name of transformers' own."""

    reason: str
    """Why this one, as a clause."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_attention(attn_impl: str, *, model_type: str, context_parallel_size: int = 1) -> Attention:
    """
    Return the attention of a run.

    Args:
        attn_impl: What `model.attn_impl` says.

        model_type: As in the model's config.json.

        context_parallel_size: Ranks that share a packed row.

    Raises:
        AttentionError: `varlen` is asked for by name, and does not run here.

    >>> [choose_attention("auto", model_type=name).name for name in ("qwen3", "gemma2")]
    ['varlen', 'sdpa']
    """
    if attn_impl not in (AUTO, VARLEN):
        return Attention(attn_impl, "model.attn_impl names it")
    if context_parallel_size > 1:
        shared = f"policy.context_parallel_size is {context_parallel_size}"
        why_not, instead = f"{shared}, and ranks that share rows have an attention of their own", SHARED_ROWS
    elif VARLEN not in ESTABLISHED.get(model_type, ()):
        why_not, instead = f"{VARLEN} is not established for {model_type}", NATIVE
    elif attn_impl == VARLEN:
        return Attention(VARLEN, "model.attn_impl names it")
    else:
        return Attention(VARLEN, f"model.attn_impl is {AUTO}, and it is established for {model_type}")
    if attn_impl == VARLEN:
        raise AttentionError(VARLEN, why_not, AUTO if instead == SHARED_ROWS else instead)
    return Attention(instead, f"model.attn_impl is {AUTO}, and {why_not}")


def check_isolation(model_type: str, attn_impl: str, *, flash_installed: bool, on_cpu: bool) -> None:
    """
    Refuse a backend under which packed samples might see each other, or that cannot train.

    Args:
        model_type: As in the model's config.json.

        attn_impl: The backend's name; see `Attention`.

        flash_installed: Whether the package flash-attn is.

        on_cpu: Whether the model trains on a CPU.

    Raises:
        IsolationError: The pair is not established, flash attention is not installed, or flex
        attention is to train on
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

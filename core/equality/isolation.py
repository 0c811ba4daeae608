"""
The attentions that a run can take, and which one it takes.

Without a mask, samples of one pack attend to each other, silently. So a run whose samples share
packs takes an attention under which its model was shown to keep them apart: see
`core.equality.verdict`.
"""

from __future__ import annotations

import attrs

from packplan.core.equality.names import AUTO, FLASH_BACKENDS, FLEX, NATIVE, SHARED_ROWS, VARLEN
from packplan.core.equality.verdict import PackingVerdict
from packplan.core.errors import AttentionError, IsolationError


@attrs.frozen
class Attention:
    """The attention that a run takes."""

    name: str
    """`varlen`, `masked`, `context_parallel`, or a name of transformers' own."""

    reason: str
    """Why this one, as a clause."""

    native: str = NATIVE
    """The attention of transformers that references are computed by."""

    split: tuple[str, ...] = ()
    """Classes of layers that run sample by sample."""

    follows_rows: bool = False
    """Whether the model is told which samples lie in its row."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def asked_attention(attn_impl: str, *, context_parallel_size: int = 1) -> str:
    """
    Return what a model is asked for: ranks that share rows attend by an attention of their own,
    made of sdpa's.

    Args:
        attn_impl: What `model.attn_impl` says.
        context_parallel_size: Ranks that share a packed row.
    """
    return NATIVE if attn_impl == AUTO and context_parallel_size > 1 else attn_impl


def choose_attention(attn_impl: str, verdict: PackingVerdict | None, *, context_parallel_size: int = 1) -> Attention:
    """
    Return the attention of a run; `check_isolation` says whether samples may share its packs.

    Args:
        attn_impl: What `model.attn_impl` says.
        verdict: On the model; None where it was not asked, since nothing is packed.
        context_parallel_size: Ranks that share a packed row.

    Raises:
        AttentionError: `varlen` is asked for by name, and does not run here.

    >>> choose_attention("sdpa", None).name
    'sdpa'
    """
    if attn_impl in (AUTO, VARLEN) and context_parallel_size > 1:
        shared = f"policy.context_parallel_size is {context_parallel_size}"
        why = f"{shared}, and ranks that share rows have an attention of their own"
        if attn_impl == VARLEN:
            raise AttentionError(VARLEN, why, AUTO)
        return Attention(SHARED_ROWS, f"model.attn_impl is {AUTO}, and {why}")
    passes = verdict is not None and verdict.passes
    if attn_impl == VARLEN and verdict is not None and not passes:
        raise AttentionError(VARLEN, verdict.reason, AUTO)
    why = "model.attn_impl names it" if attn_impl != AUTO else f"model.attn_impl is {AUTO}"
    if verdict is None:
        return Attention(NATIVE if attn_impl == AUTO else attn_impl, why)
    if not passes:
        name = verdict.native or NATIVE
        return Attention(
            name if attn_impl == AUTO else attn_impl, f"{why}, but samples may not share packs: {verdict.reason}", name
        )
    if attn_impl == AUTO:
        why += f", and {verdict.model_type} was shown to pack by it"
    return Attention(verdict.attention, why, verdict.native, verdict.split, verdict.follows_rows)


def why_not_here(attn_impl: str, *, flash_installed: bool, on_cpu: bool) -> str | None:
    """
    Return why a backend does not train on this machine; None if it may.

    Args:
        attn_impl: The backend's name.
        flash_installed: Whether the package flash-attn is.
        on_cpu: Whether the model trains on a CPU.
    """
    if attn_impl in FLASH_BACKENDS and not flash_installed:
        return "the package flash-attn is not installed"
    if attn_impl in FLASH_BACKENDS and on_cpu:
        return "flash attention runs on a GPU alone"
    if attn_impl == FLEX and on_cpu:
        return "flex attention has no backward pass on a CPU"
    return None


def check_isolation(attn_impl: str, verdict: PackingVerdict, *, context_parallel_size: int = 1) -> None:
    """
    Refuse to pack a model whose samples were not shown to be apart, and equal to themselves alone.

    Args:
        attn_impl: What `model.attn_impl` says.
        verdict: On the model.
        context_parallel_size: Ranks that share a packed row.

    Raises:
        IsolationError: The verdict is that it may not, or its layers carry a state from rank to
            rank.
    """
    if not verdict.passes:
        raise IsolationError(verdict.model_type, attn_impl, verdict.reason)
    if context_parallel_size > 1 and (verdict.split or verdict.follows_rows):
        reason = "its layers have to know the whole row, which policy.context_parallel_size shares among ranks"
        raise IsolationError(verdict.model_type, attn_impl, reason)

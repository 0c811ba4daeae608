"""
The attention of a run: one choice, made by `choose_attention` and handed on as a value.

Without a mask, samples of one pack attend to each other, silently. So a run whose samples share
packs takes an attention under which its model was shown to keep them apart: see
`core.equality.verdict`.
"""

from __future__ import annotations

import attrs

from packplan.core.equality.names import AUTO, FLASH_BACKENDS, FLEX, MASKED, NATIVE, VARLEN
from packplan.core.equality.verdict import PackingVerdict
from packplan.core.errors import ModelError


@attrs.frozen
class AttentionChoice:
    """The attention that a run takes, and the reason."""

    name: str
    """`varlen`, `masked`, or a name of transformers' own."""

    why: str = ""
    """Why this one, as a clause."""

    native: str = NATIVE
    """The attention of transformers that references are computed by."""

    split: tuple[str, ...] = ()
    """Classes of layers that run sample by sample."""

    follows_rows: bool = False
    """Whether the model is told which samples lie in its row."""

    verdict: PackingVerdict | None = None
    """The verdict on the model that the choice follows from; None if the model was not asked."""

    leak: str | None = None
    """
    Why samples may not share packs under it on this machine, as a clause. None if they may, or the
    model was not asked.
    """

    @property
    def backend(self) -> str:
        """The attention of transformers that the model is loaded with."""
        return self.native if self.name in (VARLEN, MASKED) else self.name

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def choose_attention(
    attn_impl: str,
    verdict: PackingVerdict | None,
    *,
    flash_installed: bool = True,
    on_cpu: bool = False,
) -> AttentionChoice:
    """
    Return the attention of a run; its `leak` says whether samples may share packs under it.

    Args:
        attn_impl: Value of `attn_impl`.
        verdict: Verdict on the model; None where it was not asked, or not yet.
        flash_installed: Whether the package flash-attn is installed.
        on_cpu: Whether the model trains on a CPU.

    Raises:
        ModelError: `varlen` is asked for by name, and does not run here.

    >>> choose_attention("sdpa", None).name
    'sdpa'
    >>> choose_attention("flash_attention_2", None, on_cpu=True).leak
    'flash attention runs on a GPU alone'
    """
    passes = verdict is not None and verdict.passes
    leak = _not_here(attn_impl, flash_installed=flash_installed, on_cpu=on_cpu)
    if leak is None and verdict is not None and not passes:
        leak = verdict.reason
    if attn_impl == VARLEN and verdict is not None and not passes:
        raise ModelError.attention(VARLEN, verdict.reason)
    why = "attn_impl names it" if attn_impl != AUTO else f"attn_impl is {AUTO}"
    if verdict is None:
        return AttentionChoice(NATIVE if attn_impl == AUTO else attn_impl, why, leak=leak)
    if not passes:
        native = verdict.native or NATIVE
        why += f", but samples may not share packs: {verdict.reason}"
        return AttentionChoice(native if attn_impl == AUTO else attn_impl, why, native, verdict=verdict, leak=leak)
    if attn_impl == AUTO:
        why += f", and {verdict.model_type} was shown to pack by it"
    return AttentionChoice(
        verdict.attention, why, verdict.native, verdict.split, verdict.follows_rows, verdict=verdict, leak=leak
    )


def _not_here(attn_impl: str, *, flash_installed: bool, on_cpu: bool) -> str | None:
    """Return why a backend does not train on this machine; None if it may."""
    if attn_impl in FLASH_BACKENDS and not flash_installed:
        return "the package flash-attn is not installed"
    if attn_impl in FLASH_BACKENDS and on_cpu:
        return "flash attention runs on a GPU alone"
    if attn_impl == FLEX and on_cpu:
        return "flex attention has no backward pass on a CPU"
    return None

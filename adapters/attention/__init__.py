"""
Attention over packed rows: how samples of a row attend to themselves alone, and at what cost.

`attend_by_varlen` lets a model attend by our own functions; `native_attention` lets it attend as
transformers does for a while, which is what references are computed by. `layout` says where a row's
blocks are, `varlen` attends within them; `vision` projects a tower's patches.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from packplan.adapters.attention.rows import follow_rows
from packplan.adapters.attention.states import split_states
from packplan.adapters.attention.varlen import attend, attend_to_patches, row_mask, sample_mask, told_row_mask
from packplan.adapters.attention.vision import project_patches
from packplan.adapters.families import trained_part
from packplan.core.equality import MASKED, NATIVE, VARLEN, AttentionChoice

__all__ = [
    "MASKED_NAME",
    "NAME",
    "PATCHES_NAME",
    "ROWS_NAME",
    "attend_as",
    "attend_by_varlen",
    "follow_rows",
    "native_attention",
    "project_patches",
    "split_states",
    "takes_grids",
]

NAME = "packplan_varlen"
"""Our attention's name among transformers' functions."""

ROWS_NAME = "packplan_varlen_rows"
"""That of models that follow their rows: without a row, they raise instead of mixing samples."""

PATCHES_NAME = "packplan_flash_patches"
"""
That of vision towers. By the word flash in it, towers hand over where images and windows begin, in
one call.
"""

MASKED_NAME = "packplan_masked"
"""That of the model's own mask, with samples apart."""

# A compiled model runs them as they are: a compiler would make a program of each row's own layout.
_as_it_is: Any = torch.compiler.disable
AttentionInterface.register(NAME, _as_it_is(attend))
AttentionMaskInterface.register(NAME, _as_it_is(row_mask))
AttentionInterface.register(ROWS_NAME, _as_it_is(attend))
AttentionMaskInterface.register(ROWS_NAME, _as_it_is(told_row_mask))
AttentionInterface.register(MASKED_NAME, _as_it_is(attend))
AttentionMaskInterface.register(MASKED_NAME, _as_it_is(sample_mask))
AttentionInterface.register(PATCHES_NAME, _as_it_is(attend_to_patches))


def attend_as(model: Any, attention: AttentionChoice) -> None:
    """
    Let a model attend as a run does; one that attends by transformers' own was opened with it.

    Args:
        model: Of transformers.
        attention: Of the run.
    """
    follows, part = attention.follows_rows or bool(attention.split), trained_part(model)
    if attention.name == VARLEN:
        attend_by_varlen(part, name=ROWS_NAME if follows else NAME)
    elif attention.name == MASKED:
        _attend_by_masks(part)
    if follows:
        follow_rows(model)
    split_states(model, attention.split)


def attend_by_varlen(model: Any, *, name: str = NAME) -> None:
    """
    Let a model of transformers attend by our attention of variable length, its vision tower too.

    The names are in the configuration that the model holds, and in none that it saves.
    """
    parts = {part: PATCHES_NAME if takes_grids(model, part) else name for part in model.config.sub_configs}
    model.set_attn_implementation({"": name, **parts})


def takes_grids(model: Any, part: str) -> bool:
    """Return whether a part of a model is a tower that sees all images of a row in one pass."""
    config = getattr(model.config, part, None)
    towers = (one for one in model.modules() if config is not None and getattr(one, "config", None) is config)
    return part == "vision_config" and any("grid_thw" in inspect.signature(one.forward).parameters for one in towers)


def _attend_by_masks(model: Any) -> None:
    """Let a model of transformers attend under its own mask, with samples of a row apart."""
    texts = {part: MASKED_NAME for part in model.config.sub_configs if part != "vision_config"}
    model.set_attn_implementation({"": MASKED_NAME, **texts})


@contextmanager
def native_attention(model: Any, native: str = NATIVE) -> Iterator[None]:
    """
    Let a model attend as transformers does, inside; with checkpointing, the backward pass belongs
    inside too.

    Args:
        model: Of transformers.
        native: The name of transformers' attention that computes what the model means.
    """
    model = trained_part(model)
    config = model.config
    before = {"": config._attn_implementation}  # noqa: SLF001  # no public question
    parts = {part: getattr(config, part, None) for part in config.sub_configs}
    before |= {name: part._attn_implementation for name, part in parts.items() if part is not None}  # noqa: SLF001
    model.set_attn_implementation(native)
    try:
        yield
    finally:
        model.set_attn_implementation(before)

"""
Attention over packed rows: how samples of a row attend to themselves alone, and at what cost.

`attend_by_varlen` lets a model attend by our own functions; `native_attention` lets it attend as
transformers does for a while, which is what references are computed by. `layout` says where a row's
blocks are, `varlen` attends within them; `vision` projects a tower's patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from adapters import torchvision_shim  # noqa: F401  # before transformers  # isort: skip

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from adapters.attention.varlen import attend, attend_to_patches, row_mask
from adapters.attention.vision import project_patches
from core.equality import NATIVE

__all__ = ["NAME", "PATCHES_NAME", "attend_by_varlen", "native_attention", "project_patches"]

NAME = "packplan_varlen"
"""Our attention's name among transformers' functions."""

PATCHES_NAME = "packplan_flash_patches"
"""
That of vision towers. By the word flash in it, towers hand over where images and windows begin, in
one call.
"""

# A compiled model runs them as they are: a compiler would make a program of each row's own layout.
_as_it_is: Any = torch.compiler.disable
AttentionInterface.register(NAME, _as_it_is(attend))
AttentionMaskInterface.register(NAME, _as_it_is(row_mask))
AttentionInterface.register(PATCHES_NAME, _as_it_is(attend_to_patches))


def attend_by_varlen(model: Any) -> None:
    """
    Let a model of transformers attend by our attention of variable length, its vision tower too.

    The names are in the configuration that the model holds, and in none that it saves.
    """
    parts = {part: PATCHES_NAME if part == "vision_config" else NAME for part in model.config.sub_configs}
    model.set_attn_implementation({"": NAME, **parts})


@contextmanager
def native_attention(model: Any) -> Iterator[None]:
    """
    Let a model attend by transformers' own sdpa, inside; with checkpointing, the backward pass
    belongs inside too.
    """
    config = model.config
    before = {"": config._attn_implementation}  # noqa: SLF001  # no public question
    before |= {part: getattr(config, part)._attn_implementation for part in config.sub_configs}  # noqa: SLF001
    model.set_attn_implementation(NATIVE)
    try:
        yield
    finally:
        model.set_attn_implementation(before)

"""
Attention over packed rows, in which each sample attends only to itself.

`set_varlen_attention` makes a model use the attention functions of this package. Inside
`using_native_attention`, the model uses transformers' own attention, which computes reference
results. `layout` finds the blocks of a row, and `varlen` attends within these blocks.
`project_patches` speeds up the patch embedding of vision towers.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F  # noqa: N812  # its usual name
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from packplan.adapters.attention.packed_row import keep_rows, run_by_sample
from packplan.adapters.attention.varlen import attend, attend_to_patches, build_mask, build_mask_of_known_row
from packplan.adapters.families import trained_part
from packplan.core.equality import FLEX, NATIVE, VARLEN, AttentionChoice

NAME = "packplan"
"""Name of varlen attention among transformers' functions: `attn_implementation="packplan"`."""

ROWS_NAME = "packplan_rows"
"""
Name of varlen attention for models with `keep_rows`; outside of a call of such a model, this
attention raises an error.
"""

PATCHES_NAME = "packplan_flash_patches"
"""
Name of varlen attention for vision towers.

Vision towers pass the starts of all images and windows in one call only if the name of the
attention contains "flash".
"""


# Compiled models run these uncompiled, or each row's layout would need a program of its own.
_uncompiled: Any = torch.compiler.disable
AttentionInterface.register(NAME, _uncompiled(attend))
AttentionMaskInterface.register(NAME, _uncompiled(build_mask))
AttentionInterface.register(ROWS_NAME, _uncompiled(attend))
AttentionMaskInterface.register(ROWS_NAME, _uncompiled(build_mask_of_known_row))
AttentionInterface.register(PATCHES_NAME, _uncompiled(attend_to_patches))


def set_attention(model: Any, attention: AttentionChoice) -> None:
    """
    Set up a model for the attention of a run. If *attention* requires it, the model also keeps its
    current row, and runs some layers sample by sample.

    The names of transformers' own attentions are set when the model is loaded, not by this
    function.

    Args:
        model: Model of transformers.
        attention: Attention of the run.
    """
    keeps, part = attention.keeps_rows or bool(attention.split), trained_part(model)
    if attention.name == VARLEN:
        set_varlen_attention(part, name=ROWS_NAME if keeps else NAME)
    elif attention.name == FLEX:
        functorch_config.donated_buffer = False  # probes ask its compiled graph for more than one gradient
    if keeps:
        keep_rows(model)
    run_by_sample(model, attention.split)


def set_varlen_attention(model: Any, *, name: str = NAME) -> None:
    """
    Make a model and its vision tower use varlen attention.

    The name of the attention is set on the loaded configuration, and is never saved with it.
    """
    parts = {part: PATCHES_NAME if takes_packed_images(model, part) else name for part in model.config.sub_configs}
    model.set_attn_implementation({"": name, **parts})


def attention_names(config: Any) -> dict[str, str]:
    """Return the attention name of a configuration (under "") and of each sub-configuration."""
    parts = {"": config, **{name: getattr(config, name, None) for name in config.sub_configs}}
    return {name: part._attn_implementation for name, part in parts.items() if part is not None}  # noqa: SLF001  # has no public name


def takes_packed_images(model: Any, part: str) -> bool:
    """Return whether *part* is the vision tower and takes packed images (`grid_thw`)."""
    config = getattr(model.config, part, None)
    towers = (one for one in model.modules() if config is not None and getattr(one, "config", None) is config)
    return part == "vision_config" and any("grid_thw" in inspect.signature(one.forward).parameters for one in towers)


@contextmanager
def using_native_attention(model: Any, native: str = NATIVE) -> Iterator[None]:
    """
    Make a model use transformers' own attention inside this context.

    With gradient checkpointing, run the backward pass inside this context too.

    Args:
        model: Model of transformers.
        native: Name of the native attention: sdpa or eager.
    """
    model = trained_part(model)
    before = attention_names(model.config)
    model.set_attn_implementation(native)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class PatchProjection(torch.nn.Conv3d):
    """
    Convolution over patches of the kernel's size, computed as a matrix product.

    Measured on one core of a CPU, with 5,000 patches of 1,176 values and 32 outputs, forward and
    backward: 42 ms as a convolution, 11 ms as a product.
    """

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """
        Return the projection of each patch; shape (patches, outputs, 1, 1, 1).

        The argument *patches* has the shape (patches, channels, *kernel).
        """
        if patches.shape[2:] != self.kernel_size:
            return super().forward(patches)
        return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


def project_patches(model: torch.nn.Module) -> None:
    """
    Turn a model's 3D convolutions over adjacent patches into `PatchProjection` modules.

    These convolutions have the kernel size as their stride, and no padding, groups or dilation.
    Products are summed in another order, so results may differ by rounding. Saved weights and their
    names stay the same.
    """
    for module in (one for one in model.modules() if type(one) is torch.nn.Conv3d):
        is_whole = module.stride == module.kernel_size and set(module.dilation) == {1} and module.groups == 1
        if is_whole and not any(module.padding):
            module.__class__ = PatchProjection

"""
Attention on a rank that holds a part of a packed row: its own queries, and the keys and values of
all ranks.

Rules: the layout is an argument of the model's forward pass, never global state. Every rank of the
group runs the same layers in the same order, forward and backward. The caller sums the gradients of
parameters over the group.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch.nn.attention.bias import causal_lower_right
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from packplan.core.context_parallel import PackedLayout

ATTENTION = "packplan_context_parallel"
"""
Name of this attention among transformers' attention functions.

No mask function has this name, so transformers builds no mask.
"""


@attrs.frozen(eq=False)
class _Share:
    """Part of a packed row that one rank computes."""

    group: dist.ProcessGroup | None
    blocks: list[list[int]]
    """See `PackedLayout.blocks`."""

    restore: torch.Tensor
    """See `PackedLayout.restore`; on the model's device, so that no layer copies it there."""


@contextmanager
def context_parallel(model: Any, *, layout: PackedLayout, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """
    Let a model compute this rank's part of a packed row.

    It is given the part as `input_ids` of shape (1, num_positions / cp_size), or the whole row and
    perhaps images: every rank embeds these, and the layers compute the part. The logits are those
    of the part. Position ids default to the layout's. With gradient checkpointing the backward pass
    belongs inside too, since it runs the layers again.

    Args:
        model: Model of transformers with causal attention.
        layout: Layout of the whole row, the same on every rank.
        group: Ranks that share the row; all of them by default.

    Raises:
        ValueError: The layout is for another number of ranks. Inside: the part has another size, a
            mask or earlier keys are given, or a layer has a sliding window.
    """
    if layout.cp_size != dist.get_world_size(group):
        raise ValueError(f"the layout is for {layout.cp_size} ranks, but the group has {dist.get_world_size(group)}")
    rank = dist.get_rank(group)
    share = _Share(group, layout.blocks(rank).tolist(), torch.as_tensor(layout.restore, device=model.device))
    own = torch.as_tensor(layout.positions(rank), device=model.device)
    position_ids = torch.as_tensor(layout.position_ids, device=model.device)[own][None]

    def attach(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if options.get("attention_mask") is not None:
            raise ValueError("an attention_mask is given, but the layout marks the padding")
        if options.get("position_ids") is None:
            options = {**options, "position_ids": position_ids}
        return arguments, {**_cut(options, own, layout.num_positions), "use_cache": False, "cp_share": share}

    decoder, config = model.get_decoder(), model.config
    parts = {name: getattr(config, name) for name in config.sub_configs}
    # A vision tower attends as before, on every rank to all patches.
    before = {name: part._attn_implementation for name, part in {"": config, **parts}.items() if part is not None}  # noqa: SLF001  # has no public name
    model.set_attn_implementation(
        before | {"": ATTENTION} | {name: ATTENTION for name in parts if parts[name] is decoder.config}
    )
    try:
        with decoder.register_forward_pre_hook(attach, with_kwargs=True):
            yield
    finally:
        model.set_attn_implementation(before)


def _cut(options: dict[str, Any], own: torch.Tensor, num_positions: int) -> dict[str, Any]:
    """
    Return the arguments of a decoder for this rank's positions, cut where they are those of the
    whole row.

    Args:
        options: Arguments of the decoder.
        own: Positions of this rank, ascending.
        num_positions: Positions of the whole row.
    """
    axes = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "visual_pos_masks": 1}
    whole = {
        name: axis
        for name, axis in axes.items()
        if options.get(name) is not None and options[name].shape[axis] == num_positions
    }
    cut = {**options, **{name: options[name].index_select(axis, own) for name, axis in whole.items()}}
    if "visual_pos_masks" in whole and options.get("deepstack_visual_embeds") is not None:
        # Features of image tokens that deeper layers add, one for each token of an image.
        kept = torch.isin(options["visual_pos_masks"][0].nonzero()[:, 0], own)
        cut["deepstack_visual_embeds"] = [features[kept] for features in options["deepstack_visual_embeds"]]
    return cut


def _gather(part: torch.Tensor, restore: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return all positions of tensors of shape (batch, heads, positions, size) from parts."""
    expected = len(restore) // dist.get_world_size(group)
    if part.shape[2] != expected:
        message = f"a rank's part has {expected} of {len(restore)} positions, but this one has {part.shape[2]}"
        raise ValueError(message)
    concatenated: torch.Tensor = _AllGather.apply(part.movedim(2, 0), group)  # type: ignore[no-untyped-call]
    return concatenated[restore].movedim(0, 2)


class _AllGather(torch.autograd.Function):
    """Concatenates the ranks' tensors along their first dimension."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
        dist.all_gather_single(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (whole,) = gradients
        part = whole.new_empty(whole.shape[0] // dist.get_world_size(ctx.group), *whole.shape[1:])
        dist.reduce_scatter_single(part, whole.contiguous(), group=ctx.group)
        return part, None


def _attend(
    module: torch.nn.Module,  # noqa: ARG001  # transformers passes it
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cp_share: _Share | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attend from a rank's queries to the keys of their own sequences, up to themselves.

    Query, key and value belong to this rank's part, of shape (1, heads, part, size). Query heads
    may share a key head. Returns the output, of shape (1, part, heads, size), and no weights.
    """
    if cp_share is None:
        raise ValueError(f"the model attends by {ATTENTION}, but runs outside of `context_parallel`")
    if sliding_window is not None or attention_mask is not None or key.shape[2] != query.shape[2]:
        message = "context parallelism computes causal attention without a sliding window, a mask or earlier keys"
        raise ValueError(message)
    # One collective for both.
    both = _gather(torch.cat([key, value], dim=1), cp_share.restore, cp_share.group)
    keys, values = torch.split(both, key.shape[1], dim=1)
    outputs, done = [], 0
    for begin, start, stop in cp_share.blocks:
        size = stop - start
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, done : done + size],
                keys[:, :, begin:stop],
                values[:, :, begin:stop],
                attn_mask=causal_lower_right(size, stop - begin),
                dropout_p=dropout,
                scale=scaling,
                enable_gqa=True,
            )
        )
        done += size
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)

"""
Varlen attention: each block of a packed row attends only to itself, without a mask of the whole
row.

One call of torch's `varlen_attn` computes the whole row if the GPU, the dtype and the layout allow
it. Otherwise, and on other devices, torch's `scaled_dot_product_attention` computes the row block
by block. Inputs that are not a packed row (padded batches, generation with a cache) are computed by
transformers' sdpa with its own mask.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812  # its usual name
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    packed_sequence_mask_function,
    sdpa_mask,
)

from packplan.adapters.attention.layout import Layout, MaskFunction, read_layout
from packplan.adapters.attention.packed_row import PackedRow, current_row, hold_variable, row_inside_model
from packplan.core.errors import ArgumentError, PackplanError

log = logging.getLogger(__name__)

_HEAD_SIZE, _HEAD_STEP = 256, 8
"""
Limits of torch's variable-length kernel: the largest head size, and a number of which each head
size has to be a multiple.
"""

_CAPABILITY = (8, 0)
"""Lowest compute capability of GPUs that support torch's variable-length kernel."""


_PLAIN = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"}
"""Arguments of a model's own attention that torch's attention supports too."""

_TRACED: ContextVar[tuple[int, int] | None] = ContextVar("traced", default=None)
"""Compute capability assumed for tensors outside of GPUs in a traced step; None otherwise."""


def build_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    device: torch.device | str,
    attention_mask: Layout | torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Layout | torch.Tensor | None:
    """
    Return the layout of a packed row, or the mask of transformers' sdpa for other inputs.

    The arguments are those that transformers passes to functions of `AttentionMaskInterface`. A
    packed row is a batch of one row without padding or cached keys, whose mask is not a single
    causal triangle. If ranks share a row, the result is the layout of the whole row. If a model
    prepares its mask twice, the second call returns the layout unchanged.
    """
    if isinstance(attention_mask, Layout):
        return attention_mask
    # transformers lets blocks, such as prefixes and images, reach beyond the sample.
    if (own_sample := _find_part(mask_function, packed_sequence_mask_function)) is not None:
        mask_function = and_masks(mask_function, own_sample)
    row = current_row()
    if row is not None and row.share is not None:
        q_length = kv_length = row.share.num_positions
    offsets = (options.get(name, 0) for name in ("q_offset", "kv_offset"))
    starts_at_zero = all(isinstance(offset, int) and offset == 0 for offset in offsets)
    if row is not None and len(row.sample_ids) != q_length:
        row = None
    is_known = row is not None and row.known_lengths is not None  # by `unpad`, which passes a mask of ones
    if row is not None and attention_mask is not None and (is_known or bool(attention_mask.all())):
        attention_mask = None  # some models pass a mask without effect
    is_square = batch_size == 1 and attention_mask is None and starts_at_zero and q_length == kv_length
    if is_square and (row is not None or not options.get("allow_is_bidirectional_skip")):
        if row is not None:
            options["allow_is_bidirectional_skip"] = False
            if mask_function is bidirectional_mask_function or (is_known and mask_function is causal_mask_function):
                is_causal = mask_function is causal_mask_function
                return Layout.from_boundaries(row.boundaries, is_causal=is_causal, lengths=row.known_lengths)
            mask_function, allow_is_causal_skip = mask_within_samples(mask_function, row, local_size), False
        is_triangle = allow_is_causal_skip and (local_size is None or q_length < local_size)
        if not is_triangle and not options.get("use_vmap"):
            return read_layout(mask_function, length=q_length, window=local_size, device=device, row=row)
    mask: torch.Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        device=device,
        **options,
    )
    return mask


def build_mask_of_known_row(**options: Any) -> Layout | torch.Tensor | None:
    """
    Return the result of `build_mask`; PackplanError outside of a call of a model with `keep_rows`.
    """
    row_inside_model()
    return build_mask(**options)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Layout | torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """
    Compute attention within the blocks of a row if the mask is a layout, else as transformers' sdpa
    does.

    If the call needs an option that torch's attention lacks, the model's own code computes
    attention in both cases; see `own_code_attention`.

    Args:
        module: Attention layer.
        query: Queries of shape (batch, heads, tokens, size).
        key: Keys of shape (batch, key heads, tokens, size). The number of heads is a multiple of
            the number of key heads.
        value: See *key*.
        attention_mask: Result of `build_mask`.
        dropout: Dropout probability of attention weights.
        scaling: Factor of the products of queries and keys; None for 1 / sqrt(size).
        **options: Further arguments that transformers passes to attention functions.

    Returns:
        The output, of shape (batch, tokens, heads, size), and None in place of attention weights.

    Raises:
        ArgumentError: Positions restart within the row, but the mask does not separate the samples.
        PackplanError: Ranks share the row, and the model's own code computes attention, but some
            key head has query heads on several ranks.
    """
    options |= {"dropout": dropout, "scaling": scaling}
    row = current_row()
    if row is None and not getattr(module, "layer_idx", 0):  # checking the first layer is enough
        _refuse_joined_samples(options.get("position_ids"), attention_mask, query.shape[2])
    if row is None or (share := row.share) is None:
        return _attend_whole_row(module, (query, key, value), attention_mask, options), None
    if own_code_attention(module, options) is not None and not share.has_whole_groups(query.shape[1], key.shape[1]):
        kind = type(module).__name__
        message = (
            f"{kind} attends by its own code, so ranks have to divide its {key.shape[1]} key heads, but there are "
            f"{share.num_ranks}: let fewer ranks share a row"
        )
        raise PackplanError(message)
    parts = share.to_heads(query, key, value)
    output = _attend_whole_row(module, parts, attention_mask, options) if parts[0].shape[1] else _attend_no_head(*parts)
    return share.to_tokens(output, query.shape[1]), None


def _refuse_joined_samples(positions: torch.Tensor | None, mask: Layout | torch.Tensor | None, length: int) -> None:
    """
    Refuse a packed row whose samples are not separated by the mask that transformers has made.

    Args:
        positions: Position ids of the call.
        mask: Mask of the call, as in `attend`.
        length: Number of tokens of the row.
    """
    is_one_block = mask is None or (isinstance(mask, Layout) and len(mask.lengths) == 1)
    if not is_one_block or type(positions) is not torch.Tensor or positions.shape != (1, length):
        return
    if number := int((positions.diff() < 1).sum()):
        fact = (
            f"position_ids begin {number + 1} samples in one row, but a cache or an attention_mask lets them attend to "
            "each other: pass use_cache=False, and leave attention_mask out"
        )
        raise ArgumentError("packed_batch", fact)


def _attend_whole_row(
    module: torch.nn.Module,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Layout | torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Compute attention from query, key and value of all tokens; see `attend`."""
    own = own_code_attention(module, options)
    if isinstance(mask, Layout):
        if own is None:
            return attend_within_blocks(*parts, mask, dropout=options["dropout"], scaling=options["scaling"])
        return _attend_by_own_code(own, parts, mask)
    if own is None:
        output: torch.Tensor = sdpa_attention_forward(module, *parts, mask, **options)[0]
        return output
    return own(*parts, mask)


def _attend_no_head(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return an output of 0 heads, so that this rank runs the collectives of the backward pass."""
    return ((query @ key.mT) @ value).transpose(1, 2)


def mask_within_samples(mask_function: MaskFunction, row: PackedRow, local_size: int | None) -> MaskFunction:
    """
    Return a mask function under which a token attends only within its own sample.

    transformers counts chunks from the row's start. The returned function counts them from each
    sample's start.

    Args:
        mask_function: Mask function of the model.
        row: Samples of the row.
        local_size: Number of tokens of the mask's window or chunk; None if it has neither.
    """
    if local_size is not None and _find_part(mask_function, chunked_overlay) is not None:
        mask_function = and_masks(causal_mask_function, row.same_chunk(local_size))
    else:
        mask_function = row.with_padded_distances(mask_function)
    together: MaskFunction = and_masks(mask_function, row.same_sample)
    return together


def _find_part(function: Any, maker: Callable[..., Any], depth: int = 4) -> MaskFunction | None:
    """
    Return the mask function that *maker* has made, either *function* itself or a part of it; None
    if there is none.
    """
    if (
        getattr(function, "__qualname__", "").startswith(f"{maker.__name__}.")
        and function.__module__ == maker.__module__
    ):
        return cast(MaskFunction, function)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()] if depth > 0 else []
    parts = [part for cell in cells for part in (cell if isinstance(cell, tuple) else (cell,)) if callable(part)]
    return next(filter(None, (_find_part(part, maker, depth - 1) for part in parts)), None)


OwnAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""
Attention function of a model's own code; its arguments are query, key, value, and a bool mask or
None.
"""


def own_code_attention(module: torch.nn.Module, options: Mapping[str, Any]) -> OwnAttention | None:
    """
    Return the attention function of the model's own code if *options* sets an option that torch's
    attention lacks, else None.

    A soft cap of attention scores is such an option. The result is also None if the module that
    defines the layer has no `eager_attention_forward`.

    Args:
        module: Attention layer.
        options: Arguments that transformers passes besides query, key, value and mask. An option
            counts as set unless it is None.
    """
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        return None
    beyond = {"softcap", "s_aux"} | (_parameter_names(eager) - _PLAIN)
    if all(options.get(name) is None for name in beyond):
        return None

    given = {name: part for name, part in options.items() if name != "is_causal" or name in _parameter_names(eager)}

    def attend_by_eager(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if mask is None:
            queries, keys = (torch.arange(part.shape[2], device=part.device) for part in (query, key))
            mask = (keys <= queries[:, None] + (len(keys) - len(queries)))[None, None]
        additive = query.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
        output: torch.Tensor = eager(module, query, key, value, additive, **given)[0]
        return output

    return attend_by_eager


@cache
def _parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _attend_by_own_code(own: OwnAttention, parts: Iterable[torch.Tensor], layout: Layout) -> torch.Tensor:
    """
    Compute attention block by block with the model's own code; *parts* are query, key and value.
    """
    outputs = []
    blocks = zip(*(torch.split(part, list(layout.lengths), 2) for part in parts), strict=True)
    for number, (q, k, v) in enumerate(blocks):
        mask = None if layout.masks is None else layout.masks[number]
        if mask is None and layout.window is not None and layout.window < q.shape[2]:
            tokens = torch.arange(q.shape[2], device=q.device)
            mask = ((tokens <= tokens[:, None]) & (tokens > tokens[:, None] - layout.window))[None, None]
        outputs.append(own(q, k, v, mask))
    return torch.cat(outputs, 1)


def attend_to_patches(
    module: torch.nn.Module,  # noqa: ARG001  # transformers passes it
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None = None,  # noqa: ARG001
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """
    Compute non-causal attention within the images or windows of a vision tower's packed patches.

    The images or windows begin at the positions *cu_seq_lens_q*, of which the last is the end of
    the row. The longest image or window has *max_length_q* patches. Other arguments and results are
    those of `attend`.
    """
    layout = Layout.from_boundaries(cu_seq_lens_q, is_causal=False, longest=max_length_q)
    return attend_within_blocks(query, key, value, layout, dropout=dropout, scaling=scaling), None


def attend_within_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    *,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """
    Return attention within the blocks of a row, by the fastest supported kernel; shape (1, tokens,
    heads, size).

    Args:
        query: Queries of shape (1, heads, tokens, size).
        key: Keys of shape (1, key heads, tokens, size).
        value: See *key*.
        layout: Layout of the row.
        dropout: Dropout probability of attention weights.
        scaling: Factor of the products of queries and keys; None for 1 / sqrt(size).
    """
    capability = torch.cuda.get_device_capability(query.device) if query.is_cuda else _TRACED.get()
    why_not = why_not_fused(query, layout, dropout=dropout, capability=capability)
    if why_not is None:
        fused: torch.Tensor = varlen_attn(**fused_arguments(query, key, value, layout, scaling=scaling))  # type: ignore[assignment]  # no lse is asked for
        return fused[None]
    if capability is not None:
        _log_reason_once(why_not, "this GPU" if query.is_cuda else "the GPU that is traced")
    return _attend_block_by_block(query, key, value, layout, dropout=dropout, scaling=scaling)


def why_not_fused(
    query: torch.Tensor, layout: Layout, *, dropout: float, capability: tuple[int, int] | None
) -> str | None:
    """
    Return the reason why torch's `varlen_attn` does not support a row; None if it supports the row.

    Args:
        query: Queries of the row; shape (1, heads, tokens, size).
        layout: Layout of the row.
        dropout: Dropout probability of attention weights.
        capability: Compute capability of the GPU; None on other devices.
    """
    dtype, size = compute_dtype(query), query.shape[-1]
    half = dtype in (torch.bfloat16, torch.float16)
    reasons = {
        "the model is not on a CUDA GPU": capability is None,
        f"the model computes in {str(dtype).removeprefix('torch.')}; training.bf16: true is faster": not half,
        "attention weights are dropped": dropout > 0,
        "the model's mask is neither causal nor a window": layout.masks is not None,
        f"attention heads have an unsupported size of {size}": size > _HEAD_SIZE or size % _HEAD_STEP != 0,
        "the GPU has compute capability {}.{}, but the kernel needs at least {}.{}".format(
            *(capability or _CAPABILITY), *_CAPABILITY
        ): (capability or _CAPABILITY) < _CAPABILITY,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def fused_arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, *, scaling: float | None
) -> dict[str, Any]:
    """
    Return the arguments of `varlen_attn` for a row.

    Returned queries, keys and values have the shape (tokens, heads, size). For the arguments of
    this function, see `attend`.
    """
    # Autocast does not support the operator, so its casts are done here.
    parts = (part[0].transpose(0, 1).to(compute_dtype(query)) for part in (query, key, value))
    # The left side of the window counts the tokens before the query, without the query.
    left = -1 if layout.window is None else layout.window - 1
    return {
        **dict(zip(("query", "key", "value"), parts, strict=True)),
        "cu_seq_q": layout.cu_seqlens,
        "cu_seq_k": layout.cu_seqlens,
        "max_q": layout.longest,
        "max_k": layout.longest,
        "scale": scaling,
        "window_size": (left, 0) if layout.is_causal else (-1, -1),
        "enable_gqa": query.shape[1] != key.shape[1],
    }


def tracing_as_on_gpu() -> AbstractContextManager[None]:
    """
    Inside this context, treat tensors outside of GPUs as if they were on a GPU that supports
    `varlen_attn`.
    """
    return hold_variable(_TRACED, _CAPABILITY)


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """
    Return the dtype in which a tensor's products are computed: autocast's dtype if autocast is on,
    else the tensor's own.
    """
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


@cache
def _log_reason_once(why: str, device: str) -> None:
    log.info("attention of variable length runs block by block on %s, since %s", device, why)


def _attend_block_by_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: Layout,
    *,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """
    Compute attention block by block; blocks of equal length form one batch. See `attend` for
    shapes.
    """
    sdpa = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scaling)
    # Split and joined once: the backward pass of each slice would fill a whole row with zeros.
    split = [torch.split(part, list(layout.lengths), 2) for part in (query, key, value)]
    outputs: list[torch.Tensor] = [query] * len(layout.lengths)
    for batch in layout.block_batches:
        q, k, v = (torch.cat([blocks[i] for i in batch]) if len(batch) > 1 else blocks[batch[0]] for blocks in split)
        if layout.masks is not None:
            attended = _attend_masked(sdpa, q, k, v, layout.masks[batch[0]])
        elif layout.window is not None and layout.window < q.shape[2]:
            attended = _attend_windowed(sdpa, q, k, v, layout.window)
        else:
            attended = sdpa(q, k, v, is_causal=layout.is_causal, enable_gqa=q.shape[1] != k.shape[1])
        for i, block in zip(batch, torch.split(attended.transpose(1, 2), 1), strict=True):
            outputs[i] = block
    return torch.cat(outputs, 1)


def _attend_masked(
    sdpa: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Compute attention under a mask, whose shape broadcasts to (batch, heads, queries, keys)."""
    # With a mask, grouped heads would use a slow kernel.
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) if groups > 1 else part for part in (key, value))
    return sdpa(query, key, value, attn_mask=mask)


def _attend_windowed(
    sdpa: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int
) -> torch.Tensor:
    """
    Compute causal attention within a window, in parts of the window's length.

    Each part needs its own keys and the keys of the preceding part.
    """
    queries = torch.arange(window, device=query.device)[:, None] + window
    keys = torch.arange(2 * window, device=query.device)
    mask = (keys <= queries) & (keys > queries - window)
    split, outputs = [torch.split(part, window, 2) for part in (key, value)], []
    for number, q in enumerate(torch.split(query, window, 2)):
        first, size = max(0, number - 1), q.shape[2]
        k, v = (torch.cat(part[first : number + 1], 2) for part in split)
        outputs.append(_attend_masked(sdpa, q, k, v, mask[:size, 0 if number else window : window + size]))
    return torch.cat(outputs, 2)

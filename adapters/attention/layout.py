"""
Layout of a packed row: the blocks within which tokens attend.

A layout replaces a mask of shape (tokens, tokens).

A layout is read from the model's own mask function, so that windows and other rules of the mask
keep their meaning. The model passes the layout to its layers as the attention mask, so backward
passes and recomputed layers use the layout of their own row. No layout is global state. No tensor
grows with the square of the row's length. Only masks that are neither causal nor a window grow with
the square of each block's length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise

import attrs
import torch
from transformers.masking_utils import sdpa_mask

from packplan.adapters.attention.packed_row import PackedRow

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""
Mask function of transformers: indices of batch, head, query and key -> whether the query attends to
the key.
"""


@attrs.frozen(eq=False)
class Layout:
    """
    Consecutive blocks of a packed row; a token attends only within its own block.

    >>> Layout.from_boundaries(torch.tensor([0, 3, 5], dtype=torch.int32), is_causal=True).lengths
    (3, 2)
    """

    cu_seqlens: torch.Tensor
    """
    Starts of the blocks, and the row's end; int32 of shape (blocks + 1,), on the row's device.
    """

    is_causal: bool
    """Whether tokens attend to no later token; not used if there are `masks`."""

    window: int | None = None
    """
    Maximum number of tokens that a token of a causal block attends to, itself included; None for no
    limit.
    """

    masks: tuple[torch.Tensor, ...] | None = None
    """
    Mask of each block; bool of shape (1, 1, length, length). None if all blocks are causal, causal
    within `window`, or without a mask.
    """

    _longest: int | None = None

    _known_lengths: tuple[int, ...] | None = None

    @classmethod
    def from_boundaries(
        cls,
        cu_seqlens: torch.Tensor,
        *,
        is_causal: bool,
        longest: int | None = None,
        lengths: tuple[int, ...] | None = None,
    ) -> Layout:
        """
        Return the layout of blocks that have neither windows nor masks.

        Args:
            cu_seqlens: Starts of the blocks, and the row's end; integers of shape (blocks + 1,).
            is_causal: Whether tokens attend to no later token.
            longest: Number of tokens of the longest block. None if it is not known; reading it
                later then waits for the GPU.
            lengths: Number of tokens of each block. None if they are not known; reading them later
                then waits for the GPU.
        """
        return cls(cu_seqlens.to(torch.int32), is_causal, longest=longest, known_lengths=lengths)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens in each block."""
        if self._known_lengths is not None:
            return self._known_lengths
        return tuple(stop - start for start, stop in pairwise(self.cu_seqlens.tolist()))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """
        Shape of a mask of the whole row, (1, 1, tokens, tokens).

        transformers passes a mask with four axes on unchanged. A layout has such a shape, so the
        attention function gets the layout in place of a mask.
        """
        return 1, 1, sum(self.lengths), sum(self.lengths)

    ndim = 4
    """Number of axes of `shape`."""

    @cached_property
    def longest(self) -> int:
        """Number of tokens in the longest block."""
        return max(self.lengths) if self._longest is None else self._longest

    @cached_property
    def block_batches(self) -> tuple[tuple[int, ...], ...]:
        """
        Block indices of each batch. A batch has all blocks of one length, or a single block if
        there are masks.
        """
        groups: dict[int, list[int]] = {}
        for position, length in enumerate(self.lengths):
            groups.setdefault(position if self.masks is not None else length, []).append(position)
        return tuple(map(tuple, groups.values()))


def read_layout(
    mask_function: MaskFunction,
    *,
    length: int,
    window: int | None,
    device: torch.device | str,
    row: PackedRow | None = None,
) -> Layout:
    """
    Read the blocks of a row from a mask function.

    A block begins at a token that does not attend to the preceding token. The mask counts as
    causal, or as causal within the window, if it equals such a mask at these pairs:

    - each token, with the next token, and with the first and the last token of its block;
    - each token, with the farthest key that such a mask allows, and with the key before this
      farthest key;
    - the first and the last token of each block, with keys at distances that are powers of two.

    So the mask is evaluated at a few pairs for each token and each block, instead of at all pairs.
    If the mask differs at one of these pairs, the layout has a mask for each block.

    Args:
        mask_function: Mask function of the model, whose arguments are index tensors that broadcast.
        length: Number of tokens of the row.
        window: Maximum number of tokens that a token attends to according to transformers, itself
            included; None for no limit.
        device: Device of the row.
        row: Samples of the row. If their lengths are known, blocks of these lengths are compared
            with the mask first; the comparison waits for the device once.
    """
    zero = torch.zeros((), dtype=torch.long, device=device)
    tokens = torch.arange(length, device=device)

    def attends(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return mask_function(zero, zero, queries, keys).expand(keys.shape)

    begins = torch.ones(length, dtype=torch.bool, device=device)
    begins[1:] = ~attends(tokens[1:], tokens[:-1])
    own = begins.cumsum(0) - 1
    if row is not None and row.known_lengths is not None:
        layout = Layout.from_boundaries(row.boundaries, is_causal=True, lengths=row.known_lengths)
        if (found := _find_window(attends, layout, own, row.sample_ids, window)) is not None:
            return found
    first = tokens[begins]
    layout = Layout.from_boundaries(torch.cat([first, first.new_tensor([length])]), is_causal=True)
    if (found := _find_window(attends, layout, own, own, window)) is not None:
        return found
    masks = tuple(
        sdpa_mask(1, n, n, start, start, mask_function, allow_is_causal_skip=False, device=device)
        for n, start in zip(layout.lengths, first.tolist(), strict=True)
    )
    return attrs.evolve(layout, masks=masks)


def _find_window(
    attends: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    layout: Layout,
    begun: torch.Tensor,
    own: torch.Tensor,
    window: int | None,
) -> Layout | None:
    """
    Compare the mask with a causal mask, or a window, at some pairs of query and key. Return the
    layout with its window. Return None if the mask has other blocks, or is neither causal nor a
    window within the blocks.

    Args:
        attends: Function of query and key positions that returns whether each query attends to its
            key; all of shape (pairs,).
        layout: Blocks without a window.
        begun: Index of each token's block according to the mask; shape (tokens,).
        own: Index of each token's block according to the layout; shape (tokens,).
        window: See `read_layout`.
    """
    reach = layout.longest if window is None else min(window, layout.longest)
    first, last, tokens = (
        layout.cu_seqlens[:-1].long(),
        layout.cu_seqlens[1:].long() - 1,
        torch.arange(len(own), device=own.device),
    )
    steps = [1 << power for power in range(1, len(own).bit_length())]
    pairs = [(tokens, key) for key in (tokens + 1, first[own], last[own], tokens - reach + 1, tokens - reach)]
    pairs += [(first, first + step) for step in steps] + [(last, last - step) for step in steps]
    queries, keys = (torch.cat(part) for part in zip(*pairs, strict=True))
    keys = torch.minimum(torch.maximum(keys, first[own[queries]]), last[own[queries]])
    expected = (keys <= queries) & (keys > queries - reach)
    if not ((attends(queries, keys) == expected).all() & (begun == own).all()):  # waits for the device
        return None
    return attrs.evolve(layout, window=None if reach == layout.longest else reach)

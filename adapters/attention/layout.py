"""
Where the samples of a packed row lie, and what each token of them may attend to: a value, in place
of a mask of T x T.

Rules: a layout is read off the model's own mask function, so that windows and overlays keep their
meaning; it travels as the attention mask, from the model to its layers, so that backward passes and
recomputed layers have the one of their own row; nothing global knows it. No tensor grows with the
square of the row's length; masks that are neither causal nor a window (overlays) grow with the
squares of their own samples'.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise

import attrs
import torch
from transformers.masking_utils import sdpa_mask

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""
transformers' own: indices of batch, head, query and key -> whether the query attends to the key.
"""


@attrs.frozen(eq=False)
class Layout:
    """
    The blocks of a packed row, one after the other; tokens attend within their own block alone.

    >>> Layout.from_boundaries(torch.tensor([0, 3, 5], dtype=torch.int32), is_causal=True).lengths
    (3, 2)
    """

    cu_seqlens: torch.Tensor
    """Where blocks begin, and the row's end; int32 of shape (blocks + 1,), where the row is."""

    is_causal: bool
    """Tokens attend to no later token."""

    window: int | None = None
    """
    Tokens, itself included, that a token of a causal block attends to at most; None: to all before
    it.
    """

    masks: tuple[torch.Tensor, ...] | None = None
    """
    The mask of each block, where blocks are neither plain nor windowed; bool of shape (1, 1,
    length, length).
    """

    _longest: int | None = None

    @classmethod
    def from_boundaries(cls, cu_seqlens: torch.Tensor, *, is_causal: bool, longest: int | None = None) -> Layout:
        """
        Return the layout of plain blocks.

        Args:
            cu_seqlens: Where blocks begin, and the row's end; integers of shape (blocks + 1,).
            is_causal: Tokens attend to no later token.
            longest: Tokens of the longest block, if they are known; else a GPU is waited for when
                they are needed.
        """
        return cls(cu_seqlens.to(torch.int32), is_causal, longest=longest)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each block."""
        return tuple(stop - start for start, stop in pairwise(self.cu_seqlens.tolist()))

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest block."""
        return max(self.lengths) if self._longest is None else self._longest

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """
        Positions of the blocks that can be computed as one batch: of equal length, and without
        masks of their own.
        """
        found: dict[int, list[int]] = {}
        for position, length in enumerate(self.lengths):
            found.setdefault(position if self.masks is not None else length, []).append(position)
        return tuple(map(tuple, found.values()))


def read_layout(mask_function: MaskFunction, *, length: int, window: int | None, device: torch.device | str) -> Layout:
    """
    Read the blocks of a row off a mask function; a block begins where a token does not attend to
    the one before it.

    A block is taken for plain causal, or causal within the window, when every token attends to the
    farthest key that this allows, and neither to the first key beyond it, nor to the token after
    it, nor to the block's last; and when the block's first and last token do as expected at
    distances that are powers of two. That is five questions a token, and some for each block,
    instead of one for each pair.

    Args:
        mask_function: What the model means by its mask; it takes index tensors that broadcast.
        length: Tokens of the row.
        window: Tokens that transformers says a token attends to at most, itself included; None if
            it says nothing.
        device: Where the row is.
    """
    zero = torch.zeros((), dtype=torch.long, device=device)
    tokens = torch.arange(length, device=device)

    def attends(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return mask_function(zero, zero, queries, keys).expand(keys.shape)

    begins = torch.ones(length, dtype=torch.bool, device=device)
    begins[1:] = ~attends(tokens[1:], tokens[:-1])
    first = tokens[begins]
    cu_seqlens = torch.cat([first, first.new_tensor([length])]).to(torch.int32)
    layout = Layout.from_boundaries(cu_seqlens, is_causal=True)
    own = begins.cumsum(0) - 1
    reach = layout.longest if window is None else min(window, layout.longest)
    if _is_causal_within(attends, first, cu_seqlens[1:].long() - 1, own, reach):
        return attrs.evolve(layout, window=None if reach == layout.longest else reach)
    masks = tuple(
        sdpa_mask(1, n, n, start, start, mask_function, allow_is_causal_skip=False, device=device)
        for n, start in zip(layout.lengths, first.tolist(), strict=True)
    )
    return attrs.evolve(layout, masks=masks)


def _is_causal_within(
    attends: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    first: torch.Tensor,
    last: torch.Tensor,
    own: torch.Tensor,
    reach: int,
) -> bool:
    """
    Return whether tokens attend to the *reach* tokens up to themselves, as far as their block goes,
    and to no others.

    Args:
        attends: Answers for queries and keys, both of shape (questions,).
        first: First token of each block; shape (blocks,).
        last: Last token of each block; shape (blocks,).
        own: Each token's block; shape (tokens,).
        reach: Tokens, itself included.
    """
    tokens = torch.arange(len(own), device=own.device)
    steps = [1 << power for power in range(1, len(own).bit_length())]
    asked = [(tokens, key) for key in (tokens + 1, first[own], last[own], tokens - reach + 1, tokens - reach)]
    asked += [(first, first + step) for step in steps] + [(last, last - step) for step in steps]
    queries, keys = (torch.cat(part) for part in zip(*asked, strict=True))
    keys = torch.minimum(torch.maximum(keys, first[own[queries]]), last[own[queries]])
    expected = (keys <= queries) & (keys > queries - reach)
    return torch.equal(attends(queries, keys), expected)

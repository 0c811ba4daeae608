"""
Division of a packed row among ranks: each rank computes some tokens, and in attention some heads.

All layers but attention compute each token by itself. Attention needs all tokens, but computes each
head by itself. So the ranks exchange values before attention: each rank then has all tokens of some
heads, instead of some tokens of all heads. After attention, the ranks exchange the results back
(sequence parallelism by all-to-all, as in Jacobs et al., "DeepSpeed Ulysses", 2023). If the number
of ranks does not divide the number of heads, some ranks have one head more.

Rules: every rank of the group runs the same layers in the same order, forward and backward.
The ranks' gradients of a parameter add up to the gradient of the sum of the ranks' losses.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives  # these collectives have gradients


@attrs.frozen(eq=False)
class RowShare:
    """Part of a packed row that one rank computes: some tokens or, in attention, some heads."""

    group: dist.ProcessGroup
    """Ranks that share the row."""

    positions: torch.Tensor
    """
    Row positions of this rank's tokens; int64 of shape (part,), with the same length on every rank.
    """

    num_tokens: int
    """
    Number of tokens of the row, without the padding at its end that makes all parts equally long.
    """

    restore: torch.Tensor | None = None
    """
    Index that restores the row from the concatenated parts of all ranks; int64 of shape
    (num_positions,). None if the parts are in the row's order.
    """

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks that share the row."""
        return self.group.size()

    @cached_property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return self.group.rank()

    @property
    def num_positions(self) -> int:
        """Number of positions in the row, with padding."""
        return len(self.positions) * self.num_ranks

    def head_ranges(self, num_heads: int) -> list[range]:
        """Return the range of query heads of each rank; their sizes differ by at most one head."""
        least, rest = divmod(num_heads, self.num_ranks)
        ends = [number * least + min(number, rest) for number in range(self.num_ranks + 1)]
        return [range(*span) for span in pairwise(ends)]

    def has_whole_groups(self, num_heads: int, num_key_heads: int) -> bool:
        """Return whether the query heads of each key head are all on one rank."""
        together = num_heads // num_key_heads
        return not any(own.start % together or own.stop % together for own in self.head_ranges(num_heads))

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Return query, key and value of all tokens for this rank's heads.

        A key head whose query heads are on several ranks is sent to each of these ranks. If a rank
        has only some of a key head's query heads, each of the rank's query heads gets a copy of its
        key head.

        Args:
            query: Queries of this rank's tokens; shape (1, heads, part, size).
            key: Keys of this rank's tokens; shape (1, key heads, part, size).
            value: See *key*.
        """
        heads, together = self.head_ranges(query.shape[1]), query.shape[1] // key.shape[1]
        keys = [range(own.start // together, -(-own.stop // together)) if own else own for own in heads]
        query, key, value = self._exchange(query, heads), self._exchange(key, keys), self._exchange(value, keys)
        mine, served = heads[self.rank], keys[self.rank]
        if mine.start % together or mine.stop % together:
            copies = torch.tensor([head // together - served.start for head in mine], device=key.device)
            key, value = key.index_select(1, copies), value.index_select(1, copies)
        return query, key, value

    def _exchange(self, part: torch.Tensor, heads: Sequence[range]) -> torch.Tensor:
        """
        Send each rank the values of its heads for this rank's tokens; return this rank's heads for
        all tokens.
        """
        index = torch.tensor([head for span in heads for head in span], device=part.device)
        mine = len(heads[self.rank])
        rows = part[0].index_select(0, index)
        received = _exchange_rows(rows, [*map(len, heads)], [mine] * self.num_ranks, self.group)
        row = received.view(self.num_ranks, mine, *received.shape[1:]).transpose(0, 1).flatten(1, 2)
        return (row if self.restore is None else row.index_select(1, self.restore))[None]

    def to_tokens(self, output: torch.Tensor, num_heads: int) -> torch.Tensor:
        """
        Return the output of all heads for this rank's tokens; shape (1, part, heads, size).

        Args:
            output: Output of this rank's heads for all tokens; shape (1, tokens, heads, size).
            num_heads: Number of heads on all ranks.
        """
        row, mine = output[0], output.shape[2]
        if self.restore is not None:
            row = row.index_select(0, self.restore.argsort())
        parts = row.reshape(self.num_ranks, len(self.positions), *row.shape[1:]).transpose(1, 2).flatten(0, 1)
        counts = [*map(len, self.head_ranges(num_heads))]
        received = _exchange_rows(parts, [mine] * self.num_ranks, counts, self.group)
        return received.transpose(0, 1).contiguous()[None]

    def gather(self, part: torch.Tensor, axis: int) -> torch.Tensor:
        """Return the values of all tokens of the row along an axis, from the parts of all ranks."""
        row = gather_rows(part.movedim(axis, 0), self.group)
        return (row if self.restore is None else row.index_select(0, self.restore)).movedim(0, axis)

    def take(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        """
        Return the values of this rank's tokens along an axis; padding repeats the last token.

        If all ranks compute the loss of the whole row, each rank gets the whole gradient of
        *values*.
        """
        result: torch.Tensor = _TakePart.apply(values.movedim(axis, 0), self)  # type: ignore[no-untyped-call]
        return result.movedim(0, axis)


class _TakePart(torch.autograd.Function):
    """Differentiable `RowShare.take` for values whose first axis is the tokens."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, share: RowShare) -> torch.Tensor:
        ctx.share = share
        return values.index_select(0, share.positions.clamp(max=share.num_tokens - 1))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        share: RowShare = ctx.share
        return share.gather(gradients[0], 0)[: share.num_tokens] / share.num_ranks, None


def _exchange_rows(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """
    Send *sent[r]* consecutive rows to each rank r, and return the received rows in the order of
    ranks.
    """
    return collectives.all_to_all_single(rows.contiguous(), received, sent, group)


def gather_rows(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows of all ranks, joined in rank order."""
    result: torch.Tensor = collectives.all_gather_single_autograd(part.contiguous(), 0, group)
    return result

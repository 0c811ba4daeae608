"""
Context parallelism: the layout of sequences in a packed row, and the part of the row that each rank
computes.

Each sequence is padded separately and cut into 2 x cp_size chunks of equal length. Rank r computes
the r-th chunk from the head and the r-th chunk from the tail. All ranks therefore do the same work
in causal attention. A rank's row contains its chunks of the first sequence, then its chunks of the
second, and so on. Targets are shifted before the row is cut, because the token after the last token
of a chunk is on another rank.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError
from packplan.core.lengths import (
    MOST_RANKS,
    IntArray,
    Lengths,
    as_lengths,
    as_whole_number,
    frozen_array,
    round_up_lengths,
)
from packplan.core.packs import join_ranges


def padded_length(length: int, *, cp_size: int, tp_size: int = 1) -> int:
    """
    Return the length to which a sequence is padded so that it can be cut into equal parts.

    Args:
        length: Number of tokens of the sequence, >= 1.
        cp_size: Number of ranks that share a row, >= 1.
        tp_size: Number of tensor-parallel ranks, >= 1.

    Returns: *length*, rounded up to a multiple of cp_size * 2 * tp_size, or of tp_size if cp_size
    is 1.

    >>> padded_length(5, cp_size=2), padded_length(5, cp_size=1)
    (8, 5)
    """
    return cu_seqlens([length], pad_to_multiple_of=_pad_multiple(cp_size, tp_size))[1]


def cu_seqlens(lengths: Lengths, *, pad_to_multiple_of: int = 1) -> list[int]:
    """
    Return the first position of each sequence in a packed row, and the end of the last sequence.

    Args:
        lengths: Number of tokens of each sequence, >= 1.
        pad_to_multiple_of: Each sequence is padded to a multiple of this number of tokens, >= 1.

    >>> cu_seqlens([8, 5, 7]), cu_seqlens([8, 5, 7], pad_to_multiple_of=4)
    ([0, 8, 13, 20], [0, 8, 16, 24])
    """
    padded = round_up_lengths(as_lengths(lengths), as_whole_number("pad_to_multiple_of", pad_to_multiple_of))
    return [0, *np.cumsum(padded).tolist()]


def chunk_positions(length: int, *, cp_size: int, cp_rank: int) -> list[int]:
    """
    Return the positions in one sequence that a rank computes, ascending: one chunk from the head
    and one from the tail.

    Args:
        length: Number of tokens of the padded sequence, >= 1.
        cp_size: Number of ranks that share the sequence, >= 1. A single rank computes all
            positions.
        cp_rank: Index of the rank among the ranks that share the row, from 0.

    Raises:
        ArgumentError: *cp_rank* is not below *cp_size*, or several ranks share the sequence and its
            length is not a multiple of 2 * cp_size.

    >>> chunk_positions(8, cp_size=2, cp_rank=0), chunk_positions(8, cp_size=2, cp_rank=1)
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    length = as_whole_number("length", length, least=0)
    chunks: list[int] = PackedLayout([0, length], [0, length], cp_size).positions(cp_rank).tolist()
    return chunks


def _pad_multiple(cp_size: int, tp_size: int) -> int:
    cp_size = as_whole_number("cp_size", cp_size, most=MOST_RANKS)
    tp_size = as_whole_number("tp_size", tp_size, most=MOST_RANKS)
    return tp_size if cp_size == 1 else cp_size * 2 * tp_size


@attrs.frozen(eq=False)
class PackedLayout:
    """
    Layout of a packed row of separately padded sequences, and the part of the row that each rank
    computes.

    Raises:
        ArgumentError: The arrays do not describe one row, a sequence is empty, or a padded sequence
            cannot be cut into equal chunks for the ranks.
    """

    cu_seqlens: IntArray = attrs.field(converter=frozen_array)
    """
    Start of each sequence in the row without padding, then the number of tokens; shape
    (num_sequences + 1,).
    """

    cu_seqlens_padded: IntArray = attrs.field(converter=frozen_array)
    """
    Start of each sequence in the row with padding, then the length of the row; shape (num_sequences
    + 1,).
    """

    cp_size: int = 1
    """Number of ranks that share the row."""

    def __attrs_post_init__(self) -> None:
        as_whole_number("cp_size", self.cp_size, most=MOST_RANKS)
        true, padded = self.cu_seqlens, self.cu_seqlens_padded
        if true.ndim != 1 or not true.size or true.shape != padded.shape or true[0] or padded[0]:
            message = f"cu_seqlens {true.tolist()} and cu_seqlens_padded {padded.tolist()} do not describe one row"
            raise ArgumentError("argument", message)
        for number, (length, room) in enumerate(zip(self.lengths.tolist(), np.diff(padded).tolist(), strict=True)):
            if not 1 <= length <= room:
                message = f"sequence {number} has {length} tokens in {room} positions, but 1 to {room} are possible"
                raise ArgumentError("argument", message)
            if self.cp_size > 1 and room % (2 * self.cp_size):
                message = (
                    f"sequence {number} has {room} positions, but {self.cp_size} ranks share it in {2 * self.cp_size} "
                    f"equal chunks: pad it to a multiple of {2 * self.cp_size}"
                )
                raise ArgumentError("argument", message)

    @classmethod
    def from_lengths(cls, lengths: Lengths, *, cp_size: int = 1, tp_size: int = 1) -> PackedLayout:
        """
        Lay out sequences, each padded to its `padded_length`.

        Args:
            lengths: Number of tokens of each sequence, >= 1.
            cp_size: Number of ranks that share the row, >= 1.
            tp_size: Number of tensor-parallel ranks, >= 1.

        >>> PackedLayout.from_lengths([5, 8, 1, 3], cp_size=2).cu_seqlens_padded.tolist()
        [0, 8, 16, 20, 24]
        """
        multiple = _pad_multiple(cp_size, tp_size)
        return cls(cu_seqlens(lengths), cu_seqlens(lengths, pad_to_multiple_of=multiple), cp_size)

    @property
    def lengths(self) -> IntArray:
        """Number of tokens of each sequence without padding; shape (num_sequences,)."""
        return np.diff(self.cu_seqlens)

    @property
    def num_positions(self) -> int:
        """Number of positions in the row, with padding."""
        return int(self.cu_seqlens_padded[-1])

    @cached_property
    def sequence(self) -> IntArray:
        """Index of the sequence at each position, padding included; shape (num_positions,)."""
        return np.repeat(np.arange(self.lengths.size), np.diff(self.cu_seqlens_padded))

    @cached_property
    def position_ids(self) -> IntArray:
        """
        Position of each token in its sequence, from 0, padding included; shape (num_positions,).
        """
        return np.arange(self.num_positions) - self.cu_seqlens_padded[self.sequence]

    @cached_property
    def is_token(self) -> NDArray[np.bool_]:
        """Whether each position is a token and not padding; shape (num_positions,)."""
        return self.position_ids < self.lengths[self.sequence]

    @cached_property
    def targets(self) -> IntArray:
        """
        Row position of the token that each position predicts, or -1; shape (num_positions,).

        The value is -1 at the last token of a sequence and at padding.

        >>> PackedLayout([0, 3, 4], [0, 4, 5]).targets.tolist()
        [1, 2, -1, -1, -1]
        """
        has_next = self.position_ids + 1 < self.lengths[self.sequence]
        return np.where(has_next, np.arange(self.num_positions) + 1, -1)

    def blocks(self, cp_rank: int) -> IntArray:
        """
        Return the ranges of row positions that a rank computes, in the order of its own row.

        Args:
            cp_rank: Index of the rank among the ranks that share the row, from 0.

        Returns:
            Three row positions for each block: start of its sequence, start and end of the block;
            int64 of shape (num_blocks, 3).
        """
        if as_whole_number("cp_rank", cp_rank, least=0) >= self.cp_size:
            raise ArgumentError("argument", f"cp_rank is {cp_rank}, but has to be below cp_size ({self.cp_size})")
        starts, sizes = self.cu_seqlens_padded[:-1], np.diff(self.cu_seqlens_padded)
        if self.cp_size == 1:
            return np.stack([starts, starts, starts + sizes], axis=1)
        chunks = sizes // (2 * self.cp_size)
        head, tail = starts + cp_rank * chunks, starts + sizes - (cp_rank + 1) * chunks
        pairs = np.stack([starts, head, head + chunks, starts, tail, tail + chunks], axis=1)
        return pairs.reshape(-1, 3)

    def positions(self, cp_rank: int) -> IntArray:
        """Return the row positions that a rank computes; shape (num_positions / cp_size,)."""
        _, start, stop = self.blocks(cp_rank).T
        return join_ranges(stop - start, starts=start)

    @cached_property
    def restore(self) -> IntArray:
        """
        Index that restores the row from the concatenated rows of all ranks; shape (num_positions,).

        `concatenated[restore]` is the row. `concatenated[restore[is_token]]` leaves padding out.
        """
        return np.argsort(np.concatenate([self.positions(rank) for rank in range(self.cp_size)]))

    def causal_work(self) -> tuple[int, ...]:
        """
        Return the number of query-key pairs that each rank computes, padding included.

        >>> PackedLayout.from_lengths([6], cp_size=2).causal_work()
        (18, 18)
        """
        work = []
        for rank in range(self.cp_size):
            begin, start, stop = self.blocks(rank).T
            work.append(int(((stop - start) * (start + stop + 1 - 2 * begin) // 2).sum()))
        return tuple(work)

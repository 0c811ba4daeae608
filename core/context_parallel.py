"""
Context parallelism: how sequences lie in one packed row, and which rank computes which part of it.

Each sequence is padded on its own and cut into 2 x cp_size chunks; rank r takes chunk r from its
head and chunk r from its tail, so that all ranks have the same causal work. A rank's row is its
chunks of the first sequence, then those of the second, and so on. Targets are rolled before the row
is cut: the token after a chunk's last one is another rank's.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray, Lengths, as_lengths, positive
from packplan.core.packs import count_up


def padded_length(length: int, *, cp_size: int, tp_size: int = 1) -> int:
    """
    Return the tokens of a sequence with its padding.

    Args:
        length: Tokens of the sequence, >= 1.
        cp_size: Ranks that share a row, >= 1.
        tp_size: Ranks that share a layer, >= 1.

    Returns:
        The next multiple of cp_size * 2 * tp_size; of tp_size where a row is not shared.

    >>> padded_length(5, cp_size=2), padded_length(5, cp_size=1)
    (8, 5)
    """
    return cu_seqlens([length], pad_to_multiple_of=_pad_multiple(cp_size, tp_size))[1]


def cu_seqlens(lengths: Lengths, *, pad_to_multiple_of: int = 1) -> list[int]:
    """
    Return where each sequence starts in the packed row, and where the last one ends.

    Args:
        lengths: Tokens of each sequence, >= 1.
        pad_to_multiple_of: What every sequence is padded to a multiple of, >= 1.

    >>> cu_seqlens([8, 5, 7]), cu_seqlens([8, 5, 7], pad_to_multiple_of=4)
    ([0, 8, 13, 20], [0, 8, 16, 24])
    """
    multiple = positive("pad_to_multiple_of", pad_to_multiple_of)
    padded = -(-as_lengths(lengths) // multiple) * multiple
    return [0, *np.cumsum(padded).tolist()]


def chunk_positions(length: int, *, cp_size: int, cp_rank: int) -> list[int]:
    """
    Return the positions of a sequence that a rank computes, ascending: a chunk of its head and a
    chunk of its tail.

    Args:
        length: Tokens of the padded sequence, >= 1.
        cp_size: Ranks that share it, >= 1; one rank has all positions.
        cp_rank: From 0.

    Raises:
        ValueError: The length is no multiple of 2 * cp_size, where more than one rank share it;
            there is no such rank.

    >>> chunk_positions(8, cp_size=2, cp_rank=0), chunk_positions(8, cp_size=2, cp_rank=1)
    ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    chunks: list[int] = PackedLayout([0, length], [0, length], cp_size).positions(cp_rank).tolist()
    return chunks


def _pad_multiple(cp_size: int, tp_size: int) -> int:
    cp_size, tp_size = positive("cp_size", cp_size), positive("tp_size", tp_size)
    return tp_size if cp_size == 1 else cp_size * 2 * tp_size


def _frozen(values: Lengths) -> IntArray:
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array


@attrs.frozen(eq=False)
class PackedLayout:
    """
    Sequences in one packed row, each followed by its own padding, and the row's parts by rank.

    Raises:
        ValueError: The two arrays do not describe one row, a sequence has no token, or more than
            one rank share a row whose sequences they cannot cut.
    """

    cu_seqlens: IntArray = attrs.field(converter=_frozen)
    """
    Where each sequence would start without padding, and the number of true tokens; shape
    (num_sequences + 1,).
    """

    cu_seqlens_padded: IntArray = attrs.field(converter=_frozen)
    """Where each sequence starts, and the row's length; shape (num_sequences + 1,)."""

    cp_size: int = 1
    """Ranks that share the row."""

    def __attrs_post_init__(self) -> None:
        positive("cp_size", self.cp_size)
        true, padded = self.cu_seqlens, self.cu_seqlens_padded
        if true.ndim != 1 or not true.size or true.shape != padded.shape or true[0] or padded[0]:
            message = f"cu_seqlens {true.tolist()} and cu_seqlens_padded {padded.tolist()} do not describe one row"
            raise ValueError(message)
        for number, (length, room) in enumerate(zip(self.lengths.tolist(), np.diff(padded).tolist(), strict=True)):
            if not 1 <= length <= room:
                message = f"sequence {number} has {length} tokens in {room} positions, but 1 to {room} are possible"
                raise ValueError(message)
            if self.cp_size > 1 and room % (2 * self.cp_size):
                message = (
                    f"sequence {number} has {room} positions, but {self.cp_size} ranks share it in {2 * self.cp_size} "
                    f"equal chunks: pad it to a multiple of {2 * self.cp_size}"
                )
                raise ValueError(message)

    @classmethod
    def from_lengths(cls, lengths: Lengths, *, cp_size: int = 1, tp_size: int = 1) -> PackedLayout:
        """
        Lay sequences out, each padded to what `padded_length` says.

        Args:
            lengths: Tokens of each sequence, >= 1.
            cp_size: Ranks that share the row, >= 1.
            tp_size: Ranks that share a layer, >= 1.

        >>> PackedLayout.from_lengths([5, 8, 1, 3], cp_size=2).cu_seqlens_padded.tolist()
        [0, 8, 16, 20, 24]
        """
        multiple = _pad_multiple(cp_size, tp_size)
        return cls(cu_seqlens(lengths), cu_seqlens(lengths, pad_to_multiple_of=multiple), cp_size)

    @property
    def lengths(self) -> IntArray:
        """True tokens of each sequence; shape (num_sequences,)."""
        return np.diff(self.cu_seqlens)

    @property
    def num_positions(self) -> int:
        """Positions of the whole row, padding included; each rank has an equal part of them."""
        return int(self.cu_seqlens_padded[-1])

    @cached_property
    def sequence(self) -> IntArray:
        """
        Number of the sequence that each position of the row belongs to, padding to the one before
        it.
        """
        return np.repeat(np.arange(self.lengths.size), np.diff(self.cu_seqlens_padded))

    @cached_property
    def position_ids(self) -> IntArray:
        """Position of each token in its own sequence, from 0; padding counts on."""
        return np.arange(self.num_positions) - self.cu_seqlens_padded[self.sequence]

    @cached_property
    def is_token(self) -> NDArray[np.bool_]:
        """Whether each position of the row holds a true token."""
        return self.position_ids < self.lengths[self.sequence]

    @cached_property
    def targets(self) -> IntArray:
        """
        Where in the row the token is that each position predicts; -1 for the last of a sequence,
        and for padding.

        >>> PackedLayout([0, 3, 4], [0, 4, 5]).targets.tolist()
        [1, 2, -1, -1, -1]
        """
        has_next = self.position_ids + 1 < self.lengths[self.sequence]
        return np.where(has_next, np.arange(self.num_positions) + 1, -1)

    def blocks(self, cp_rank: int) -> IntArray:
        """
        Return the segments of the row that a rank computes, in the order of its own row.

        Args:
            cp_rank: From 0.

        Returns: Three numbers of each segment: the start of its sequence, its own start, its own
        end; shape
            (num_blocks, 3). A query in it sees the keys from the start of its sequence up to
            itself.
        """
        if not 0 <= cp_rank < self.cp_size:
            message = f"cp_rank is {cp_rank}, but {self.cp_size} ranks share the row"
            raise ValueError(message)
        starts, sizes = self.cu_seqlens_padded[:-1], np.diff(self.cu_seqlens_padded)
        if self.cp_size == 1:
            return np.stack([starts, starts, starts + sizes], axis=1)
        chunks = sizes // (2 * self.cp_size)
        head, tail = starts + cp_rank * chunks, starts + sizes - (cp_rank + 1) * chunks
        pairs = np.stack([starts, head, head + chunks, starts, tail, tail + chunks], axis=1)
        return pairs.reshape(-1, 3)

    def positions(self, cp_rank: int) -> IntArray:
        """
        Return where in the row the positions of a rank's own row are; shape (num_positions /
        cp_size,).
        """
        _, start, stop = self.blocks(cp_rank).T
        return count_up(stop - start, starts=start)

    @cached_property
    def restore(self) -> IntArray:
        """
        What turns the ranks' rows, one after the other, into the row: `concatenated[restore]`;
        shape (num_positions,).

        `concatenated[restore[is_token]]` leaves the padding out.
        """
        return np.argsort(np.concatenate([self.positions(rank) for rank in range(self.cp_size)]))

    def causal_work(self) -> tuple[int, ...]:
        """
        Return the pairs of a query and a key that each rank computes, padding included.

        >>> PackedLayout.from_lengths([6], cp_size=2).causal_work()
        (18, 18)
        """
        work = []
        for rank in range(self.cp_size):
            begin, start, stop = self.blocks(rank).T
            work.append(int(((stop - start) * (start + stop + 1 - 2 * begin) // 2).sum()))
        return tuple(work)

"""
An RL batch -> microbatches of each data-parallel worker, packed, dynamic or plain.

Every `Sharding` keeps these rules:

- Global batches stay separate and in order.
- In a global batch every worker has the same number of microbatches, none of them empty.
- Every sequence is in exactly one microbatch with weight 1.
- Filler is the shortest sequence of the global batch with weight 0.
- No microbatch has more positions than the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import IntArray, Lengths, as_lengths, positive, squares
from packplan.core.packers import pack, with_bin_count
from packplan.core.packs import Packs
from packplan.core.shard.assignment import (
    assign_packs,
    balanced,
    fewer_rounds,
    rotate_to_least_loaded,
    round_up,
    with_filler,
)
from packplan.core.shard.rounds import in_rounds, spread
from packplan.core.work import Meeting, WorkModel, in_units

Mode = Literal["packed", "dynamic", "plain"]

_Number = TypeVar("_Number", np.int64, np.float64)


@attrs.frozen(eq=False)
class ShardBatch:
    """Microbatches of one worker in one global batch."""

    indices: IntArray
    """Sequence of each slot; shape (num_slots,)."""

    weights: IntArray
    """Weight of each slot: 1, or 0 for filler; shape (num_slots,)."""

    offsets: IntArray
    """
    Start of each microbatch in `indices`, and the end of the last; shape (num_microbatches + 1,).
    """

    widths: IntArray
    """
    Positions of the row of a packed microbatch, or of every row of a padded one; shape
    (num_microbatches,).
    """

    @property
    def boundaries(self) -> list[list[int]]:
        """First slot of each microbatch, and the slot after its last."""
        return [[int(start), int(stop)] for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True)]

    @property
    def microbatches(self) -> list[list[int]]:
        """Sequences of each microbatch."""
        return [self.indices[start:stop].tolist() for start, stop in self.boundaries]


@attrs.frozen(eq=False)
class Sharding:
    """
    A batch cut into microbatches of its workers.

    `results[sharding.restore]` brings results of slots, worker after worker, back into the order of
    the batch. `order[restore]` counts up from 0.
    """

    mode: Mode

    num_shards: int
    """Data-parallel workers."""

    num_microbatches: tuple[int, ...]
    """Microbatches of every worker in each global batch."""

    lengths: IntArray
    """Tokens of each sequence; shape (num_sequences,)."""

    slots: Packs
    """Microbatches of worker 0 over all global batches, then those of worker 1, and so on."""

    weights: IntArray
    """Weight of each slot: 1, or 0 for filler; shape (num_slots,)."""

    widths: IntArray
    """
    Positions of the row of a packed microbatch, or of every row of a padded one; shape
    (num_microbatches,).
    """

    positions: IntArray
    """Positions of each microbatch; shape (num_microbatches,)."""

    works: NDArray[np.float64]
    """
    Work of each microbatch, padding included. It is in FLOPs if the model's work was given.
    Otherwise it is the sum of the squares of row widths, or of sequence lengths if packed.
    """

    capacity: int
    """Limit of positions of a microbatch."""

    multiple: int
    """Pad multiple of sequences in a packed row, or of the width of padded rows."""

    @property
    def order(self) -> IntArray:
        """Sequence of each slot, worker after worker; shape (num_slots,)."""
        return self.slots.indices

    @cached_property
    def restore(self) -> IntArray:
        """Slot of each sequence; shape (num_sequences,)."""
        restore = np.empty(self.lengths.size, dtype=np.int64)
        real = np.flatnonzero(self.weights)
        restore[self.order[real]] = real
        return restore

    @property
    def num_filler(self) -> int:
        """Slots of weight 0."""
        return int(self.weights.size - self.lengths.size)

    def by_worker(self, values: NDArray[_Number]) -> NDArray[_Number]:
        """
        Return values of microbatches in shape (num_shards, microbatches of a worker in all global
        batches).
        """
        return values.reshape(self.num_shards, -1)

    def shard(self, rank: int) -> tuple[ShardBatch, ...]:
        """Return the microbatches of worker *rank*, one value for each global batch."""
        ends = np.cumsum(self.num_microbatches) + range(self.num_shards)[rank] * sum(self.num_microbatches)
        return tuple(self._part(int(end) - num, int(end)) for num, end in zip(self.num_microbatches, ends, strict=True))

    def _part(self, start: int, stop: int) -> ShardBatch:
        offsets = self.slots.offsets[start : stop + 1]
        held = slice(offsets[0], offsets[-1])
        return ShardBatch(self.slots.indices[held], self.weights[held], offsets - offsets[0], self.widths[start:stop])

    def __len__(self) -> int:
        return self.num_shards

    def __iter__(self) -> Iterator[tuple[ShardBatch, ...]]:
        return map(self.shard, range(self.num_shards))


def shard_packed(
    lengths: Lengths,
    *,
    shards: int,
    batch_size: int,
    max_tokens_per_microbatch: int,
    sequence_length_pad_multiple: int = 1,
    algorithm: str = "modified_first_fit_decreasing",
    assignment: Literal["balanced", "round_robin"] = "balanced",
    microbatch_order: Literal["packer", "largest_first"] = "packer",
    microbatch_multiple: int = 1,
    when_short: Literal["fill", "error"] = "fill",
    seed: int = 0,
    work: WorkModel | None = None,
    media_work: Any = None,
    meeting: Meeting = "microbatch",
) -> Sharding:
    """
    Cut a batch into microbatches that become one packed row each.

    Args:
        lengths: Tokens of each sequence of the batch, >= 1; at least one sequence.
        shards: Data-parallel workers, >= 1.
        batch_size: Sequences of a global batch, over all workers; the last one may have fewer.
        max_tokens_per_microbatch: Tokens of a row, padding included.
        sequence_length_pad_multiple: Each sequence is padded to a multiple of it.
        algorithm: A name in `core.packers.ALGORITHMS`. It decides the number of microbatches.
        assignment: `balanced` assigns sequences so that workers wait for each other as little as
            possible. `round_robin` assigns the algorithm's packs in turn.
        microbatch_order: Order of a worker's microbatches in a global batch. `packer` orders by
            first sequence. `largest_first` orders by descending tokens, so that the peak of memory
            comes first.
        microbatch_multiple: Divisor of the microbatches of a worker in a global batch, for virtual
            pipeline stages.
        when_short: Whether to fill up with weight 0 or raise if there are fewer sequences than
            microbatches.
        seed: Seed of random algorithms.
        work: Work of the model; None counts the square of a sequence's length.
        media_work: Work of each sequence's images and videos, in the same unit; None: there are
            none.
        meeting: Point where workers wait for each other. `microbatch`, as under FSDP, equalises
            microbatches that run together. `step`, the end of a global batch, equalises the sums of
            workers, and then microbatches as far as possible.

    Raises:
        ArgumentError: A sequence does not fit a row, there is no sequence, or there are too few and
            `when_short` is `error`.

    >>> lengths = [900, 850, 1000, 950]
    >>> sharding = shard_packed(lengths, shards=2, batch_size=4, max_tokens_per_microbatch=1024)
    >>> [batch.microbatches for worker in sharding for batch in worker]
    [[[1], [2]], [[0], [3]]]
    """
    capacity = positive("max_tokens_per_microbatch", max_tokens_per_microbatch)
    shards = positive("shards", shards)
    rounds_of = shards * positive("microbatch_multiple", microbatch_multiple)
    _one_of("assignment", assignment, ("balanced", "round_robin"))
    _one_of("microbatch_order", microbatch_order, ("packer", "largest_first"))
    _one_of("meeting", meeting, get_args(Meeting))
    array, padded = _padded(lengths, sequence_length_pad_multiple, capacity)
    balance = assignment == "balanced"
    # At least 1, so that a microbatch with sequences is never taken for an empty one.
    units = np.maximum(in_units(_works(padded, work) + _media(media_work, array.size)), 1)
    done = np.zeros(shards, dtype=np.int64)
    parts = []
    for batch in _global_batches(array.size, batch_size):
        costs = padded[batch.start : batch.stop]
        packs = pack(costs, capacity=capacity, algorithm=algorithm, seed=seed)
        if balance:
            packs = fewer_rounds(packs, costs, capacity=capacity, rounds_of=rounds_of)
        num = round_up(len(packs), rounds_of)
        items = _filled(costs, num, when_short)
        workers = _Workers(
            shards, num // shards, capacity, meeting if balance else None, microbatch_order == "largest_first"
        )
        labels, done = workers.cut(packs, items, costs[items], units[batch.start : batch.stop][items], done)
        parts.append(_Part(items + batch.start, labels, num // shards))
    return _sharding(
        "packed", array, padded, parts, shards=shards, capacity=capacity, multiple=int(sequence_length_pad_multiple),
        work=work, media_work=media_work,
    )  # fmt: skip


def shard_dynamic(
    lengths: Lengths,
    *,
    shards: int,
    batch_size: int,
    max_tokens_per_microbatch: int,
    sequence_length_round: int = 1,
    when_short: Literal["fill", "error"] = "fill",
    work: WorkModel | None = None,
    media_work: Any = None,
) -> Sharding:
    """
    Cut a batch into microbatches of sequences of similar length, padded to one width.

    Sequences of a global batch are sorted by length and assigned to the workers one by one, so that
    all workers share the boundaries and widths of their microbatches. A width is the longest
    sequence of any worker, rounded up.

    Args:
        lengths: Tokens of each sequence of the batch, >= 1; at least one sequence.
        shards: Data-parallel workers, >= 1.
        batch_size: Sequences of a global batch, over all workers; the last one may have fewer.
        max_tokens_per_microbatch: Limit of sequences times width.
        sequence_length_round: Widths are multiples of it.
        when_short: Whether to fill up with weight 0 or raise if workers do not divide a global
            batch.
        work: Work of the model; None counts the square of a row's width.
        media_work: Work of each sequence's images and videos, in the same unit; None: there are
            none.

    Raises:
        ArgumentError: A sequence alone is wider than the budget, there is no sequence, or the
            workers do not divide them and `when_short` is `error`.

    >>> sharding = shard_dynamic([2, 8, 4, 16, 28, 32, 2, 32], shards=2, batch_size=8,
    ...     max_tokens_per_microbatch=32, sequence_length_round=4)
    >>> [(batch.boundaries, batch.widths.tolist()) for worker in sharding for batch in worker]
    [([[0, 2], [2, 3], [3, 4]], [8, 28, 32]), ([[0, 2], [2, 3], [3, 4]], [8, 28, 32])]
    """
    capacity = positive("max_tokens_per_microbatch", max_tokens_per_microbatch)
    shards = positive("shards", shards)
    array, padded = _padded(lengths, sequence_length_round, capacity)
    parts = []
    for batch in _global_batches(array.size, batch_size):
        costs = padded[batch.start : batch.stop]
        items = _filled(costs, round_up(costs.size, shards), when_short)
        ascending = items[np.argsort(array[batch.start : batch.stop][items], kind="stable")]
        # Microbatch of each row. A row is as wide as the longest sequence of any worker.
        rows = costs[ascending[shards - 1 :: shards]]
        numbers = _numbers(rows.tolist(), capacity)
        widths = rows[np.flatnonzero(np.diff(numbers, append=numbers[-1] + 1))]
        labels = np.tile(np.arange(shards) * widths.size, rows.size) + np.repeat(numbers, shards)
        parts.append(_Part(ascending + batch.start, labels, widths.size, widths))
    return _sharding(
        "dynamic", array, padded, parts, shards=shards, capacity=capacity, multiple=int(sequence_length_round),
        work=work, media_work=media_work,
    )  # fmt: skip


def shard_plain(
    lengths: Lengths,
    *,
    shards: int,
    batch_size: int,
    micro_batch_size: int | None = None,
    sequence_length_round: int = 1,
    allow_uneven: bool = False,
    work: WorkModel | None = None,
    media_work: Any = None,
) -> Sharding:
    """
    Cut a batch into equal ranges of neighbours, padded to the longest sequence of the global batch.

    Args:
        lengths: Tokens of each sequence of the batch, >= 1; at least one sequence.
        shards: Data-parallel workers, >= 1.
        batch_size: Sequences of a global batch, over all workers; the last one may have fewer.
        micro_batch_size: Limit of sequences of a microbatch. None takes all of a worker in a global
            batch.
        sequence_length_round: Widths are multiples of it.
        allow_uneven: Whether some workers may have one sequence more if workers do not divide a
            global batch. A worker without one gets the shortest with weight 0.
        work: Work of the model; None counts the square of a row's width.
        media_work: Work of each sequence's images and videos, in the same unit; None: there are
            none.

    Raises:
        ArgumentError: The workers do not divide a global batch, and that is not allowed,
            or there is no sequence.

    >>> sharding = shard_plain([5, 5, 5, 5], shards=2, batch_size=4)
    >>> [batch.microbatches for worker in sharding for batch in worker]
    [[[0, 1]], [[2, 3]]]
    """
    shards = positive("shards", shards)
    array, padded = _padded(lengths, sequence_length_round, None)
    parts = []
    for batch in _global_batches(array.size, batch_size):
        costs = padded[batch.start : batch.stop]
        if costs.size % shards and not allow_uneven:
            uneven, workers = counted(costs.size, "sequence"), counted(shards, "worker")
            fact = f"{uneven} of a batch cannot be divided evenly over {workers}"
            raise ArgumentError("uneven_shards", fact, {"num_sequences": costs.size, "num_shards": shards})
        most = -(-costs.size // shards)
        num = -(-most // positive("micro_batch_size", most if micro_batch_size is None else micro_batch_size))
        items, labels = [], []
        for rank, held in enumerate(np.array_split(np.arange(costs.size), shards)):
            # A worker with one sequence less may lack a microbatch that others have.
            filler = np.full(max(0, num - held.size), costs.argmin())
            items.append(np.concatenate([held, filler]))
            labels.append(rank * num + np.arange(items[-1].size) * num // items[-1].size)
        widths = np.full(num, costs.max())
        parts.append(_Part(np.concatenate(items) + batch.start, np.concatenate(labels), num, widths))
    return _sharding(
        "plain", array, padded, parts, shards=shards, capacity=None, multiple=int(sequence_length_round),
        work=work, media_work=media_work,
    )  # fmt: skip


@attrs.frozen(eq=False)
class _Part:
    """A global batch, cut into microbatches."""

    sequences: IntArray
    """Sequences of the batch, in order inside each microbatch; shape (num_slots,)."""

    labels: IntArray
    """Microbatch of each slot, the first `num` those of worker 0; shape (num_slots,)."""

    num: int
    """Microbatches of every worker."""

    widths: IntArray | None = None
    """Positions of each row of a padded microbatch, the same for all workers; shape (num,)."""


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        message = f"{name} is {value!r}, but has to be one of {', '.join(choices)}"
        raise ValueError(message)


def _padded(lengths: Lengths, multiple: int, capacity: int | None) -> tuple[IntArray, IntArray]:
    """Return lengths, and lengths rounded up; ArgumentError if one is over *capacity* then."""
    array = as_lengths(lengths)
    multiple = positive("the pad multiple", multiple)
    padded = -(-array // multiple) * multiple
    if capacity is not None and array.size and int(padded.max()) > capacity:
        over = np.flatnonzero(padded > capacity)
        index, widest = int(over[0]), int(padded.max())
        length, width = int(array[index]), int(padded[index])
        rounded = f", {width:,} when padded," if width != length else ""
        others = f"; {over.size:,} sequences are too wide, the widest {widest:,}" if over.size > 1 else ""
        fact = (
            f"sequence {index} has {counted(length, 'token')}{rounded} but a microbatch holds {capacity:,} "
            f"(max_tokens_per_microbatch){others}"
        )
        raise ArgumentError("over_budget", fact, {"index": index, "num_over": over.size, "widest": widest})
    return array, padded


def _works(widths: IntArray, work: WorkModel | None) -> NDArray[np.float64]:
    """Return the work of rows of one sequence each, padding included."""
    return squares(widths) if work is None else work.sample_flops(widths)


def _media(works: Any, num: int) -> NDArray[np.float64]:
    """
    Return the work of each sequence's media; ArgumentError if these are no numbers of at least 0,
    one for each sequence.
    """
    found = np.zeros(num) if works is None else np.asarray(works, dtype=np.float64)
    if found.shape != (num,) or not (np.isfinite(found) & (found >= 0)).all():
        fact = f"media_work has the shape {found.shape}, but is a number of at least 0 for each of {num:,} sequences"
        raise ArgumentError("batch", fact)
    return found


def _global_batches(num: int, batch_size: int) -> Iterator[range]:
    batch_size = positive("batch_size", batch_size)
    if not num:
        raise ArgumentError("batch", "the batch has no sequence, so there is nothing to cut")
    return (range(start, min(start + batch_size, num)) for start in range(0, num, batch_size))


def _filled(costs: IntArray, wanted: int, when_short: Literal["fill", "error"]) -> IntArray:
    """
    Return the sequences of a global batch, filled with the shortest up to *wanted*; shape (>=
    wanted,).
    """
    short = max(0, wanted - costs.size)
    _one_of("when_short", when_short, ("fill", "error"))
    if short and when_short == "error":
        fact = (
            f"{counted(costs.size, 'sequence')} cannot give {counted(wanted, 'microbatch')} or workers one each: "
            "fill up with weight 0 (when_short='fill')"
        )
        raise ArgumentError("batch", fact)
    return np.concatenate([np.arange(costs.size), np.full(short, costs.argmin())])


@attrs.frozen
class _Workers:
    """Workers of a global batch, and the point where they wait for each other."""

    shards: int

    rounds: int
    """Microbatches of each worker."""

    capacity: int
    """Positions of a microbatch."""

    meeting: Meeting | None
    """Point where workers wait for each other; None if packs are assigned in turn."""

    by_size: bool
    """
    Whether the microbatches of a worker are ordered by descending size. Otherwise packs in turn are
    ordered by first sequence, and rounds of similar work by the first sequence of a round.
    """

    def cut(
        self, packs: Packs, items: IntArray, costs: IntArray, works: IntArray, done: IntArray
    ) -> tuple[IntArray, IntArray]:
        """
        Return the microbatch of each slot, worker by worker, and the work that workers have done.

        Args:
            packs: Microbatches of the algorithm, taken if slots do not fit otherwise.
            items: Sequence of each slot, at least as many slots as microbatches.
            costs: Positions of each slot.
            works: Work of each slot, in whole units.
            done: Work of each worker in earlier global batches; shape (num_workers,).
        """
        if self.meeting is None:
            labels = assign_packs(self._whole(packs, costs), works, self.shards, balance=False)
        else:
            labels = self._balanced(packs, costs, works, self.meeting)
            labels, done = rotate_to_least_loaded(labels, works, done, self.rounds)
        return self._ordered(labels, items, costs, works), done

    def _balanced(self, packs: Packs, costs: IntArray, works: IntArray, meeting: Meeting) -> IntArray:
        """Return the microbatch of each slot, so that workers wait as little as possible."""
        rounds = spread(costs, works, shards=self.shards, rounds=self.rounds, capacity=self.capacity)
        if rounds is not None and meeting == "microbatch":
            return in_rounds(rounds, costs, works, shards=self.shards, capacity=self.capacity)
        by_worker = balanced(costs, works, shards=self.shards, per_shard=self.rounds, capacity=self.capacity)
        if by_worker is None:
            by_worker = assign_packs(self._whole(packs, costs), works, self.shards, balance=True)
        start = by_worker if rounds is None else rounds
        even = in_rounds(start, costs, works, shards=self.shards, capacity=self.capacity)
        # Even microbatches are taken if they add at most a thousandth to the busiest worker.
        least = self._busiest(by_worker, works)
        level_enough = self._busiest(even, works) <= least + least // 1000
        return even if meeting == "microbatch" or level_enough else by_worker

    def _whole(self, packs: Packs, costs: IntArray) -> Packs:
        """Return the packs with filler, split to the number of microbatches."""
        return with_bin_count(with_filler(packs, costs.size), costs, minimum=self.shards * self.rounds, multiple=1)

    def _busiest(self, labels: IntArray, works: IntArray) -> int:
        """Return the work of the busiest worker."""
        sums = np.zeros(self.shards, dtype=np.int64)
        np.add.at(sums, labels // self.rounds, works)
        return int(sums.max())

    def _ordered(self, labels: IntArray, items: IntArray, costs: IntArray, works: IntArray) -> IntArray:
        """Renumber the microbatches of each worker; return the label of each slot."""
        num = self.shards * self.rounds
        first = np.full(num, int(items.max()) + 1)
        np.minimum.at(first, labels, items)
        sizes = np.zeros(num, dtype=np.int64)
        if self.by_size:
            np.add.at(sizes, labels, costs)
        elif self.meeting is not None:
            np.add.at(sizes, labels, works)
        order = np.lexsort((first, -sizes, np.arange(num) // self.rounds))
        if self.meeting is not None and not self.by_size:
            # Round k has every worker's k-th heaviest.
            rounds = order.reshape(self.shards, -1)
            order = rounds[:, np.argsort(first[rounds].min(axis=0), kind="stable")].ravel()
        return np.argsort(order)[labels]


def _numbers(rows: Sequence[int], capacity: int) -> IntArray:
    """
    Return the microbatch of each row. A microbatch takes the rows that fit at the width of the
    last.
    """
    numbers = []
    number = start = 0
    for row, width in enumerate(rows):
        if (row + 1 - start) * width > capacity:
            number, start = number + 1, row
        numbers.append(number)
    return np.array(numbers)


def _sharding(
    mode: Mode,
    lengths: IntArray,
    padded: IntArray,
    parts: Sequence[_Part],
    *,
    shards: int,
    capacity: int | None,
    multiple: int,
    work: WorkModel | None,
    media_work: Any,
) -> Sharding:
    """Join the global batches, worker by worker."""
    total = sum(part.num for part in parts)
    first = np.cumsum([0, *(part.num for part in parts[:-1])])
    places = np.concatenate(
        [
            part.labels // part.num * total + start + part.labels % part.num
            for part, start in zip(parts, first, strict=True)
        ]
    )
    sequences = np.concatenate([part.sequences for part in parts])
    # Packed rows are in the order of the batch; padded ones keep theirs.
    order = np.lexsort((sequences, places)) if mode == "packed" else np.argsort(places, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(places))])
    slots = Packs(offsets, sequences[order])
    weights = np.zeros(slots.num_samples, dtype=np.int64)
    weights[np.unique(slots.indices, return_index=True)[1]] = 1
    widths = slots.loads(padded)
    media = np.add.reduceat(_media(media_work, lengths.size)[slots.indices], slots.offsets[:-1])
    positions, works = widths, np.add.reduceat(_works(padded, work)[slots.indices], slots.offsets[:-1])
    if mode != "packed":
        widths = np.tile(np.concatenate([part.widths for part in parts if part.widths is not None]), shards)
        positions, works = slots.sizes() * widths, slots.sizes() * _works(widths, work)
    return Sharding(
        mode=mode,
        num_shards=shards,
        num_microbatches=tuple(part.num for part in parts),
        lengths=lengths,
        slots=slots,
        weights=weights,
        widths=widths,
        positions=positions,
        works=works + media,
        capacity=int(positions.max()) if capacity is None else capacity,
        multiple=multiple,
    )

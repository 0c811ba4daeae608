"""
Microbatches that become one packed row each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, get_args

import attrs
import numpy as np

from packplan.core.errors import ArgumentError, counted
from packplan.core.lengths import MOST_RANKS, IntArray, Lengths, whole_number
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
from packplan.core.shard.inputs import (
    BatchSize,
    FloatArray,
    SequenceWorks,
    WhenLong,
    WhenShort,
    Work,
    assign_groups,
    checked_groups,
    filled,
    global_batches,
    padded_lengths,
    require_choice,
)
from packplan.core.shard.rounds import in_rounds, spread
from packplan.core.shard.sharding import Part, Sharding, join
from packplan.core.work import Meeting, in_units


def cut_evenly(
    packs: Packs,
    costs: IntArray,
    works: IntArray,
    *,
    shards: int,
    rounds: int,
    capacity: int,
    meeting: Meeting | None,
) -> IntArray:
    """
    Return the microbatch of each item, worker by worker.

    Args:
        packs: Microbatches of the first items, taken if items do not fit otherwise.
        costs: Positions of each item, at least as many items as microbatches.
        works: Work of each item, in whole units.
        shards: Workers.
        rounds: Microbatches of each worker.
        capacity: Positions of a microbatch.
        meeting: Point where workers wait for each other; None assigns packs in turn.
    """
    if meeting is None:
        return assign_packs(_whole(packs, costs, shards * rounds), works, shards, balance=False)
    even = None
    by_round = spread(costs, works, shards=shards, rounds=rounds, capacity=capacity)
    if by_round is not None:
        even = in_rounds(by_round, costs, works, shards=shards, capacity=capacity)
        # No cut has a busiest worker below the mean.
        mean = -(-int(works.sum()) // shards)
        if meeting == "microbatch" or _busiest(even, works, shards) <= _nearly(mean):
            return even
    by_worker = balanced(costs, works, shards=shards, per_shard=rounds, capacity=capacity)
    if by_worker is None:
        by_worker = assign_packs(_whole(packs, costs, shards * rounds), works, shards, balance=True)
    if even is None:
        even = in_rounds(by_worker, costs, works, shards=shards, capacity=capacity)
    level_enough = _busiest(even, works, shards) <= _nearly(_busiest(by_worker, works, shards))
    return even if meeting == "microbatch" or level_enough else by_worker


def _whole(packs: Packs, costs: IntArray, num: int) -> Packs:
    """Return the packs with filler, split to *num* microbatches."""
    return with_bin_count(with_filler(packs, costs.size), costs, minimum=num, multiple=1)


def _busiest(labels: IntArray, works: IntArray, shards: int) -> int:
    """Return the work of the busiest worker."""
    rounds = (int(labels.max()) + 1) // shards
    sums = np.zeros(shards, dtype=np.int64)
    np.add.at(sums, labels // rounds, works)
    return int(sums.max())


def _nearly(work: int) -> int:
    """Return the work that counts as equal: even microbatches may add a thousandth."""
    return work + work // 1000


_MOST_MICROBATCHES = 10_000_000
"""Microbatches of a global batch that are asked for, at most: arrays have a place for each."""

RowWidth = Literal["own", "longest", "budget"]
"""
Positions of a packed row: those of its sequences, of the longest row of its global batch, or of the
budget.
"""


def shard_packed(
    lengths: Lengths,
    *,
    shards: int,
    batch_size: BatchSize,
    max_tokens_per_microbatch: int,
    sequence_length_pad_multiple: int = 1,
    algorithm: str = "modified_first_fit_decreasing",
    assignment: Literal["balanced", "round_robin"] = "balanced",
    microbatch_order: Literal["packer", "largest_first"] = "packer",
    microbatch_multiple: int = 1,
    min_microbatches: int = 1,
    row_width: RowWidth = "own",
    when_short: WhenShort = "fill",
    when_long: WhenLong = "error",
    seed: int = 0,
    work: Work | None = None,
    media_work: Sequence[float] | FloatArray | None = None,
    meeting: Meeting = "microbatch",
    groups: Lengths | None = None,
) -> Sharding:
    """
    Cut a batch into microbatches that become one packed row each.

    Args:
        lengths: Tokens of each sequence of the batch, >= 1; at least one sequence.
        shards: Data-parallel workers, >= 1.
        batch_size: Sequences of a global batch, over all workers; the last one may have fewer. A
            list gives the size of each global batch.
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
        min_microbatches: Fewest microbatches of a worker in a global batch, for pipeline stages.
        row_width: Positions that rows are padded to, since stages of a pipeline exchange buffers of
            one shape: those of the `longest` row of the global batch, or the whole `budget`.
        when_short: Whether to fill up with weight 0 or raise if there are fewer sequences than
            microbatches.
        when_long: Whether a sequence over the budget is an error, or the one sequence of its row
            (`alone`).
        seed: Seed of random algorithms.
        work: Work of the model; None counts the square of a sequence's length. Or the work of each
            sequence, in any unit.
        media_work: Work of each sequence's images and videos, in the same unit, beside *work*.
        meeting: Point where workers wait for each other. `microbatch`, as under FSDP, equalises
            microbatches that run together. `step`, the end of a global batch, equalises the sums of
            workers, and then microbatches as far as possible.
        groups: Label of each sequence, a whole number. Sequences of one label, such as the answers
            to one prompt, are on one worker.

    Raises:
        ArgumentError: A sequence does not fit a row and `when_long` is `error`, there is no
            sequence, there are too few and `when_short` is `error`, sizes, works or groups do not
            match them, or two options exclude each other.

    >>> lengths = [900, 850, 1000, 950]
    >>> sharding = shard_packed(lengths, shards=2, batch_size=4, max_tokens_per_microbatch=1024)
    >>> [batch.microbatches for worker in sharding for batch in worker]
    [[[1], [2]], [[0], [3]]]
    """
    capacity = whole_number("max_tokens_per_microbatch", max_tokens_per_microbatch)
    shards = whole_number("shards", shards, most=MOST_RANKS)
    multiple = whole_number("microbatch_multiple", microbatch_multiple)
    least = round_up(whole_number("min_microbatches", min_microbatches), multiple)
    whole_number("the number of microbatches of all workers", shards * least, most=_MOST_MICROBATCHES)
    require_choice("assignment", assignment, ("balanced", "round_robin"))
    require_choice("microbatch_order", microbatch_order, ("packer", "largest_first"))
    require_choice("meeting", meeting, get_args(Meeting))
    require_choice("row_width", row_width, get_args(RowWidth))
    array, padded = padded_lengths(lengths, sequence_length_pad_multiple, capacity, when_long)
    balance = assignment == "balanced"
    if groups is not None and not balance:
        raise ArgumentError("batch", "groups stay on one worker, but assignment='round_robin' assigns packs in turn")
    if row_width == "budget":
        _require_rows_of_budget(capacity, int(sequence_length_pad_multiple), when_long)
    batches = global_batches(array.size, batch_size)
    labels_of = None if groups is None else checked_groups(groups, batches)
    # A sequence over the budget counts as a full row, so that it is alone.
    costs_of = np.minimum(padded, capacity)
    works_of = SequenceWorks.from_arguments(work, media_work, array.size)
    # At least 1, so that a microbatch with sequences is never taken for an empty one.
    units = np.maximum(in_units(works_of.of_rows(padded) + works_of.own), 1)
    done = np.zeros(shards, dtype=np.int64)
    workers = _Workers(
        shards, capacity, partial(pack, capacity=capacity, algorithm=algorithm, seed=seed), least, multiple,
        meeting if balance else None, microbatch_order == "largest_first", when_short,
    )  # fmt: skip
    parts = []
    for batch in batches:
        own = slice(batch.start, batch.stop)
        costs, works = costs_of[own], units[own]
        if labels_of is None:
            items, labels, rounds = workers.cut(costs, works)
        else:
            items, labels, rounds = workers.cut_groups(labels_of[own], costs, works)
        if balance:
            labels, done = rotate_to_least_loaded(labels, works[items], done, rounds)
        widest = {"own": 0, "longest": int(np.bincount(labels, padded[own][items]).max()), "budget": capacity}
        labels = workers.ordered(labels, items, padded[own][items], works[items], rounds)
        parts.append(Part(items + batch.start, labels, rounds, widest[row_width]))
    return join(
        "packed", array, padded, parts, shards=shards, capacity=capacity, multiple=int(sequence_length_pad_multiple),
        work=works_of,
    )  # fmt: skip


def _require_rows_of_budget(capacity: int, pad_multiple: int, when_long: WhenLong) -> None:
    """Require that every row can have the budget's positions."""
    if when_long == "alone":
        raise ArgumentError("batch", "row_width='budget' and when_long='alone' exclude each other: choose one")
    if capacity % pad_multiple:
        fact = f"rows of {capacity:,} positions (row_width='budget') do not end at a multiple of {pad_multiple:,}"
        raise ArgumentError("batch", f"{fact} (sequence_length_pad_multiple): choose a multiple as the budget")


@attrs.frozen
class _Workers:
    """Workers of a global batch, and how their microbatches are made."""

    shards: int

    capacity: int
    """Positions of a microbatch."""

    pack: Callable[[IntArray], Packs]

    least: int
    """Fewest microbatches of each worker; a multiple of `multiple`."""

    multiple: int
    """Divisor of the microbatches of each worker."""

    meeting: Meeting | None
    """Point where workers wait for each other; None if packs are assigned in turn."""

    by_size: bool
    """
    Whether the microbatches of a worker are ordered by descending size. Otherwise packs in turn are
    ordered by first sequence, and rounds of similar work by the first sequence of a round.
    """

    when_short: WhenShort

    def cut(self, costs: IntArray, works: IntArray) -> tuple[IntArray, IntArray, int]:
        """
        Return the sequence and the microbatch of each slot, and the microbatches of each worker.

        Args:
            costs: Positions of each sequence.
            works: Work of each sequence, in whole units.
        """
        rounds_of = self.shards * self.multiple
        packs = self.pack(costs)
        if self.meeting is not None:
            packs = fewer_rounds(packs, costs, capacity=self.capacity, rounds_of=rounds_of)
        rounds = max(self.least, round_up(len(packs), rounds_of) // self.shards)
        items = filled(costs, self.shards * rounds, self.when_short)
        labels = cut_evenly(
            packs, costs[items], works[items],
            shards=self.shards, rounds=rounds, capacity=self.capacity, meeting=self.meeting,
        )  # fmt: skip
        return items, labels, rounds

    def cut_groups(self, groups: IntArray, costs: IntArray, works: IntArray) -> tuple[IntArray, IntArray, int]:
        """
        Return the same as `cut`, with the sequences of each group on one worker.

        Args:
            groups: Label of each sequence.
            costs: Positions of each sequence.
            works: Work of each sequence, in whole units.
        """
        # Groups of equal work are preferred, unless groups of equal positions need fewer rounds.
        choices = []
        for values in (works, costs):
            held = assign_groups(groups, values, self.shards)
            packs = [self.pack(costs[items]) for items in held]
            choices.append((max(map(len, packs)), held, packs))
        needed, held, packs = min(choices, key=lambda choice: choice[0])
        rounds = max(self.least, round_up(needed, self.multiple))
        short = max(rounds - min(items.size for items in held), 0)
        if short and self.when_short == "error":
            fact = f"the groups of a worker have {counted(short, 'sequence')} fewer than its {rounds:,} microbatches"
            raise ArgumentError("batch", f"{fact}: fill up with weight 0 (when_short='fill')")
        filler = [np.full(max(rounds - own.size, 0), costs.argmin()) for own in held]
        labels = [
            worker * rounds
            + cut_evenly(
                packs[worker], costs[items], works[items],
                shards=1, rounds=rounds, capacity=self.capacity, meeting=self.meeting,
            )
            for worker, items in enumerate(map(np.concatenate, zip(held, filler, strict=True)))
        ]  # fmt: skip
        real, added = zip(*(np.split(of, [own.size]) for of, own in zip(labels, held, strict=True)), strict=True)
        return np.concatenate([*held, *filler]), np.concatenate([*real, *added]), rounds

    def ordered(self, labels: IntArray, items: IntArray, sizes: IntArray, works: IntArray, rounds: int) -> IntArray:
        """
        Renumber the microbatches of each worker; return the label of each slot.

        Args:
            labels: Microbatch of each slot, worker by worker.
            items: Sequence of each slot.
            sizes: Positions of each slot.
            works: Work of each slot, in whole units.
            rounds: Microbatches of each worker.
        """
        num = self.shards * rounds
        first = np.full(num, int(items.max()) + 1)
        np.minimum.at(first, labels, items)
        loads = np.zeros(num, dtype=np.int64)
        if self.by_size:
            np.add.at(loads, labels, sizes)
        elif self.meeting is not None:
            np.add.at(loads, labels, works)
        order = np.lexsort((first, -loads, np.arange(num) // rounds))
        if self.meeting is not None and not self.by_size:
            # Round k has every worker's k-th heaviest.
            by_round = order.reshape(self.shards, -1)
            order = by_round[:, np.argsort(first[by_round].min(axis=0), kind="stable")].ravel()
        return np.argsort(order)[labels]

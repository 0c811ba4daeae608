"""
Packs of rows: a torch data set (`RowsOfPacks`), a collator (`PackInputs`), and a loader.

Item k of the data set is pack k. `PackInputs` makes a padded batch of a pack's samples, which a
model with `packplan.hf.unpad` computes without padding. `flatten` joins samples into one row, in
which positions start again with every sample. `PackLoader` is the data loader of all trainers that
train packs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any

import attrs
import numpy as np
import torch
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader, Dataset

from packplan.adapters.loaders.rows import (
    ATTENTION,
    LABELS,
    MASKS,
    POSITIONS,
    TOKENS,
    UNKNOWN,
    Collate,
    Row,
    RowFacts,
    RowSource,
    join_media,
    pad_rows,
    read_row,
    refuse_other_lengths,
    require_collated,
    require_supervised_rows,
    sample_lengths,
)
from packplan.adapters.processes import hold_ctrl_c
from packplan.core.batch import IGNORED_LABEL
from packplan.core.errors import ArgumentError, MismatchError, PackplanError, counted
from packplan.core.surface import Plan

PACK = "packplan_pack"
"""Key under which a batch has its pack index, or a list of its pack indices."""


NORMALISER = "loss_normaliser"
"""Key under which a batch of `packplan sft` has the sum of its tokens' loss weights."""


class PackOfRows(list[Row]):
    """
    Rows of one pack; every data set of packs has items of this type.

    Attributes:
        pack: Pack index in the plan.
        lengths: Index of each row -> planned length; empty if the lengths were compared before.
    """

    def __init__(self, rows: Iterable[Row], pack: int, lengths: Mapping[int, int] | None = None) -> None:
        super().__init__(rows)
        self.pack, self.lengths = pack, lengths or {}


class RowsOfPacks(Dataset[PackOfRows]):
    """Data set of packs: item k has the rows of pack k."""

    facts: RowFacts | None = None
    """
    Facts of all rows, if the rows have been read; a row that is served later has to match its
    digest here.
    """

    def __init__(self, rows: Any, plan: Plan, *, collate: Collate | None = None) -> None:
        """
        Store rows, and the plan that decides their packs.

        Args:
            rows: Rows by index: a list, a `datasets.Dataset`, a torch data set or a `RowSource`.
            plan: Plan that was made from the lengths of the rows.
            collate: Collator that turns rows into padded batches; None if rows are tokenized.

        Raises:
            ArgumentError: *plan* is not a `Plan` or has another number of samples, or rows cannot
                be read by index.
        """
        if not isinstance(plan, Plan):
            kind = type(plan).__name__
            fact = f"RowsOfPacks takes a Plan, not a {kind}: pass the result of packplan.plan(lengths, packing_length)"
            raise ArgumentError("host", fact, {"plan": kind})
        self.source = rows if isinstance(rows, RowSource) else RowSource(rows, collate)
        if (num := len(self.source.rows)) != plan.raw.num_samples:
            samples, found = counted(plan.raw.num_samples, "sample"), counted(num, "row")
            fact = f"the plan has {samples}, but the data set has {found}: plan the lengths of these rows"
            raise ArgumentError("host", fact, {"planned": plan.raw.num_samples, "rows": num})
        self.packs, self.lengths = plan.packs, plan.lengths

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, pack: int) -> PackOfRows:
        """
        Return the rows of pack *pack*, read by `read_row`, or unchanged if there is a collator.

        Raises:
            ArgumentError: A row is padded or is not one sample.
            StaleError: The length of a row differs from its planned length, or the row has changed
                since it was first read.
        """
        planned = {int(index): int(self.lengths[index]) for index in self.packs[pack]}
        served = PackOfRows(self.source.fetch([*planned]), pack, planned)
        if self.source.collate is None:
            served[:] = map(read_row, served, planned)
            refuse_other_lengths(planned, [row[TOKENS].size for row in served])
        if self.facts is not None:
            self.facts.refuse_other_rows([*planned], self.source.digests([*planned], served))
        return served

    def inspect(self, *, num_workers: int = 0) -> RowFacts:
        """
        Read all rows once, and return their digests, lengths and numbers of supervised tokens.

        Args:
            num_workers: Number of processes that read rows; useful if rows are computed when they
                are read.

        Raises:
            ArgumentError: A row is padded or is not one sample, or no row has a supervised token.
            StaleError: The length of a row differs from its planned length.
        """
        self.take_facts(facts := self.source.read_facts(num_workers=num_workers))
        require_supervised_rows(facts.num_supervised)
        return facts

    def take_facts(self, facts: RowFacts) -> None:
        """
        Store *facts*, with which rows are compared when they are served; StaleError if a length
        differs from the plan.
        """
        for index in np.flatnonzero((facts.lengths != self.lengths) & (facts.lengths != UNKNOWN))[:1].tolist():
            refuse_other_lengths({index: int(self.lengths[index])}, [int(facts.lengths[index])])
        rows = facts.rows.copy()
        rows["length"] = self.lengths  # also for rows whose files were not decoded
        self.facts = RowFacts(rows)


@attrs.frozen(eq=False)
class PackInputs:
    """
    Collator that turns one pack into a padded batch of its samples.

    >>> rows = [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}]
    >>> batch = PackInputs()([PackOfRows(rows, 0, {0: 2, 1: 3})])
    >>> batch["labels"].tolist()
    [[-100, 6, -100], [-100, 8, 9]]
    """

    collate: Collate = pad_rows
    """Collator that makes a padded batch of rows."""

    of_pairs: bool = False
    """Whether samples are preference data; their labels stay as the collator has made them."""

    def __call__(self, packs: Sequence[PackOfRows]) -> dict[str, Any]:
        """
        Return the batch of one pack's samples, with the pack index under `PACK`.

        Labels are -100 at padding, and at the first token of each sample, which no token predicts.

        Raises:
            ArgumentError: There is not exactly one pack, or the batch lacks a mask of its padding
                or has another number of tokens than its pack.
            StaleError: The length of a row differs from its planned length.
        """
        if len(packs) != 1 or not isinstance(packs[0], PackOfRows):
            kinds = " and ".join(sorted({type(one).__name__ for one in packs})) or "none"
            fact = f"PackInputs takes one PackOfRows, but the loader passes {counted(len(packs), 'item')} ({kinds})"
            remedy = "pass the loader RowsOfPacks as its dataset, and PackBatches as its batch_sampler"
            raise ArgumentError("host", f"{fact}: {remedy}", {"packs": len(packs)})
        (pack,) = packs
        batch = self.collate(list(pack))
        if self.of_pairs:
            refuse_other_lengths(pack.lengths, sample_lengths(batch, len(pack)))
            return {**batch, PACK: pack.pack}
        batch = require_collated(batch)
        tokens, mask = batch[TOKENS], batch.get(ATTENTION)
        if mask is None and len(tokens) > 1:
            fact = "the collator pads rows, but returns no attention_mask: return a mask that is 0 at padding"
            raise ArgumentError("host", fact, {"rows": len(tokens)})
        mask = torch.ones_like(tokens) if mask is None else mask
        planned, found = pack.lengths, mask.sum(1).tolist()
        if len(found) == len(planned):
            refuse_other_lengths(planned, found)
        elif sum(found) != sum(planned.values()):
            due = f"instead of {sum(planned.values()):,}: it has to keep every row and its length"
            fact = f"the collator returns {counted(sum(found), 'token')} for pack {pack.pack} {due}"
            raise ArgumentError("host", fact, {"pack": pack.pack})
        return {**batch, LABELS: _supervised_labels(batch, mask), PACK: pack.pack}


def _supervised_labels(batch: Mapping[str, Any], mask: torch.Tensor) -> torch.Tensor:
    """Return the labels of a batch, with -100 at padding and at first tokens of samples."""
    labels: torch.Tensor | None = batch.get(LABELS)
    if labels is None:
        labels = batch[TOKENS].clone()
        for name in MASKS:
            if name in batch:
                labels = labels.masked_fill(batch[name] == 0, IGNORED_LABEL)
    first = mask.cumsum(1) == 1
    positions = batch.get(POSITIONS)
    if positions is not None and positions.shape == mask.shape:  # a collator has joined samples
        first = first | (positions == 0)
    return labels.masked_fill((mask == 0) | first, IGNORED_LABEL)


def flatten(rows: Sequence[Row]) -> dict[str, Any]:
    """
    Join samples into one row without padding, in which positions start again with each sample.

    The result has `input_ids`, `labels` and `position_ids` of shape (1, tokens), and the tensors of
    images and videos. The label of each sample's first token is -100, since no token of the sample
    predicts it.

    Args:
        rows: Tokenized rows; at least one.

    Raises:
        ArgumentError: There is no row, or one is not a tokenized row of one sample.

    >>> batch = flatten([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
    >>> batch["labels"].tolist(), batch["position_ids"].tolist()
    ([[-100, 6, -100, 8, 9]], [[0, 1, 0, 1, 2]])
    """
    if not rows:
        raise ArgumentError("host", "flatten got no rows: pass one or more tokenized rows")
    rows = [read_row(row) for row in rows]
    positions = torch.cat([torch.arange(row[TOKENS].size) for row in rows])[None]
    flat = {name: torch.from_numpy(np.concatenate([row[name] for row in rows]))[None] for name in (TOKENS, LABELS)}
    flat[LABELS] = flat[LABELS].masked_fill(positions == 0, IGNORED_LABEL)
    return {**flat, POSITIONS: positions, **join_media(rows)}


class PackLoader(DataLoader[Any]):
    """
    Loader of a rank's batches, set up from training arguments. It raises errors that data sets
    return.
    """

    wait_seconds = 0.0
    """Seconds in which training has waited for batches, or made batches in its own process."""

    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    """Function that returns the context in which each batch is read."""

    def __init__(self, packs: Any, args: Any, **options: Any) -> None:
        self.device = args.device
        names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        workers = {name: getattr(args, f"dataloader_{name}") for name in names}
        # Loaders draw a seed when they start. Drawn from the global generator, it would change
        # later dropout.
        super().__init__(packs, **(workers | {"generator": torch.Generator()} | options))

    def _get_iterator(self) -> Any:
        """Start the worker processes, and delay a Ctrl-C until all of them have started."""
        with hold_ctrl_c():
            return super()._get_iterator()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # no loader needs a class of iterators
        started, batches = time.perf_counter(), super().__iter__()
        while True:
            with self.reading():
                if isinstance(batch := next(batches, None), PackplanError):
                    raise batch
            if batch is None:
                return
            moved = send_to_device(batch, self.device)
            self.wait_seconds += time.perf_counter() - started
            yield moved
            started = time.perf_counter()

    def close(self) -> None:
        """End worker processes that persist between epochs."""
        # The garbage collector might remove the queues before the workers read their end: 5 s for
        # each worker.
        self._iterator = None


def refuse_other_packs(batches: Sequence[Mapping[str, Any]], planned: Iterable[Sequence[int] | None]) -> None:
    """
    Refuse batches whose packs differ from the packs of a schedule.

    Args:
        batches: Batches with a pack index, or a list of pack indices, under the key `PACK`.
        planned: Scheduled pack indices of each batch.

    Raises:
        MismatchError: A batch has other packs, or there are too few or too many batches.
    """
    for batch, pack in zip_longest(batches, planned):
        found: Any = None if batch is None else batch.get(PACK)
        if pack is None or np.atleast_1d(found).tolist() != list(pack):
            served = "no further pack" if batch is None else f"pack {found}"
            due = "no further pack" if pack is None else f"pack {', '.join(map(str, pack))}"
            fact = f"the loader served {served}, but the schedule has {due}"
            raise MismatchError("coverage", f"{fact}: give the loader the batches of this schedule and epoch")

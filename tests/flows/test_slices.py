"""
Several ranks measure slices of the samples, over doubles: what is put together, and what is
refused.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.app.planning.deadline import Deadline
from packplan.app.planning.measure import REPEATED_SAMPLES, measure
from packplan.app.planning.measure_slices import measure_slices
from packplan.core.errors import DataSetError
from packplan.core.samples import MeasuredSample, to_tables
from tests.fakes import (
    AuditedSource,
    FailingSource,
    FreeLock,
    GuessingSource,
    ListSource,
    MemoryLengthStore,
    RestlessSource,
    ScriptedGroup,
)
from tests.flows.desk import LENGTHS, Desk


class Slices:
    """The stores of slices, which all ranks see, and the store of all samples."""

    def __init__(self) -> None:
        self.whole, self.stores = MemoryLengthStore(), {}
        self.lock = FreeLock()

    def open(self, start: int, stop: int):
        return self.stores.setdefault((start, stop), (MemoryLengthStore(), FreeLock()))

    def measure(self, source, *, world_size: int, others, deadline=None) -> None:
        self.group = ScriptedGroup(world_size=world_size, others=others)
        desk = Desk(source, lengths=self.whole)
        desk.lock = self.lock
        measure_slices(desk.split(flush_every=2), self.open, group=self.group, deadline=deadline or Deadline(1))


def measured(source, store=None):
    """Measure a source into a store, as one process does; return the store."""
    store = store or MemoryLengthStore()
    measure("train", source, store, flush_every=None, report=print)
    return store


def bounds(known: int, world_size: int) -> list[tuple[int, int]]:
    at = [known + (len(LENGTHS) - known) * rank // world_size for rank in range(world_size + 1)]
    return list(pairwise(at))


@given(known=st.integers(0, 7), world_size=st.integers(2, 5))
def test_slices_are_put_together_as_one_process_would_have_measured(known, world_size):
    """No stored sample is measured again, and repeatability is checked over all."""
    source, slices = ListSource(LENGTHS), Slices()
    slices.whole.resume(source.fingerprint(), 8, source.data_digest)
    if known:
        measured(ListSource(LENGTHS[:known]), slices.whole)
    others = bounds(known, world_size)[1:]
    digests = iter([measured(ListSource(LENGTHS[slice(*one)]), slices.open(*one)[0]).digest() for one in others])

    slices.measure(source, world_size=world_size, others=lambda _: next(digests))
    assert source.measured == list(range(*bounds(known, world_size)[0]))

    whole, alone = measured(source, slices.whole), measured(ListSource(LENGTHS))
    assert LENGTHS == whole.inspect().tokens.tolist()
    assert (alone.digest(), alone.repeatability) == (whole.digest(), whole.repeatability)


def test_slices_take_no_shortcut_where_it_proved_wrong():
    """Nor trust a slice that was measured by it before."""
    source, slices = GuessingSource(LENGTHS, wrong=5), Slices()
    rows = to_tables(MeasuredSample(source.measure(index), source.media_facts(index)) for index in range(4))
    slices.whole.resume(source.fingerprint(), 8, source.data_digest)
    slices.whole.append(*rows, source.data_digest(4), in_full=True)
    own = measured(ListSource([1, 2]), slices.open(4, 6)[0])
    own.data = str(LENGTHS[4:6])
    other = measured(ListSource(LENGTHS[6:]), slices.open(6, 8)[0])

    slices.measure(source, world_size=2, others=lambda _: other.digest())

    assert [True] == source.ways
    assert LENGTHS == slices.whole.inspect().tokens.tolist()
    assert slices.whole.in_full


def test_a_slice_whose_shortcut_proves_wrong_is_measured_in_full():
    """By the rank that finds it, at once; what the others measured stays."""
    source, slices = AuditedSource(LENGTHS, wrong=2), Slices()
    other = measured(ListSource(LENGTHS[4:]), slices.open(4, 8)[0])

    slices.measure(source, world_size=2, others=lambda _: other.digest())

    assert [False, True] == source.ways
    assert LENGTHS == slices.whole.inspect().tokens.tolist()


def test_a_rank_that_fails_stops_all_with_its_reason():
    """After the others have kept what they measured."""
    source, slices = ListSource(LENGTHS), Slices()

    with pytest.raises(DataSetError, match="rank 1 cannot measure its slice of train: x, line 9"):
        slices.measure(source, world_size=2, others=lambda _: "failed: x, line 9: is torn")
    kept = slices.open(0, 4)[0].read(source.fingerprint(), 4, ListSource(LENGTHS[:4]).data_digest)
    assert LENGTHS[:4] == kept.table[:, 0].tolist()

    with pytest.raises(DataSetError, match="rank 0 cannot measure its slice of train: data, line 2"):
        Slices().measure(FailingSource(LENGTHS, bad={1}), world_size=2, others=lambda _: "digest")


def test_what_another_job_measured_meanwhile_stays():
    """Nothing is appended to it; the next run uses it."""
    source, slices = ListSource(LENGTHS), Slices()

    def measured_by_another(_: str) -> str:
        measured(ListSource(LENGTHS), slices.whole)
        return "digest"

    with pytest.raises(DataSetError, match="another job measured train at the same time: run this again"):
        slices.measure(source, world_size=2, others=measured_by_another)
    assert LENGTHS == slices.whole.inspect().tokens.tolist()


def test_waits_for_slices_share_one_deadline():
    """Rank 0, its lock, the lock of a slice, the other ranks, and rank 0 again."""
    source, slices, now = ListSource(LENGTHS), Slices(), iter(range(100))
    other = measured(ListSource(LENGTHS[4:]), slices.open(4, 8)[0])

    slices.measure(
        source, world_size=2, others=lambda _: other.digest(), deadline=Deadline(50, clock=lambda: next(now))
    )

    assert [49, 46, 45] == slices.group.waits
    assert [48, 44] == slices.lock.waits
    assert [47] == slices.open(0, 4)[1].waits


def test_slices_that_rank_zero_does_not_see_are_refused():
    """It says what they need: one disk."""
    with pytest.raises(DataSetError, match="on a disk that all of them share"):
        Slices().measure(ListSource(LENGTHS), world_size=2, others=lambda _: "elsewhere")


def test_ranks_do_not_measure_many_samples_when_a_few_measure_differently():
    """Rank 0 finds it, while the others wait; no slice is opened."""
    source, slices = RestlessSource(LENGTHS * 1000), Slices()

    with pytest.raises(DataSetError, match="encode the same every time"):
        slices.measure(source, world_size=2, others=lambda value: value)

    assert {} == slices.stores
    assert len(source.measured) <= 2 * REPEATED_SAMPLES


def test_nothing_is_opened_when_all_is_stored():
    """No slice of nothing."""
    source, slices = ListSource(LENGTHS), Slices()
    measured(source, slices.whole)

    slices.measure(source, world_size=2, others=lambda value: value)
    assert {} == slices.stores

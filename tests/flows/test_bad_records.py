"""Bad records stop a run, or are left out of it: of every rank, and of every later start."""

from __future__ import annotations

from contextlib import nullcontext
from decimal import Decimal
from functools import partial

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.app.plan.building import list_failures
from packplan.app.planning.measure import REPEATED_SAMPLES, measure
from packplan.app.planning.split import GatheredSplit, Stores
from packplan.core.errors import DataSetError, RecordError
from packplan.core.policy import PlanPolicy
from packplan.core.samples import from_row
from tests.fakes import FreeLock, ListSource, MemoryLengthStore, MemoryPlanStore


class FaultySource(ListSource):
    """Records whose length is below 0 cannot become samples."""

    def measure(self, index):
        if self.lengths[index] < 0:
            raise RecordError(f"data, line {self.number(index) + 1}", "is bad")
        return super().measure(index)


def measured(source, store, share="1"):
    share = None if share is None else Decimal(share)
    return measure("train", source, store, flush_every=3, report=lambda _: None, max_bad_share=share)


lengths = st.lists(st.integers(1, 9) | st.just(-1), min_size=1, max_size=90).filter(lambda them: max(them) > 0)


@given(lengths)
def test_the_samples_are_the_good_records_in_their_order(lengths):
    """Wherever bad ones stand; each is kept with its reason; a later start compares a few."""
    event(f"bad: {lengths.count(-1) > 0}")
    store = MemoryLengthStore()
    source = FaultySource(lengths)

    table = measured(source, store)

    good = [length for length in lengths if length > 0]
    assert good == [from_row(table, index).length for index in range(len(table))] == source.lengths
    bad = [number for number, length in enumerate(lengths) if length < 0]
    assert [(number, f"data, line {number + 1}", "is bad") for number in bad] == [
        (one.number, one.where, one.reason) for one in store.bad()
    ]
    later = FaultySource(lengths)
    assert table.tolist() == measured(later, store).tolist()
    assert good == later.lengths
    assert len(later.measured) <= REPEATED_SAMPLES


def test_more_than_the_share_stop_the_run():
    """With their number and the first of them; as many as the share do not."""
    lengths = [5] * 98 + [-1] * 2
    assert 98 == len(measured(FaultySource(lengths), MemoryLengthStore(), "0.02"))

    with pytest.raises(
        DataSetError, match=r"2 of 100 records cannot .* custom\.max_bad_share \(0\.01\).*\n  data, line 99"
    ):
        measured(FaultySource(lengths), MemoryLengthStore(), "0.01")
    with pytest.raises(DataSetError, match="none of the train records"):
        measured(FaultySource([-1]), MemoryLengthStore())


def test_a_million_failures_are_a_page(capsys):
    """The first hundred, then counts by reason, which add up; where asked, each is written once."""
    sources = {"train": FaultySource([-1] * 60 + [5] * 40 + [-1] * 100_000), "eval": ManyReasons([1] * 5000)}
    splits = [split_of(name, source) for name, source in sources.items()]
    written = []

    with pytest.raises(DataSetError, match=r"105,060 of 105,100 records .* \(--write-failures FILE names all\)$"):
        list_failures(splits, open_file=lambda: nullcontext(written.append))

    lines = capsys.readouterr().out.splitlines()
    assert [f"data, line {n}: is bad" for n in [*range(1, 61), *range(101, 141)]] == lines[:100]
    assert "… and 104,960 more; all by reason, without what each record says:" == lines[100]
    counts = {reason: int(count.replace(",", "")) for count, reason in (line.split(None, 1) for line in lines[101:])}
    assert 100_060 == counts["is bad"]
    assert (105_060, True) == (sum(counts.values()), len(counts) <= 101)
    assert [100_060, 5000] == [sum(one["split"] == name for one in written) for name in sources]
    assert 105_060 == len({one["where"] for one in written}) == len(written)


def test_up_to_a_hundred_failures_are_lines_alone(capsys):
    """Nothing is counted that is named."""
    with pytest.raises(DataSetError, match=r"100 of 101 records cannot .*: fix or remove what is named above$"):
        list_failures([split_of("train", FaultySource([-1] * 100 + [1]))])

    assert [f"data, line {n}: is bad" for n in range(1, 101)] == capsys.readouterr().out.splitlines()


class ManyReasons(ListSource):
    """Records that are each bad in a way of their own, in words that no pattern tells apart."""

    def measure(self, index):
        letters = "".join(chr(ord("a") + int(digit)) for digit in str(index))
        raise RecordError(f"more, line {index + 1}", f"looks like {letters}")


def split_of(name, source):
    """Return a split of which nothing is stored."""
    stores = Stores(MemoryLengthStore(), MemoryPlanStore(), FreeLock())
    return GatheredSplit(name, PlanPolicy(packing_length=80), source, stores)


class UnreadSource(ListSource):
    """Records that no setting but the model's could make samples."""

    def measure(self, index):
        raise RecordError(f"data, line {index + 1}", "has images", "name a model that sees")


def test_a_record_that_is_good_for_another_run_has_that_as_its_remedy():
    """Leaving records out is no way there, and is not named; with a share, the remedy is kept."""
    with pytest.raises(RecordError) as raised:
        measured(UnreadSource([5, 6]), MemoryLengthStore(), None)
    assert "data, line 1: has images: name a model that sees" == str(raised.value)

    with pytest.raises(DataSetError, match=r"\n  data, line 1: has images: name a model that sees"):
        measured(UnreadSource([5, 6]), MemoryLengthStore(), "0.1")
    with pytest.raises(RecordError, match=r"line 1: is bad \(.*custom\.on_bad_record: skip leaves them out\)$"):
        measured(FaultySource([-1]), MemoryLengthStore(), None)


def test_a_run_that_stops_at_bad_records_takes_over_none():
    """What an earlier start left out is named again."""
    store = MemoryLengthStore()
    with pytest.raises(RecordError, match="line 2: is bad"):
        measured(FaultySource([5, -1, 6]), MemoryLengthStore(), None)
    measured(FaultySource([5, -1, 6]), store)

    with pytest.raises(RecordError, match="line 2: is bad"):
        measured(FaultySource([5, -1, 6]), store, None)


def test_records_left_out_survive_an_interruption(monkeypatch):
    """What was measured before stays measured, and what was left out stays out."""
    source, store = FaultySource([5, -1, 6, 7, 8, -1, 9]), MemoryLengthStore()
    with monkeypatch.context() as patch:
        patch.setattr(source, "media_facts", partial(interrupted, source, source.media_facts))
        with pytest.raises(KeyboardInterrupt):
            measured(source, store)
    assert [1] == [one.number for one in store.bad()]

    table = measured(FaultySource([5, -1, 6, 7, 8, -1, 9]), store)

    assert [5, 6, 7, 8, 9] == table[:, 0].tolist()
    assert [1, 5] == [one.number for one in store.bad()]


def interrupted(source, images, index, **options):
    if source.lengths[index] == 8:
        raise KeyboardInterrupt
    return images(index, **options)

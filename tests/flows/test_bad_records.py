"""Bad records stop a run, or are flagged: for every rank, and for every later start."""

from decimal import Decimal

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.app.planning.audit import REPEATED_SAMPLES
from packplan.core.errors import ArgumentError, DataSetError, RecordError
from packplan.core.samples.tables import BAD, column, from_row
from tests.fakes import CountedLengthStore, ListSource
from tests.flows.desk import Desk


def measured(source, store=None, share="1"):
    share = None if share is None else Decimal(share)
    return Desk(source, lengths=store).measure(flush_every=3, max_bad_share=share)


lengths = st.lists(st.integers(1, 9) | st.just(-1), min_size=1, max_size=90).filter(lambda them: max(them) > 0)


@given(lengths)
def test_every_record_has_a_row_and_bad_ones_are_flagged(lengths):
    """Wherever bad ones stand; each is kept with its reason; a later start compares a few."""
    event(f"bad: {lengths.count(-1) > 0}")
    store = CountedLengthStore()

    table = measured(ListSource(lengths), store)

    assert [max(0, length) for length in lengths] == column(table, "length").tolist()
    bad = [index for index, length in enumerate(lengths) if length < 0]
    assert bad == [index for index in range(len(table)) if from_row(table, index) == BAD]
    assert bad == np.flatnonzero(column(table, "bad")).tolist()
    found = [(one.index, one.where, one.reason) for one in store.bad_records()]
    assert [(index, f"data, line {index + 1}", "is bad") for index in bad] == found
    later = ListSource(lengths)
    assert table.tolist() == measured(later, store).tolist()
    assert len(later.measured) <= REPEATED_SAMPLES


def planned(source, **changes):
    """Plan a split of a source, bad records flagged."""
    options = {"packing_length": 9, "min_fill_ratio": "0.4", "max_dropped_share": 1, **changes}
    return Desk(source).plan(max_bad_share=Decimal(1), flush_every=3, **options)


@given(
    lengths.filter(lambda them: max(them) > 4), st.sampled_from(["constant_volume", "balanced", "first_fit_shuffle"]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_the_packs_are_those_of_the_good_records_alone(lengths, algorithm, packing, single_long):
    """Index by index: data without the bad records give the same packs, counts and digest."""
    good = [index for index, length in enumerate(lengths) if length > 0]
    changes = {"algorithm": algorithm, "packing": packing, "allow_single_long": single_long}
    try:
        alone = planned(ListSource([lengths[index] for index in good]), **changes)
    except ArgumentError:
        with pytest.raises(ArgumentError):
            planned(ListSource(lengths), **changes)
        return
    event(f"bad: {len(good) < len(lengths)}, long: {bool(alone.raw.single_long)}, {algorithm}")

    among_bad = planned(ListSource(lengths), **changes)

    assert alone.raw.with_indices(np.array(good)) == among_bad.raw
    assert [[good[index] for index in pack] for pack in alone.aligned.packs] == among_bad.aligned.packs.tolist()
    assert alone.data_digest == among_bad.data_digest


@given(lengths, st.data())
def test_a_bad_record_that_was_fixed_is_measured_and_becomes_a_sample(lengths, data):
    """With all behind it; those before it are not measured again, and other bad ones stay."""
    store = CountedLengthStore()
    measured(ListSource(lengths), store)
    bad = [index for index, length in enumerate(lengths) if length < 0]
    fixed = data.draw(st.sets(st.sampled_from(bad))) if bad else set()
    event(f"bad: {len(bad) > 0}, fixed: {len(fixed) > 0}")
    later = ListSource([5 if index in fixed else length for index, length in enumerate(lengths)])

    assert measured(later, store).tolist() == measured(ListSource(later.lengths)).tolist()
    assert [index for index in bad if index not in fixed] == [one.index for one in store.bad_records()]
    if fixed:
        assert len([index for index in later.measured if index < min(fixed)]) <= 4 * REPEATED_SAMPLES


def test_a_sample_without_a_token_is_not_left_out():
    """It is none of those that are flagged, so that nothing would count it."""
    with pytest.raises(DataSetError, match=r"1 sample of 3 has no token \(first: sample 1\): remove such records"):
        planned(ListSource([5, 0, 6]))


def test_more_than_the_share_stop_the_run():
    """With their number and the first of them; as many as the share do not."""
    lengths = [5] * 98 + [-1] * 2
    assert 100 == len(measured(ListSource(lengths), share="0.02"))

    with pytest.raises(
        DataSetError, match=r"2 of 100 records cannot .* custom\.max_bad_share \(0\.01\).*\n  data, line 99"
    ):
        measured(ListSource(lengths), share="0.01")
    with pytest.raises(DataSetError, match="none of the train records"):
        measured(ListSource([-1]))


def test_a_run_that_stops_at_bad_records_names_the_remedy_and_takes_over_none():
    """Leaving out is none for a record that is good for another run; with a share, that is kept."""
    unread = ListSource([5, 6])
    unread.errors = {index: unread.error(index, "has images", "name a model that sees") for index in (0, 1)}
    with pytest.raises(RecordError) as raised:
        measured(unread, share=None)
    assert "data, line 1: has images: name a model that sees" == str(raised.value)
    with pytest.raises(DataSetError, match=r"\n  data, line 1: has images: name a model that sees"):
        measured(unread, share="0.1")

    measured(source := ListSource([5, -1, 6]), store := CountedLengthStore())
    with pytest.raises(RecordError, match=r"line 2: is bad \(custom\.on_bad_record: skip leaves such records out;"):
        measured(source, store, None)

"""A source of which a table knows some records, over doubles: what is measured, and what is not."""

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.app.planning.measure import MAX_KNOWN_BETWEEN, measure, merge_known
from packplan.app.planning.split import KnownTable
from packplan.core.samples.tables import KnownLengths, media_identity, to_tables
from tests.fakes import GuessingSource, ListSource
from tests.flows.desk import Desk

EVERYTHING = list(range(200))


def table_of(source) -> KnownTable:
    """Return a table of the measured records of a source."""
    rows, media = to_tables(source.measure_many(range(len(source)), in_full=False))
    identities = [media_identity(*source.identity(index)) for index in range(len(rows))]
    known = KnownLengths(np.array([one.encode() for one in identities], "S64"), rows, media)
    return KnownTable("table", lambda: known)


def measured(source, known=None):
    """Measure a source as a run does; return its table and its media."""
    measure((desk := Desk(source)).split(known=known), print)
    return desk.lengths.stored()


@given(
    known=st.lists(st.sampled_from(EVERYTHING), unique=True),
    asked=st.lists(st.sampled_from(EVERYTHING), min_size=1, max_size=150),
    start=st.integers(0, 5),
)
def test_only_what_a_table_lacks_is_measured_and_the_result_is_the_same(known, asked, start):
    """In any order, with records twice; known ones are measured only close to unknown ones."""
    source = ListSource(asked)
    indices = range(min(start, len(asked) - 1), len(asked))

    found = list(merge_known(source, indices, table_of(ListSource(known))))

    unknown = [index for index in indices if asked[index] not in known]
    event(f"unknown {bool(unknown)}, of all {len(unknown) == len(indices)}")
    assert found == list(ListSource(asked).measure_many(indices, in_full=False))
    assert set(unknown) <= set(source.measured)
    assert all(min(abs(index - one) for one in unknown) <= MAX_KNOWN_BETWEEN for index in source.measured)


def test_a_run_that_a_table_knows_encodes_some_samples_to_audit_it():
    """And stores what it would have measured."""
    source = ListSource(EVERYTHING)

    stored = measured(source, table_of(ListSource(EVERYTHING[::-1])))

    alone = measured(ListSource(EVERYTHING))

    assert stored.table.tolist() == alone.table.tolist()
    assert stored.media.tolist() == alone.media.tolist()
    assert stored.repeatability == alone.repeatability
    assert 0 < len(set(source.measured)) < 40


def test_a_table_that_is_wrong_is_not_believed():
    """A sample that encodes otherwise has all samples encoded in full, and the table not asked."""
    source = GuessingSource(EVERYTHING, wrong=-1)

    stored = measured(source, table_of(GuessingSource(EVERYTHING, wrong=0)))

    assert stored.in_full
    assert EVERYTHING == stored.table[:, 0].tolist()
    assert [True] == source.ways


def test_processes_that_measure_end_where_the_records_are_not_all_asked_for():
    """Closing closes the source's own generator."""
    source = ListSource(EVERYTHING)
    outcomes = merge_known(source, range(10), table_of(ListSource([1])))
    next(outcomes)
    assert source.is_measuring
    outcomes.close()
    assert not source.is_measuring

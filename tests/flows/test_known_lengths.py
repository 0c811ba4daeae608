"""A source of which a table knows some records, over doubles: what is measured, and what is not."""

from __future__ import annotations

from functools import partial

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.app.planning.known_lengths import CLOSE, PartlyKnownSource
from packplan.app.planning.measure import measure
from packplan.core.samples import KnownLengths, media_identity, to_tables
from tests.fakes import GuessingSource, ListSource, MemoryLengthStore

EVERYTHING = list(range(200))


def table_of(source) -> KnownLengths:
    """Return what a table holds after its records were measured."""
    rows, media = to_tables(source.measure_many(range(len(source)), in_full=False))
    identities = [media_identity(source.record_digest(index), source.media_folder(index)) for index in range(len(rows))]
    return KnownLengths(np.array([one.encode() for one in identities], "S64"), rows, media)


def measured(source):
    """Measure a source as a run does; return its table and its media."""
    store = MemoryLengthStore()
    measure("train", source, store, flush_every=None, report=print)
    return store.stored()


@given(
    known=st.lists(st.sampled_from(EVERYTHING), unique=True),
    asked=st.lists(st.sampled_from(EVERYTHING), min_size=1, max_size=150),
    start=st.integers(0, 5),
)
def test_only_what_a_table_lacks_is_measured_and_the_result_is_the_same(known, asked, start):
    """In any order, with records twice; known ones are measured only close to unknown ones."""
    source = ListSource(asked)
    partly = PartlyKnownSource(source, "table", partial(table_of, ListSource(known)))
    indices = range(min(start, len(asked)), len(asked))

    found = list(partly.measure_many(indices, in_full=False))

    unknown = [index for index in indices if asked[index] not in known]
    event(f"unknown {bool(unknown)}, of all {len(unknown) == len(indices)}")
    assert found == list(ListSource(asked).measure_many(indices, in_full=False))
    assert set(unknown) <= set(source.measured)
    assert all(min(abs(index - one) for one in unknown) <= CLOSE for index in source.measured)


def test_a_run_that_a_table_knows_encodes_some_samples_to_audit_it():
    """And stores what it would have measured."""
    source = ListSource(EVERYTHING)
    partly = PartlyKnownSource(source, "table", partial(table_of, ListSource(EVERYTHING[::-1])))

    stored, alone = measured(partly), measured(ListSource(EVERYTHING))

    assert stored.table.tolist() == alone.table.tolist()
    assert stored.media.tolist() == alone.media.tolist()
    assert stored.repeatability == alone.repeatability
    assert 0 < len(set(source.measured)) < 40


def test_a_table_that_is_wrong_is_not_believed():
    """A sample that encodes otherwise has all samples encoded in full, and the table not asked."""
    source = GuessingSource(EVERYTHING, wrong=-1)
    partly = PartlyKnownSource(source, "table", partial(table_of, GuessingSource(EVERYTHING, wrong=0)))

    stored = measured(partly)

    assert stored.in_full
    assert EVERYTHING == stored.table[:, 0].tolist()
    assert [True] == source.ways


def test_processes_that_measure_end_where_the_records_are_not_all_asked_for():
    """Closing closes the source's own generator."""
    for in_full in (False, True):
        source = ListSource(EVERYTHING)
        partly = PartlyKnownSource(source, "table", partial(table_of, ListSource([1])))
        outcomes = partly.measure_many(range(10), in_full=in_full)
        next(outcomes)
        assert source.is_measuring
        outcomes.close()
        assert not source.is_measuring


def test_all_else_is_asked_of_the_source():
    """What a table does not change."""
    source = ListSource(EVERYTHING)
    source.faulty_copies = [("data", "is torn")]
    partly = PartlyKnownSource(source, "table", partial(table_of, source))

    assert len(source) == len(partly)
    assert source.fingerprint() == partly.fingerprint()
    assert source.data_digest(7, start=3, without=[4]) == partly.data_digest(7, start=3, without=[4])
    assert (source.record_digest(3), source.media_folder(3)) == (partly.record_digest(3), partly.media_folder(3))
    assert source.faulty_copies == list(partly.copy_faults())
    assert source.data_files() == partly.data_files()
    assert source.media_facts(3) == partly.media_facts(3)
    assert source.measure(3) == partly.measure(3) == partly.measure_by_headers(3)
    assert source.measure_elsewhere([3], epoch=1) == partly.measure_elsewhere([3], epoch=1)

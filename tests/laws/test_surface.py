"""Laws of `core.surface`: a plan of lengths, its table, and the steps of its schedules."""

import pytest
from hypothesis import assume, event, example, given, reject
from hypothesis import strategies as st

import packplan as pp
from packplan.core.errors import ArgumentError
from tests.strategies import raw_lengths


def test_a_packing_length_in_the_place_of_a_policy_is_explained():
    """As people write it who know other packers."""
    with pytest.raises(TypeError, match="packing_length=80"):
        pp.build_raw_plan([1, 2], 80)


@given(raw_lengths(), st.booleans())
def test_a_table_has_the_figures_and_a_page_draws_the_packs(case, skips):
    """The page holds the table's values, and one bar for each drawn sample and pack."""
    lengths, packing_length = case
    try:
        plan = pp.plan(lengths, packing_length, allow_single_long=not skips)
    except ArgumentError:
        reject()
    table = plan.show()
    event(f"skipped: {bool(plan.raw.skipped_long)}, long: {bool(plan.raw.single_long)}")

    text, page = repr(table), table._repr_html_()

    options = {"packing_length": packing_length, "algorithm": "auto", "allow_single_long": not skips}
    assert plan.raw == pp.build_raw_plan(lengths, **options)
    assert plan.checksum == pp.plan_checksum(plan.packs)
    assert f"{len(lengths):,}" in text
    assert plan.checksum[:12] in text
    fewest = len(plan.packs) + len(plan.raw.dropped_packs) == plan.raw.lower_bound
    assert (f"{len(plan.packs):,} (no plan has fewer)" in text) == fewest
    assert all(value in page for _, value in table.rows)
    assert ("skipped" in text) == bool(plan.raw.skipped_long)
    assert page.count("<rect") == sum(1 + len(pack) for pack in plan.packs[:24])
    assert f"{len(plan.packs):,} pack" in repr(plan)


@example(lengths=[60, 35, 60, 20, 60, 10])
@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=30))
def test_no_option_of_planning_is_ignored(lengths):
    """Samples that are too long and packs that are dropped are refused if an option says so."""
    limit = max(lengths) - 1
    assume(limit >= 1)
    with pytest.raises(pp.ArgumentError, match=r"a pack holds .* \(packing_length\)"):
        pp.plan(lengths, limit, refuse_longer=True)

    try:
        found = pp.plan(lengths, 100, min_fill_ratio="0.9", max_dropped_share=1)
    except ArgumentError:  # no pack is as full
        reject()
    if len(found.raw.dropped_packs) > 1:
        event("packs are dropped")
        assert f"{len(found.raw.dropped_packs)} more are dropped" in repr(found.show())
        with pytest.raises(pp.ArgumentError):
            pp.plan(lengths, 100, min_fill_ratio="0.9", max_dropped_share=0)

"""A few samples are encoded again before many are measured."""

import pytest

from packplan.app.planning.measure import COMPARED_TOKENS, REPEATED_FIRST_ABOVE, REPEATED_SAMPLES
from packplan.core.errors import DataSetError
from tests.fakes import UNSTEADY, ListSource, OddSource, ScriptedGroup
from tests.flows.desk import LENGTHS, Desk


@pytest.mark.parametrize("known", [0, 8])
@pytest.mark.parametrize("unsteady", UNSTEADY)
def test_many_samples_are_not_measured_when_a_few_measure_differently(unsteady, known):
    """The few that are encoded first are all that is encoded; nothing more is stored."""
    lengths = LENGTHS * 1000
    desk = Desk(ListSource(lengths[:known]))
    if known:
        desk.plan()
    desk.source = OddSource(lengths, UNSTEADY[unsteady])
    desk.source.differs = known

    with pytest.raises(DataSetError, match="encode the same every time"):
        desk.plan()

    assert len(set(desk.source.measured)) <= REPEATED_SAMPLES
    assert len(desk.source.measured) <= 2 * REPEATED_SAMPLES
    assert known == sum(desk.lengths.flushes)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("drifted", [0, 57, 399])
def test_stored_lengths_are_not_trusted_when_samples_encode_to_others(drifted, world_size):
    """The first that differs is named with both; nothing is planned, measured or lost."""
    desk = Desk(ListSource(LENGTHS * 50), group=ScriptedGroup(world_size=world_size))
    desk.plan()
    desk.source = OddSource(LENGTHS * 50, lambda _, index, __: index == drifted)
    length = LENGTHS[drifted % 8]

    with pytest.raises(
        DataSetError,
        match=rf"sample {drifted} encodes to \({length + 1}, .*\), but \({length}, .* another training.output_dir",
    ):
        desk.plan(packing_length=90)

    assert (desk.plans.saves, [256, 144]) == (1, desk.lengths.flushes)
    assert desk.source.measured == sorted(desk.source.measured, reverse=True)
    assert len(desk.source.measured) <= REPEATED_SAMPLES
    assert [] == desk.source.elsewhere, "no process is started"


def test_what_is_compared_at_a_start_is_little_however_long_samples_are():
    """So many as have a few tokens together, the shortest first, and one at least."""
    for length, num in ((100, REPEATED_SAMPLES), (COMPARED_TOKENS // 3 - 50, 4), (10_000_000, 1)):
        lengths = [length] * 100
        lengths[14] = 50
        desk = Desk(ListSource(lengths))
        desk.plan()
        desk.source.measured.clear()
        desk.plan()
        assert (num, True) == (len(desk.source.measured), 14 in desk.source.measured)


@pytest.mark.parametrize("left", [REPEATED_FIRST_ABOVE, REPEATED_FIRST_ABOVE + 1])
def test_some_samples_are_encoded_again_before_many_are_measured(left):
    """Forwards and backwards here, and elsewhere in a third order."""
    desk = Desk(ListSource([7] * 10))
    desk.plan()
    desk.source = ListSource([7] * (10 + left))
    desk.plan()

    again = desk.source.measured[: desk.source.measured.index(11)]
    if left == REPEATED_FIRST_ABOVE:
        assert [10] == again
    else:
        few = again[:REPEATED_SAMPLES]
        assert (10, 10 + left - 1) == (few[0], few[-1])
        assert few == sorted(set(few))
        assert [*few, *few[::-1], *few[::2], *few[1::2], 10] == again

"""A few samples are encoded again before many are measured."""

from __future__ import annotations

import pytest

from packplan.app.planning.measure import PROBED_FIRST_ABOVE, PROBED_SAMPLES
from packplan.core.errors import DataSetError
from tests.fakes import ElsewhereSource, ListSource, OrderedSource, RestlessSource
from tests.flows.test_planning import LENGTHS, Desk


@pytest.mark.parametrize("known", [0, 8])
@pytest.mark.parametrize(
    ("kind", "options"),
    [(RestlessSource, {}), (OrderedSource, {}),
     (ElsewhereSource, {"epoch_matters": True}), (ElsewhereSource, {"epoch_matters": False})],
    ids=["each call", "order", "epoch", "process"],
)  # fmt: skip
def test_many_samples_are_not_measured_when_a_few_measure_differently(kind, options, known):
    """
    No hours are lost: the few that are probed first are all that is encoded; nothing more is
    stored.
    """
    lengths = LENGTHS * 1000
    desk = Desk(ListSource(lengths[:known]))
    if known:
        desk.plan()
    desk.source = kind(lengths, **options)
    desk.source.differs = known

    with pytest.raises(DataSetError, match="encode the same every time"):
        desk.plan()

    assert len(set(desk.source.measured)) <= PROBED_SAMPLES
    assert len(desk.source.measured) <= 2 * PROBED_SAMPLES
    assert known == sum(desk.lengths.flushes)


@pytest.mark.parametrize("left", [PROBED_FIRST_ABOVE, PROBED_FIRST_ABOVE + 1])
def test_some_samples_are_probed_before_many_are_measured(left):
    """
    Forwards and backwards here, all over what is to be measured, and elsewhere in a third order;
    few are measured at once.
    """
    desk = Desk(ListSource([7] * 10))
    desk.plan()
    desk.source = ListSource([7] * (10 + left))
    desk.plan()

    probed = desk.source.measured[: desk.source.measured.index(11)]
    if left == PROBED_FIRST_ABOVE:
        assert [10] == probed
    else:
        few = probed[:PROBED_SAMPLES]
        assert (10, 10 + left - 1) == (few[0], few[-1])
        assert few == sorted(set(few))
        assert [*few, *few[::-1], *few[::2], *few[1::2], 10] == probed

"""States and limits that contradict themselves are refused, wherever they come from."""

from collections.abc import Mapping

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError
from packplan.core.fingerprint import from_plain, to_plain, unseal
from packplan.core.lengths import as_works, round_up_lengths
from packplan.core.stream import StreamProgress


@attrs.frozen
class State:
    """A value with a field of each kind."""

    numbers: NDArray[np.int64]
    counts: tuple[int, ...]
    named: Mapping[str, int]
    one: int | None


PLAIN = {"numbers": [1, 2], "counts": (3,), "named": {"a": 4}, "one": None}


class Unreadable:
    """An array of objects that numpy does not read."""

    def __array__(self, *_, **__):
        raise TypeError


CONTRADICTIONS = {
    "no digest": (lambda: unseal({"step": 1}), ValueError, "not a dict with the key"),
    "no values": (lambda: from_plain(State, {}), ValueError, "has no counts"),
    "another key": (lambda: from_plain(State, {**PLAIN, "other": 2}), ValueError, "the unknown key other"),
    "no array": (lambda: as_works(Unreadable(), 1), ArgumentError, "Unreadable"),
    "more of an epoch than of all": (
        lambda: StreamProgress(world_size=1, readers_per_rank=1, step=1, epoch=0, epoch_step=2), ValueError, "not agree"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "says"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("numbers", "12"), ("numbers", [1, "2"]), ("counts", "3"), ("counts", {3: 3}), ("counts", [None]), ("named", [4]),
     ("named", {"a": "4"}), ("named", {4: 4}), ("one", [1]), ("one", True), ("one", 1.0)],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_by_its_field(field, wrong):
    """Arrays, tuples and mappings number by number; the same values of the right types are read."""
    assert PLAIN == to_plain(from_plain(State, PLAIN))
    with pytest.raises(ValueError, match=f"the state.{field}.* is .*, but has to be"):
        from_plain(State, {**PLAIN, field: wrong})


def test_lengths_near_the_largest_are_rounded_up():
    """Where their total still has 63 bits."""
    assert [2**62, 2] == round_up_lengths(np.array([2**62, 1]), 2).tolist()

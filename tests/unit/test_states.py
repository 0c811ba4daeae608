"""States and limits that contradict themselves are refused, wherever they come from."""

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError
from packplan.core.fingerprint import from_plain, unseal
from packplan.core.lengths import as_works, round_up_lengths
from packplan.core.stream import StreamProgress


@attrs.frozen
class Numbers:
    """A value with an array."""

    numbers: NDArray[np.int64]


class Unreadable:
    """An array of objects that numpy does not read."""

    def __array__(self, *_, **__):
        raise TypeError


CONTRADICTIONS = {
    "no digest": (lambda: unseal({"step": 1}), ValueError, "has no"),
    "text among numbers": (lambda: from_plain(Numbers, {"numbers": [1, "2"]}), ValueError, "numbers"),
    "no numbers": (lambda: from_plain(Numbers, {}), ValueError, "has no numbers"),
    "another key": (lambda: from_plain(Numbers, {"numbers": [1], "other": 2}), ValueError, "the unknown key other"),
    "no array": (lambda: as_works(Unreadable(), 1), ArgumentError, "Unreadable"),
    "more of an epoch than of all": (
        lambda: StreamProgress(world_size=1, shards_per_rank=1, step=1, epoch=0, epoch_step=2), ValueError, "contradict"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "says"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_contradicts_itself_is_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_an_array_is_read_number_by_number():
    assert [1, 2] == list(from_plain(Numbers, {"numbers": [1, 2]}).numbers)


def test_lengths_near_the_largest_are_rounded_up():
    """Where their total still has 63 bits."""
    assert [2**62, 2] == round_up_lengths(np.array([2**62, 1]), 2).tolist()

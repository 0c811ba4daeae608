"""States and limits that contradict themselves are refused, wherever they come from."""

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError
from packplan.core.fingerprint import from_plain, unseal
from packplan.core.lengths import as_works, round_up_lengths
from packplan.core.stream import StreamProgress


def test_a_state_without_its_digest_is_refused():
    with pytest.raises(ValueError, match="has no"):
        unseal({"step": 1})


@attrs.frozen
class Numbers:
    """A value with an array."""

    numbers: NDArray[np.int64]


def test_an_array_is_read_number_by_number():
    """Text among the numbers is no number."""
    assert [1, 2] == list(from_plain(Numbers, {"numbers": [1, 2]}).numbers)
    with pytest.raises(ValueError, match="numbers"):
        from_plain(Numbers, {"numbers": [1, "2"]})
    for plain, fault in (({}, "has no numbers"), ({"numbers": [1], "other": 2}, "has the unknown key other")):
        with pytest.raises(ValueError, match=fault):
            from_plain(Numbers, plain)


def test_lengths_near_the_largest_are_rounded_up():
    """Where their total still has 63 bits."""
    assert [2**62, 2] == round_up_lengths(np.array([2**62, 1]), 2).tolist()


class Unreadable:
    """An array of objects that numpy does not read is refused."""

    def __array__(self, *_, **__):
        message = "not here"
        raise TypeError(message)


def test_what_numpy_does_not_read_is_named():
    with pytest.raises(ArgumentError, match="Unreadable"):
        as_works(Unreadable(), 1)


def test_a_stream_has_done_no_more_of_an_epoch_than_of_all():
    with pytest.raises(ValueError, match="contradict"):
        StreamProgress(world_size=1, shards_per_rank=1, step=1, epoch=0, epoch_step=2)

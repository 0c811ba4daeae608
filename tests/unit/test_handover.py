"""A tensor that is offered to a process that is gone shows no error; other errors are shown."""

import os
import socket
import sys
from multiprocessing import resource_sharer

import pytest

from packplan.adapters.processes import hide_broken_handover


@pytest.fixture
def shown(monkeypatch):
    """Return the errors that threads of multiprocessing show, once broken handovers are hidden."""
    found: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: found.append(kind))
    hide_broken_handover()
    yield found
    resource_sharer.stop()


def hand_over(number: int) -> tuple[str, int]:
    """Offer a file to another process, as torch does memory; return the address and the key."""
    return resource_sharer.DupFd(number)._id


def test_a_taker_that_goes_away_while_it_takes_is_not_shown(shown):
    """The next one is served by the same thread."""
    with open(os.devnull) as file:  # noqa: PTH123
        address, _ = hand_over(file.fileno())
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as taker:
                taker.connect(address)
        taken = resource_sharer.DupFd(file.fileno()).detach()

    os.close(taken)
    assert [] == shown

"""A tensor that is offered to a process that is gone shows no error; other errors are shown."""

import os
import socket
import sys
from multiprocessing import resource_sharer
from unittest.mock import Mock

from packplan.adapters.processes import hide_connection_errors


def test_a_taker_that_goes_away_while_it_takes_is_not_shown(monkeypatch):
    """The next one is served by the same thread."""
    monkeypatch.setattr(sys, "excepthook", shown := Mock())
    hide_connection_errors()
    with open(os.devnull) as file:  # noqa: PTH123
        address, _ = resource_sharer.DupFd(file.fileno())._id  # as torch offers memory
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as taker:
                taker.connect(address)
        os.close(resource_sharer.DupFd(file.fileno()).detach())

    resource_sharer.stop()
    shown.assert_not_called()

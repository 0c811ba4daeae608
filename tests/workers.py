"""Runs files of tests side by side, in processes forked from the one that has collected them."""

import os
from collections.abc import Callable, Iterator
from itertools import chain, groupby, pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest


class Reporter:
    """Sends what pytest reports of a test to the process that shows it."""

    def __init__(self, config: pytest.Config, shown: Connection) -> None:
        self._config, self._shown = config, shown

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Send the name of a test that starts."""
        self._shown.send(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send what became of a part of a test."""
        self._shown.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def run_files(session: pytest.Session, num_workers: int, begin: Callable[[], Any], end: Callable[[], Any]) -> None:
    """Run the collected files in workers, each of which begins and ends with these calls."""
    files = [list(items) for _, items in groupby(session.items, key=lambda item: item.path)]
    # Long ones first, so that no worker waits for another at the end.
    files.sort(key=lambda items: -sum(item.get_closest_marker("slow") is not None for item in items))
    queue, filled = os.pipe()
    os.write(filled, b"".join(number.to_bytes(2, "big") for number in range(len(files))))
    os.close(filled)
    running: dict[Any, str] = {}
    for _ in range(num_workers):
        shown, sender = Pipe(duplex=False)
        if not os.fork():
            try:
                begin()
                _run(session, chain.from_iterable(files[number] for number in _taken(queue)), sender)
                end()
                sender.send(None)
            finally:
                os._exit(0)
        sender.close()
        running[shown] = "its first test"
    while running:
        for ready in wait([*running]):
            _show(session, ready, running)
        if session.shouldfail:
            [*_taken(queue)]
    if session.shouldfail:
        raise session.Failed(session.shouldfail)


def _show(session: pytest.Session, shown: Any, running: dict[Any, str]) -> None:
    """Show what a worker says next; *running* has the test that each runs."""
    try:
        said = shown.recv()
    except EOFError:
        pytest.exit(f"a worker has ended in {running[shown]}", returncode=pytest.ExitCode.INTERNAL_ERROR)
    if said is None:
        del running[shown]
        os.wait()
    elif isinstance(said, str):
        running[shown] = said
    else:
        report = session.config.hook.pytest_report_from_serializable(config=session.config, data=said)
        session.config.hook.pytest_runtest_logreport(report=report)


def _taken(queue: int) -> Iterator[int]:
    """Yield the numbers of files that no worker has taken yet."""
    while number := os.read(queue, 2):
        yield int.from_bytes(number, "big")


def _run(session: pytest.Session, items: Iterator[pytest.Item], shown: Connection) -> None:
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(Reporter(session.config, shown))
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are those of the process that has collected
    capture.start_global_capturing()
    for item, following in pairwise(chain(items, [None])):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            return

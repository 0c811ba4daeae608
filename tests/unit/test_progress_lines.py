"""Where there is no terminal, a long stage says every 30 s how far it is."""

from __future__ import annotations

import io
import logging

import pytest

from packplan.adapters.progress import hide, progress
from tests.fakes import Terminal


class Clock:
    """Stands still but for what tests add."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(caplog):
    caplog.set_level(logging.INFO)
    return Clock()


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_line_every_30_s_has_done_total_rate_and_time_left(clock, caplog):
    """Not sooner, and not for what an earlier run has done."""
    bar = progress(total=5_000, initial=1_000, desc="measuring train", unit=" samples", clock=clock, file=io.StringIO())
    for _ in range(100):
        clock.now += 1
        bar.update(20)

    assert [
        "measuring train: 1,600 of 5,000 samples, 20/s, 0:02:50 left",
        "measuring train: 2,200 of 5,000 samples, 20/s, 0:02:20 left",
        "measuring train: 2,800 of 5,000 samples, 20/s, 0:01:50 left",
    ] == lines(caplog)


def test_what_is_iterated_over_comes_through_and_is_counted(clock, caplog):
    """By its own length; a slow rate keeps its digits."""
    seen = []
    for item in progress(range(4), desc="comparing", unit=" packs", clock=clock, file=io.StringIO()):
        seen.append(item)
        clock.now += 40

    assert [0, 1, 2, 3] == seen
    assert "comparing: 1 of 4 packs, 0.03/s, 0:02:00 left" == lines(caplog)[0]
    assert "comparing: 4 of 4 packs, 0.03/s, 0:00:00 left" == lines(caplog)[-1]


def test_a_stage_without_an_end_says_what_it_does_and_how_long(clock, caplog):
    """As planning by `certified` does."""
    with progress(desc="planning train", bar_format="{desc}{postfix}", clock=clock, file=io.StringIO()) as bar:
        bar.set_postfix_str("93 packs, the bound is 92", refresh=False)
        clock.now += 95
        bar.update()

    assert ["planning train: 93 packs, the bound is 92, 0:01:35 so far"] == lines(caplog)


@pytest.mark.parametrize(("file", "quiet"), [(Terminal, False), (io.StringIO, True)])
def test_terminals_and_quiet_have_no_lines(clock, caplog, file, quiet):
    """The one has a bar, the other asked for nothing."""
    hide(hidden=quiet)
    try:
        for _ in progress(range(3), desc="measuring", clock=clock, file=file()):
            clock.now += 60
    finally:
        hide(hidden=False)

    assert [] == lines(caplog)


def test_a_stage_that_has_a_bar_already_gets_no_second_one(clock):
    """The trainer shows its own on a terminal."""
    terminal = Terminal()
    assert [0, 1] == list(progress(range(2), desc="evaluating", on_terminal=False, file=terminal))

    assert "" == terminal.getvalue()

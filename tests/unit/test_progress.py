"""Progress is a bar on a terminal, else a line every 30 s, and nothing where quiet is asked for."""

import io
import logging
import re
from contextlib import nullcontext

import pytest

from packplan.adapters.progress import hide, loading_libraries, progress
from packplan.app.cli.command import run_command
from tests.fakes import Terminal


@pytest.mark.parametrize(("quiet", "file", "shown"), [
    (False, Terminal, True), (True, Terminal, False), (False, io.StringIO, False), (True, io.StringIO, False),
])  # fmt: skip
def test_progress_is_shown_on_a_terminal_unless_it_is_to_be_quiet(quiet, file, shown):
    """With the time left; whatever an earlier command of the process was told."""
    hide(hidden=not quiet)
    seen = file()

    def command():
        assert [0, 1, 2] == list(progress(range(3), desc="measuring", file=seen))

    assert 0 == run_command(command, verbose=False, quiet=quiet)
    assert shown == ("measuring" in seen.getvalue())
    assert shown == ("00:00<" in seen.getvalue())


@pytest.mark.parametrize("quiet", [False, True])
def test_warnings_are_marked_as_warnings(capfd, monkeypatch, quiet):
    """A note is not; quiet keeps them, and other ranks say which they are."""
    log = logging.getLogger("packplan.app.anything")

    def command():
        log.info("%s is planned", "a note")
        log.warning("%s is dropped", "a pack")

    for rank, name in (("0", "packplan"), ("3", "packplan rank 3")):
        monkeypatch.setenv("RANK", rank)
        assert 0 == run_command(command, verbose=False, quiet=quiet)
        note = ["packplan: a note is planned"] * (rank == "0" and not quiet)
        assert [*note, f"{name}: warning: a pack is dropped"] == capfd.readouterr().err.splitlines()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_loading_is_shown_on_a_terminal_until_it_is_over(error):
    """And nothing is left of it, also where it ends by Ctrl-C or an error, which passes through."""
    file = Terminal()
    hide(hidden=False)

    expected = nullcontext() if error is None else pytest.raises(error)
    with expected, loading_libraries(file=file):
        shown = file.getvalue()
        if error is not None:
            raise error

    assert ("packplan: loading torch, ", "\r") == (shown[:25], shown[-1])
    assert f"{shown}\r\033[K" == file.getvalue()


@pytest.mark.parametrize(
    ("kind", "rank", "quiet"),
    [(io.StringIO, "0", False), (Terminal, "1", False), (Terminal, "0", True)],
    ids=["no terminal", "another rank", "quiet"],
)
def test_loading_that_nobody_reads_writes_nothing(monkeypatch, kind, rank, quiet):
    monkeypatch.setenv("RANK", rank)
    hide(hidden=quiet)

    with loading_libraries(file=(file := kind())):
        pass

    assert "" == file.getvalue()


def lines(caplog, items=None, **options) -> list[str]:
    """Return the lines of a stage that takes three items, without a terminal."""
    caplog.set_level(logging.INFO)
    with progress(items, desc="measuring train", **{"file": io.StringIO(), **options}) as bar:
        bar.set_postfix_str("93 packs", refresh=False)
        for _ in range(3):
            bar.update(500)
    return [record.getMessage() for record in caplog.records]


def test_lines_have_done_total_rate_and_time_left(caplog):
    """Not sooner than they are due, and not of what an earlier run has done."""
    stage = {"total": 5_000, "initial": 1_000, "unit": " samples"}
    assert [] == lines(caplog, **stage)

    last = lines(caplog, **stage, mininterval=0)[-1]

    assert re.fullmatch(r"measuring train: 2,500 of 5,000 samples, +[\d.]+ samples/s, 00:00 left, 93 packs", last)


def test_a_stage_without_an_end_says_what_it_does_and_how_long(caplog):
    assert "measuring train, 93 packs, 00:00 so far" == lines(caplog, bar_format="{desc}", mininterval=0)[-1]


@pytest.mark.parametrize(("file", "quiet"), [(Terminal, False), (io.StringIO, True)])
def test_terminals_and_quiet_have_no_lines(caplog, file, quiet):
    """The one has a bar, the other asked for nothing."""
    hide(hidden=quiet)

    assert [] == lines(caplog, file=file(), mininterval=0)

"""Progress is for people at a terminal, who did not ask for quiet."""

from __future__ import annotations

import io
import logging

import pytest

from adapters.progress import hide, progress
from app.cli.command import run_command
from tests.fakes import Terminal


@pytest.fixture(autouse=True)
def _shown_again():
    yield
    hide(hidden=False)


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
    log = logging.getLogger("app.anything")

    def command():
        log.info("%s is planned", "a note")
        log.warning("%s is dropped", "a pack")

    for rank, name in (("0", "packplan"), ("3", "packplan rank 3")):
        monkeypatch.setenv("RANK", rank)
        assert 0 == run_command(command, verbose=False, quiet=quiet)
        note = ["packplan: a note is planned"] * (rank == "0" and not quiet)
        assert [*note, f"{name}: warning: a pack is dropped"] == capfd.readouterr().err.splitlines()

"""Progress is a bar on a terminal, else a line every 30 s, and nothing where quiet is asked for."""

import io
import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from itertools import product
from multiprocessing import get_context

import pytest

from packplan.adapters.progress import TrainingBar, hide, loading_libraries, progress
from packplan.app.cli.command import run_command
from packplan.core.errors import LINE_WIDTH, format_command


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("quiet", "file"), [*product([False, True], [Terminal, io.StringIO])])
def test_progress_is_shown_on_a_terminal_unless_it_is_to_be_quiet(quiet, file):
    """With the time left; whatever an earlier command of the process was told."""
    hide(hidden=not quiet)
    seen = file()

    assert 0 == run_command(lambda: [*progress(range(3), desc="measuring", file=seen)], verbose=False, quiet=quiet)
    shown = file is Terminal and not quiet
    assert (shown, shown) == ("measuring" in seen.getvalue(), "00:00<" in seen.getvalue())


class Deadly(Terminal):
    def write(self, text):
        os.kill(os.getpid(), signal.SIGKILL)


def draw_steps(file):
    """Draw and remove the bar of optimizer steps."""
    bar = TrainingBar(2, file=file)
    bar.update(done=1, text="loss 1.5000")
    bar.close()


@pytest.mark.parametrize("draw", [lambda file: [*progress([0], file=file)], draw_steps], ids=["stage", "steps"])
def test_a_process_killed_while_it_shows_progress_holds_up_no_other(draw):
    """Processes forked from one that has shown progress itself, or draws it now."""
    hide(hidden=False)
    draw(Terminal())
    drawn = TrainingBar(2, file=Terminal())

    for file, status in ((Deadly, -signal.SIGKILL), (Terminal, 0)):
        forked = get_context("fork").Process(target=draw, args=(file(),))
        forked.start()
        forked.join(60)
        forked.kill()
        forked.join()
        assert status == forked.exitcode
    drawn.close()


def test_what_is_logged_appears_above_the_bar_of_steps_which_is_removed(monkeypatch):
    """With its numbers as they are, and no cursor hidden, also of a process that is killed."""
    monkeypatch.setattr(sys, "stderr", file := Terminal())

    def command():
        bar = TrainingBar(4, done=1)
        logging.getLogger("packplan.app.anything").warning("[a pack] is dropped")
        bar.update(done=2, text="loss 1.5000")
        assert file.getvalue().rfind("\033[?25h") > file.getvalue().rfind("\033[?25l")
        bar.close()
        logging.getLogger("packplan.app.anything").info("the end")

    assert 0 == run_command(command, verbose=False)
    assert sys.stderr is file
    drawn, end = file.getvalue().rsplit("\033[2K", 1)
    assert "packplan: the end\n" == end
    plain = re.sub(r"\033\[[\d;?]*[A-Za-z]", "", drawn)
    assert "\rpackplan: warning: [a pack] is dropped\n" in plain
    assert re.search(r"2/4 .*loss 1\.5000 .* left", plain.partition("is dropped\n")[2])


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


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        ("pass", "packplan rank 3: warning: a pack is dropped"),
        ("logging.basicConfig()", "WARNING:packplan.hf:a pack is dropped"),
        ("logging.root.setLevel(logging.INFO)", "packplan rank 3: warning: a pack is dropped"),
        ("logging.getLogger('packplan').addHandler(logging.StreamHandler())", "a pack is dropped"),
    ],
)
def test_warnings_in_another_program_are_named_once(prepare, says):
    """By that program's own log if it has one; notes are not shown."""
    logged = "log = logging.getLogger('packplan.hf'); log.info('a note'); log.warning('%s is dropped', 'a pack')"
    script = f"import logging, packplan.adapters.progress; {prepare}; {logged}"
    ended = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "RANK": "3"}, capture_output=True, check=True
    )
    assert f"{says}\n" == ended.stderr.decode()


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize(
    ("kind", "rank", "quiet"), [(Terminal, "0", False), (io.StringIO, "0", False), (Terminal, "1", False),
                                (Terminal, "0", True)],
)  # fmt: skip
def test_loading_is_shown_where_it_is_read_and_nothing_is_left_of_it(monkeypatch, kind, rank, quiet, error):
    """Also where it ends by Ctrl-C or an error, which passes through."""
    monkeypatch.setenv("RANK", rank)
    hide(hidden=quiet)

    with nullcontext() if error is None else pytest.raises(error), loading_libraries(file=(file := kind())):
        shown = file.getvalue()
        if error is not None:
            raise error

    is_read = (kind, rank, quiet) == (Terminal, "0", False)
    assert is_read == bool(re.fullmatch(r"packplan: loading torch, .*\r", shown))
    assert shown + "\r\033[K" * is_read == file.getvalue()


def log_stage(caplog, **options) -> list[str]:
    """Return the log lines of a stage that takes three items, without a terminal."""
    caplog.set_level(logging.INFO)
    with progress(desc="measuring train", **{"file": io.StringIO(), "mininterval": 0, **options}) as bar:
        bar.set_postfix_str("93 packs", refresh=False)
        for _ in range(3):
            bar.update(500)
    return [record.getMessage() for record in caplog.records]


def test_lines_say_what_is_done_and_what_is_left(caplog):
    """Not before they are due, on a terminal, quiet, or of an earlier run."""
    stage = {"total": 5_000, "initial": 1_000, "unit": " samples"}
    assert [] == log_stage(caplog, **stage, mininterval=30) == log_stage(caplog, file=Terminal())
    hide(hidden=True)
    assert [] == log_stage(caplog)
    hide(hidden=False)

    last = log_stage(caplog, **stage)[-1]

    assert re.fullmatch(r"measuring train: 2,500 of 5,000 samples, +[\d.]+ samples/s, 00:00 left, 93 packs", last)
    assert "measuring train, 93 packs, 00:00 so far" == log_stage(caplog, bar_format="{desc}")[-1]


def test_no_line_of_a_log_is_wider_than_a_console(capsys):
    """Lines break between words; a word that is wider is whole, and so is a shell command."""
    path, log = "/data" * 30, logging.getLogger("packplan.unit")
    texts = [" ".join(["word"] * 99), f"saved {path} now", format_command("swift infer", *["--model run"] * 9)]

    assert 0 == run_command(lambda: [log.warning("%s", text) for text in texts], verbose=False)

    lines = capsys.readouterr().err.splitlines()
    assert [] == [line for line in lines if len(line) > LINE_WIDTH and path not in line]
    assert "".join(lines).count("word") == 99
    assert 9 == sum(line.endswith(" \\") for line in lines)

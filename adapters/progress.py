"""
Shows progress and the remaining time by a bar on a terminal, or else by a log line every 30 s.

`hide` turns bars and lines off. `TrainingBar` is the bar for optimizer steps. In a program that
sets up no logging, such as a script with TRL, each of Packplan's warnings begins with `packplan`.
"""

import gc
import io
import logging
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

from packplan.core.errors import fit_lines

log = logging.getLogger(__name__)

LINE_S = 30.0
"""Seconds between two log lines about the same stage."""

BRIEF_S = 2.0
"""Value of `delay` for stages that may be short: seconds before their bar appears."""

_LOADING = "packplan: loading torch, transformers and ms-swift …"

_CLEAR = "\r\033[K"
"""Control sequence that clears the cursor's line on a terminal."""

_state = {"hidden": False}


def hide(*, hidden: bool) -> None:
    """Hide all progress bars and lines of this process, or show them again if not *hidden*."""
    _state["hidden"] = hidden


@contextmanager
def loading_libraries(*, file: TextIO | None = None) -> Iterator[None]:
    """
    Show a line on a terminal while this context imports torch, transformers and ms-swift.

    Garbage collection is paused in the context. Imports create a million objects that live as long
    as the process, and collecting garbage among them took 1.3 s of 8 s.

    Args:
        file: Terminal to write to; None means standard error.
    """
    file = sys.stderr if file is None else file
    is_shown = not _state["hidden"] and file.isatty() and os.environ.get("RANK", "0") == "0"
    if is_shown:
        # The cursor returns to the line's start, so that other output replaces the line. A line
        # that wraps could not be removed.
        print(_LOADING[: shutil.get_terminal_size().columns - 1], end="\r", file=file, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if is_shown:
            print(_CLEAR, end="", file=file, flush=True)


def progress(items: Iterable[Any] | None = None, *, on_terminal: bool = True, **options: Any) -> Any:
    """
    Return a tqdm bar, which becomes a log line every `LINE_S` seconds if there is no terminal.

    Args:
        items: Items over which the bar iterates; None if the caller updates the bar.
        on_terminal: Whether a terminal shows the bar; false if another bar shows the same stage.
        **options: Options of tqdm.
    """
    file = options.get("file") or sys.stderr
    if _state["hidden"] or (file.isatty() and not on_terminal):
        return _Bar(items, disable=True, **options)
    if file.isatty():
        return _Bar(items, **options)
    known = options.get("total") is not None or hasattr(items, "__len__")
    done = "{desc}: {n:,} of {total:,}{unit}, {rate_noinv_fmt}, {remaining} left{postfix}"
    form = done if known else "{desc}{postfix}, {elapsed} so far"
    # A delay above 0 suppresses the line at the start. The fixed position suppresses line breaks
    # for nested bars.
    lines = {"bar_format": form, "file": _LogLines(), "delay": 1e-9, "miniters": 1, "leave": False, "position": 0}
    return _Bar(items, **{"mininterval": LINE_S, **options, **lines})


class _Bar(tqdm):  # type: ignore[misc]  # its library has no types
    """tqdm bar without the monitor thread, since processes with threads should not fork."""

    monitor_interval = 0

    # All forked processes would share tqdm's own lock: if one were killed while it writes, the
    # others would wait forever.
    _lock = threading.RLock()


class TrainingBar:
    """
    Bar of training steps at the bottom of a terminal; other output appears above the bar.

    No thread draws the bar, since processes with threads should not fork.
    """

    def __init__(self, total: int, *, done: int = 0, file: TextIO | None = None) -> None:
        """
        Draw the bar at its first position.

        Args:
            total: Number of optimizer steps in the run.
            done: Number of steps that are already done.
            file: Terminal to draw on; None means standard error.
        """
        from rich.console import Console  # no command but training draws it
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(file=sys.stderr if file is None else file, force_terminal=True, highlight=False)
        self._progress = Progress(
            MofNCompleteColumn(), BarColumn(None), TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(compact=True), TextColumn("left"),
            console=console, auto_refresh=False, transient=True, expand=True, redirect_stdout=sys.stdout.isatty(),
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total, completed=done)
        self._progress.start()
        console.show_cursor()  # a process that is killed could not show it again

    def update(self, *, done: int | None = None, text: str | None = None) -> None:
        """
        Draw the bar at its new position.

        Args:
            done: Number of steps that are done; None keeps the last number.
            text: Text to the right of the bar, such as the loss; None keeps the last text.
        """
        self._progress.update(self._task, completed=done, description=text, refresh=True)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._progress.stop()


class _HostLines(logging.Handler):
    """
    Handler that prints Packplan's warnings after `packplan` in programs that set up no logging.
    """

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and all(one is self for one in logger.handlers):
            logger = logger.parent if logger.propagate else None
        if logging.lastResort is not None and logger is None:
            rank = os.environ.get("RANK", "0")
            name = f"packplan{f' rank {rank:.9}' if rank != '0' else ''}: {record.levelname.lower()}"
            text = fit_lines(f"{name}: {record.getMessage()}")
            logging.lastResort.handle(logging.makeLogRecord({**vars(record), "msg": text, "args": ()}))


logging.getLogger("packplan").addHandler(_HostLines(logging.WARNING))  # commands replace it


class _LogLines(io.StringIO):
    """File object for tqdm that logs each text written to it."""

    def write(self, text: str) -> int:
        if line := " ".join(text.split()):
            log.info("%s", line)
        return len(text)

"""
How far a long stage has come, with the time left: a bar on a terminal, a line every 30 s elsewhere,
nothing for who asks for quiet. A wait of some seconds without steps is a line on a terminal alone,
which is gone when it is over.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TextIO

from tqdm import tqdm

log = logging.getLogger(__name__)

LINE_S = 30.0
"""Seconds between two lines of a stage."""

BRIEF_S = 2.0
"""Stages that may be over sooner than this show their bar no sooner: `delay=BRIEF_S`."""

NOTICED_S = 0.5
"""Seconds of silence after which a person at a terminal wonders."""

_CLEAR = "\r\033[K"
"""What removes the line that a terminal's cursor is in."""

_state = {"hidden": False}


def hide(*, hidden: bool) -> None:
    """Show no progress in this process from now on, or show it again."""
    _state["hidden"] = hidden


@contextmanager
def waiting(what: str, *, file: TextIO | None = None, noticed_s: float = NOTICED_S) -> Iterator[None]:
    """
    Show what this process is busy with, on a terminal and if it takes long; nothing is left of that
    afterwards, however it ends.

    Args:
        what: What it does.
        file: The terminal; None is standard error.
        noticed_s: Seconds after which it is shown.
    """
    file = sys.stderr if file is None else file
    if _state["hidden"] or file is None or not file.isatty() or os.environ.get("RANK", "0") != "0":
        yield
        return
    over = threading.Event()
    shown = threading.Thread(target=_show, args=(what, file, over, noticed_s), daemon=True)
    shown.start()
    try:
        yield
    finally:
        over.set()
        shown.join()


@contextmanager
def loading_libraries() -> Iterator[None]:
    """
    Say that torch, transformers and ms-swift are being imported, and collect no garbage meanwhile.

    They make a million objects that live as long as the process; looking for garbage among them
    again and again took 1.3 s of 8.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with waiting("loading torch, transformers and ms-swift"):
            yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def _show(what: str, file: TextIO, over: threading.Event, noticed_s: float) -> None:
    """Show a line from a while after now until it is *over*."""
    if over.wait(noticed_s):
        return
    # At the line's start again, so that what others print meanwhile replaces it. A line that wraps
    # could not be removed.
    file.write(f"packplan: {what} …"[: shutil.get_terminal_size().columns - 1] + "\r")
    file.flush()
    over.wait()
    file.write(_CLEAR)
    file.flush()


def progress(
    items: Iterable[Any] | None = None,
    *,
    on_terminal: bool = True,
    clock: Callable[[], float] = time.monotonic,
    **options: Any,
) -> Any:
    """
    Return what iterates over *items* and shows how far it is, as tqdm does; or a bar to update by
    hand.

    Args:
        items: What to iterate over; None for a bar that is updated by hand.
        on_terminal: Whether a terminal is to have a bar; not where another one is shown for the
            same stage.
        clock: Gives the seconds now, for the lines where there is no terminal.
        **options: tqdm's.
    """
    file = options.get("file") or sys.stderr
    if _state["hidden"] or (file.isatty() and not on_terminal):
        return tqdm(items, disable=True, **options)
    if file.isatty():
        return tqdm(items, **options)
    return Lines(items, clock=clock, **options)


class Lines:
    """
    What progress uses of tqdm's bar, as log lines: done, total, rate and time left.

    Attributes:
        n: Items that are done, those of an earlier run included.
    """

    def __init__(
        self,
        items: Iterable[Any] | None = None,
        *,
        clock: Callable[[], float],
        desc: str = "",
        total: int | None = None,
        initial: int = 0,
        unit: str = "",
        **_: Any,
    ) -> None:
        """
        Begin a stage.

        Args:
            items: What to iterate over, if anything.
            clock: Gives the seconds now.
            desc: What is being done.
            total: Items in all, those of an earlier run included; None takes the length of *items*,
                if that has one.
            initial: Items that an earlier run has done.
            unit: What an item is, in the plural and after a space.
            **_: What tqdm draws its bar with.
        """
        self._items, self._clock, self._desc, self._unit = items, clock, desc, unit
        self._total = len(items) if total is None and hasattr(items, "__len__") else total  # type: ignore[arg-type]
        self.n = self._first = initial
        self._words = ""
        self._started = self._said = clock()

    def __iter__(self) -> Iterator[Any]:
        for item in self._items or ():
            yield item
            self.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set_postfix_str(self, words: str, refresh: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002  # as tqdm has it
        """Say *words* in the lines to come."""
        self._words = words

    def update(self, number: int = 1) -> None:
        """Count items that were done, and log a line if it is time."""
        self.n += number
        if (now := self._clock()) - self._said >= LINE_S:
            self._said = now
            log.info("%s: %s", self._desc, self._line(now - self._started))

    def _line(self, spent_s: float) -> str:
        parts = [self._words] if self._words else []
        rate = (self.n - self._first) / spent_s
        if self._total is not None:
            parts.append(f"{self.n:,} of {self._total:,}{self._unit}, {rate:,.{0 if rate >= 10 else 2}f}/s")
        if self._total is not None and rate:
            parts.append(f"{_time((self._total - self.n) / rate)} left")
        else:
            parts.append(f"{_time(spent_s)} so far")
        return ", ".join(parts)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))

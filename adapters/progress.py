"""
Progress of long stages, with the time left: a bar on a terminal, a log line every 30 s elsewhere.

`hide` turns all of it off.
"""

import gc
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TextIO

from tqdm import tqdm

log = logging.getLogger(__name__)

LINE_S = 30.0
"""Seconds between two log lines of a stage."""

BRIEF_S = 2.0
"""Delay of the bar for stages that may be short: `delay=BRIEF_S`."""

_LOADING = "packplan: loading torch, transformers and ms-swift …"

_CLEAR = "\r\033[K"
"""Control sequence that removes the terminal line of the cursor."""

_state = {"hidden": False}


def hide(*, hidden: bool) -> None:
    """Hide or show the progress of this process from now on."""
    _state["hidden"] = hidden


@contextmanager
def loading_libraries(*, file: TextIO | None = None) -> Iterator[None]:
    """
    Show on a terminal that torch, transformers and ms-swift are being imported, and pause garbage
    collection. The line is removed at the end.

    Imports make a million objects that live as long as the process. Collecting garbage among them
    took 1.3 s of 8.

    Args:
        file: Terminal; None for standard error.
    """
    file = sys.stderr if file is None else file
    is_shown = not _state["hidden"] and file.isatty() and os.environ.get("RANK", "0") == "0"
    if is_shown:
        # The cursor returns to the line's start, so that other output replaces the line. A line
        # that wraps could not be removed.
        file.write(_LOADING[: shutil.get_terminal_size().columns - 1] + "\r")
        file.flush()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
        if is_shown:
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
    Return an iterator over *items* that shows progress as tqdm does, or a bar to update by hand.

    Args:
        items: Items to iterate over; None for a bar that is updated by hand.
        on_terminal: Whether a terminal shows the bar; false if another bar shows the same stage.
        clock: Function that returns the current time in seconds.
        **options: Options of tqdm.
    """
    file = options.get("file") or sys.stderr
    if _state["hidden"] or (file.isatty() and not on_terminal):
        return tqdm(items, disable=True, **options)
    if file.isatty():
        return tqdm(items, **options)
    return Lines(items, clock=clock, **options)


class Lines:
    """
    Stand-in for tqdm's bar that logs lines: items done, total, rate and time left.

    Attributes:
        n: Items done, those of an earlier run included.
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
            items: Items to iterate over, if any.
            clock: Function that returns the current time in seconds.
            desc: Name of the stage.
            total: All items, those of an earlier run included; None for the length of *items*, if
                known.
            initial: Items that an earlier run has done.
            unit: Name of an item, in the plural and after a space.
            **_: Options for tqdm's bar.
        """
        self._items, self._clock, self._desc, self._unit = items, clock, desc, unit
        self._total = len(items) if total is None and hasattr(items, "__len__") else total  # type: ignore[arg-type]
        self.n = self._first = initial
        self._words = ""
        self._started = self._logged = clock()

    def __iter__(self) -> Iterator[Any]:
        for item in self._items or ():
            yield item
            self.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set_postfix_str(self, words: str, refresh: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002  # as tqdm has it
        """Start later lines with *words*."""
        self._words = words

    def update(self, number: int = 1) -> None:
        """Count items as done, and log a line every `LINE_S` seconds."""
        self.n += number
        if (now := self._clock()) - self._logged >= LINE_S:
            self._logged = now
            log.info("%s: %s", self._desc, self._line(now - self._started))

    def _line(self, spent_s: float) -> str:
        parts = [self._words] if self._words else []
        rate = (self.n - self._first) / spent_s
        if self._total is not None:
            parts.append(f"{self.n:,} of {self._total:,}{self._unit}, {rate:,.{0 if rate >= 10 else 2}f}/s")
        if self._total is not None and rate:
            parts.append(f"{_duration((self._total - self.n) / rate)} left")
        else:
            parts.append(f"{_duration(spent_s)} so far")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))

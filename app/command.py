"""What every command does around its work: logging, and errors turned into one message and an exit status."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from app import progress
from core.errors import PackplanError, VerificationError

KEPT = "what was measured, planned and saved is kept; run again to go on"
"""What Ctrl-C leaves, of most commands."""

BROKEN_PIPE, USER_ERROR, VERIFICATION_FAILED, INTERRUPTED = 1, 2, 3, 130

MOST_RANKS = 100_000


def add_logging_options(parser: argparse.ArgumentParser) -> None:
    """Declare --quiet and --verbose, which every command that loads ms-swift takes."""
    add_quiet_option(parser)
    parser.add_argument("--verbose", action="store_true", help="also show what ms-swift and transformers log")


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    """Declare --quiet."""
    parser.add_argument(
        "--quiet", action="store_true", help="show neither progress nor notes, only warnings and errors"
    )


def run_command(command: Callable[[], None], *, verbose: bool, quiet: bool = False, kept: str = KEPT) -> int:
    """
    Run *command*; return 0, 2 for the user's fault, 3 for a failed verification, 130 for Ctrl-C.

    Args:
        command: What to run.

        verbose: Also show what the libraries log.

        quiet: Show neither progress nor notes.

        kept: What is said after Ctrl-C: what is left, and how to go on.

    Any other exception is our own fault, and keeps its traceback.
    """
    progress.hide(hidden=quiet)
    _set_up_logging(verbose=verbose, quiet=quiet)
    try:
        command()
        sys.stdout.flush()
    except PackplanError as error:
        rank = os.environ.get("RANK")
        print(f"error{f' (rank {rank})' if rank else ''}: {error}", file=sys.stderr)
        return VERIFICATION_FAILED if isinstance(error, VerificationError) else USER_ERROR
    except BrokenPipeError:
        # Whoever read what is printed has seen enough, as `| head` does; what is left to flush goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        print(f"interrupted: {kept}", file=sys.stderr)
        return INTERRUPTED
    return 0


def program(name: str) -> str:
    """Return what the help of the command *name* calls it: as it was started, by `packplan` or as a module."""
    return f"packplan {name}" if Path(sys.argv[0]).stem == "packplan" else f"python -m app.{name}"


def positive_number(text: str) -> int:
    """Read a whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        message = f"is {text}, but has to be a whole number of at least 1"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def whole_number(text: str) -> int:
    """Read a whole number of at least 0, for argparse."""
    if not text.isdecimal():
        message = f"is {text}, but has to be a whole number of at least 0"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def world_size(text: str) -> int:
    """Read a number of ranks, for argparse."""
    ranks = positive_number(text)
    if ranks > MOST_RANKS:
        message = f"is {ranks:,}, but has to be at most {MOST_RANKS:,} ranks"
        raise argparse.ArgumentTypeError(message)
    return ranks


def positive_numbers(text: str, number: Callable[[str], int] = positive_number) -> list[int]:
    """Read several whole numbers of at least 1, with commas between them, for argparse."""
    return sorted({number(part.strip()) for part in text.split(",")})


def world_sizes(text: str) -> list[int]:
    """Read several numbers of ranks, with commas between them, for argparse."""
    return positive_numbers(text, world_size)


class _MarkWarnings(logging.Formatter):
    """Lines begin with the program's name, and those that are no mere notes with what they are."""

    def __init__(self, prefix: str) -> None:
        super().__init__(f"{prefix}: %(message)s")
        self._marked = logging.Formatter(f"{prefix}: %(kind)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno < logging.WARNING:
            return super().format(record)
        record.kind = record.levelname.lower()
        return self._marked.format(record)


def _set_up_logging(*, verbose: bool, quiet: bool) -> None:
    """Log to standard error: all of ours on rank 0, warnings of other ranks, of the libraries, and in quiet."""
    rank = int(os.environ.get("RANK", "0"))
    handler = logging.StreamHandler()
    handler.setFormatter(_MarkWarnings("packplan" if rank == 0 else f"packplan rank {rank}"))
    for name in ("app", "adapters"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO if rank == 0 and not quiet else logging.WARNING)
        logger.propagate = False
    if not verbose:
        for name in ("swift", "transformers", "accelerate"):
            logging.getLogger(name).setLevel(logging.ERROR)
        # Those that are not yet loaded set their own level then, from these.
        os.environ.setdefault("LOG_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

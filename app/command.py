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

USER_ERROR, VERIFICATION_FAILED, INTERRUPTED = 2, 3, 130


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
    except PackplanError as error:
        rank = os.environ.get("RANK")
        print(f"error{f' (rank {rank})' if rank else ''}: {error}", file=sys.stderr)
        return VERIFICATION_FAILED if isinstance(error, VerificationError) else USER_ERROR
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


def positive_numbers(text: str) -> list[int]:
    """Read several whole numbers of at least 1, with commas between them, for argparse."""
    return sorted({positive_number(part.strip()) for part in text.split(",")})


def _set_up_logging(*, verbose: bool, quiet: bool) -> None:
    """Log to standard error: all of ours on rank 0, warnings of other ranks, of the libraries, and in quiet."""
    rank = int(os.environ.get("RANK", "0"))
    handler = logging.StreamHandler()
    prefix = "packplan" if rank == 0 else f"packplan rank {rank}"
    handler.setFormatter(logging.Formatter(f"{prefix}: %(message)s"))
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

"""What every command does around its work: logging, and errors turned into one message and an exit status."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from core.errors import PackplanError, VerificationError

USER_ERROR, VERIFICATION_FAILED, INTERRUPTED = 2, 3, 130


def run_command(command: Callable[[], None], *, verbose: bool) -> int:
    """
    Run *command*; return 0, 2 for the user's fault, 3 for a failed verification, 130 for Ctrl-C.

    Any other exception is our own fault, and keeps its traceback.
    """
    _set_up_logging(verbose=verbose)
    try:
        command()
    except PackplanError as error:
        rank = os.environ.get("RANK")
        print(f"error{f' (rank {rank})' if rank else ''}: {error}", file=sys.stderr)
        return VERIFICATION_FAILED if isinstance(error, VerificationError) else USER_ERROR
    except KeyboardInterrupt:
        print("interrupted: what was measured, planned and saved is kept; run again to go on", file=sys.stderr)
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


def _set_up_logging(*, verbose: bool) -> None:
    """Log to standard error: all of ours on rank 0, warnings of other ranks and of the libraries."""
    rank = int(os.environ.get("RANK", "0"))
    handler = logging.StreamHandler()
    prefix = "packplan" if rank == 0 else f"packplan rank {rank}"
    handler.setFormatter(logging.Formatter(f"{prefix}: %(message)s"))
    for name in ("app", "adapters"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
        logger.propagate = False
    if not verbose:
        for name in ("swift", "transformers", "accelerate"):
            logging.getLogger(name).setLevel(logging.ERROR)

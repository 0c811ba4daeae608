"""Options, logging and exit statuses of all commands, and one message for each error."""

import argparse
import errno
import logging
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TextIO

from packplan.adapters.processes import end_with_launcher
from packplan.core.config.remedies import name_arguments
from packplan.core.errors import OutputError, PackplanError, VerificationError, fit_lines

if TYPE_CHECKING:
    from rich.console import Console

KEPT_NOTE = (
    "measured lengths, plans and checkpoints are kept: run again to continue (from a checkpoint with "
    "training.resume_from_checkpoint=last)"
)
"""Text that most commands print after Ctrl-C, about the work that is kept."""

RUN_HELP = "YAML of the run; see docs/configuration.md"
"""Help text of the argument that names a run's YAML."""

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""
Error numbers of a full disk, an exceeded quota, and a file that has reached its size limit.
"""

_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
"""Error numbers of a process, or a machine, that has reached its limit of open files."""

_LEAST_FILES, _MOST_FILES = 256, 2**16
"""
Minimum number of open files that a process needs, and the number to which its limit is raised.
"""

_TEXT: ContextVar[Callable[[str], str]] = ContextVar("text", default=str)
"""Function that converts errors of the current command before they are shown."""

_ELSEWHERE = "free disk space, or write elsewhere"

BROKEN_PIPE, USER_ERROR, VERIFICATION_FAILED, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143

_NO_LAUNCHER = "DeepSpeed needs a launcher: torchrun --nproc-per-node 1 -m packplan.app.sft RUN.yaml"
"""Message if DeepSpeed asks MPI (mpi4py) for the ranks, since no launcher has started ranks."""

EXTRAS = MappingProxyType({"ray": "ray", "deepspeed": "deepspeed", "qwen_omni_utils": "omni", "decord": "video"})
"""Package -> the extra of packplan that installs it; `train` installs all others."""


def command_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """
    Return an argument parser for `packplan NAME`; its help begins with the text *about*, unchanged.
    """
    return argparse.ArgumentParser(
        prog=f"packplan {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_logging_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options --quiet and --verbose, which every command has."""
    parser.add_argument(
        "--quiet", action="store_true", help="show neither progress nor notes, only warnings and errors"
    )
    parser.add_argument("--verbose", action="store_true", help="also show what ms-swift and transformers log")


def add_config_arguments(parser: argparse.ArgumentParser, *, about: str = RUN_HELP) -> None:
    """
    Declare the argument for a YAML, with the help text *about*, and the overrides; see
    `parse_arguments`.
    """
    parser.add_argument("config", metavar="run.yaml", help=about)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Declare arguments `section.key=value` that override keys of the command's YAML."""
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value",
        help="overrides a key of the YAML, such as training.seed=7; null unsets the key",
    )  # fmt: skip


def add_ray_option(parser: argparse.ArgumentParser) -> None:
    """Declare the option --ray, which measures lengths on a Ray cluster."""
    parser.add_argument(
        "--ray", nargs="?", const="auto", type=_parse_address, metavar="ADDRESS",
        help="measure on all nodes of a Ray cluster (default: the cluster at RAY_ADDRESS, or on this machine)",
    )  # fmt: skip


def _parse_address(text: str) -> str:
    """Parse an address of Ray, for argparse."""
    if "=" in text or text.endswith((".yaml", ".yml", ".jsonl", ".parquet")):
        raise argparse.ArgumentTypeError(f"{text} is not an address: write --ray=auto, or put --ray last")
    return text


def parse_arguments(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """
    Parse the options of a command; overrides may come before and after options.

    If a subcommand sets its own parser as the default of `parser`, that parser reports errors.
    """
    options, others = parser.parse_known_args(arguments)
    if wrong := [text for text in others if text.startswith("-") or "=" not in text]:
        from packplan.adapters.config.run import advise_overrides

        advice = advise_overrides(wrong, section="grpo" if parser.prog.endswith(" rl") else "training")
        parser = getattr(options, "parser", parser)
        how = f"; torchrun starts ranks: torchrun --nproc-per-node N -m {parser.prog.replace(' ', '.app.', 1)} run.yaml"
        advice = how if wrong[0].startswith(("--nproc", "--nnodes", "--world")) else advice
        parser.error(f"unrecognized arguments: {' '.join(wrong)}{advice}")
    options.overrides += others
    return options


def run_command(
    command: Callable[[], Any], *, verbose: bool, quiet: bool = False, kept: str = KEPT_NOTE, for_host: bool = False
) -> int:
    """
    Run *command*, and return its exit status.

    The status is 0 after success, 3 for a failed check, 1 for a closed pipe, 130 for Ctrl-C, and
    143 for SIGTERM. The status is 2 for a user's error, a full disk, and too many open files. Any
    other exception is a bug, and is raised. One rank alone prints an error that all ranks raise
    alike.

    Args:
        command: Function that does the work, and returns True if SIGTERM ended it early.
        verbose: Whether to also show log lines of the libraries.
        quiet: Whether to show only warnings and errors.
        kept: Note printed after Ctrl-C: which work is kept, and how to continue.
        for_host: Whether messages name arguments of an ms-swift command instead of keys of a YAML.
    """
    from packplan.adapters import progress

    end_with_launcher()
    # Read by OpenMP when torch is loaded. Threads that spin while they wait would keep a core from
    # the threads that they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    progress.hide(hidden=quiet)
    _TEXT.set(name_arguments if for_host else str)
    _set_up_logging(_TEXT.get(), verbose=verbose, quiet=quiet)
    try:
        _raise_file_limit()
        terminated = command()
        _flush()
    except PackplanError as error:
        print_once(error)
        return VERIFICATION_FAILED if isinstance(error, VerificationError) else USER_ERROR
    except KeyboardInterrupt:
        _print_error(f"interrupted: {kept}")
        return INTERRUPTED
    except BrokenPipeError as error:
        return _report_output_error(error)
    except OSError as error:
        if error.errno in _TOO_MANY_FILES:
            _print_error(f"error: {error.strerror}: raise the limit of open files with ulimit -n {_MOST_FILES}")
            return USER_ERROR
        if error.errno not in _FULL_DISK:
            raise
        return _report_full_disk(error)
    return TERMINATED if terminated is True else 0


def print_once(error: Exception) -> None:
    """
    Print an error of Packplan, unless it has been printed. Under a launcher, the line names the
    rank. Other errors are bugs, and are not printed here.
    """
    if isinstance(error, PackplanError) and not error.is_printed:
        rank = os.environ.get("RANK")
        _print_error(f"error{f' (rank {rank})' if rank else ''}: {_TEXT.get()(str(error))}")
        error.is_printed = True


def _raise_file_limit() -> None:
    """Raise the soft limit of open files to at most 65,536; OSError if only 255 are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if 0 <= soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if 0 <= soft < _LEAST_FILES:
        raise OSError(errno.EMFILE, f"this process may open only {soft} files here, and {_LEAST_FILES} are needed")


def run_program(main: Callable[[], int]) -> int:
    """
    Run the main function of a program, flush its output, and return its exit status.

    argparse, Ctrl-C or a missing package may end the program early.

    Args:
        main: Main function, which reads the command line and returns the exit status.
    """
    try:
        status: int = main()
    except SystemExit as ended:
        status = int(ended.code or 0)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "packplan"):
            raise
        extra = f"this command needs the package {package}: pip install 'packplan[{EXTRAS.get(package, 'train')}]'"
        _print_error(f"error: {_NO_LAUNCHER if package == 'mpi4py' else extra}")
        status = USER_ERROR
    except KeyboardInterrupt:
        _print_error("interrupted")
        status = INTERRUPTED
    # Only the end is left, so another Ctrl-C has nothing to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _flush()
    except OSError as error:
        return _report_output_error(error)
    return status


def _flush() -> None:
    """Flush standard output, unless the program was started without it."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _report_full_disk(error: OSError) -> int:
    """Print which output cannot be written, and return the exit status."""
    try:
        _flush()
    except OSError as of_output:
        return _report_output_error(of_output)
    reason = error.strerror or str(error)
    unnamed = f"standard output or a file cannot be written: {reason}; {_ELSEWHERE}"
    _print_error(f"error: {unnamed if error.filename is None else OutputError(str(error.filename), reason)}")
    return USER_ERROR


def _report_output_error(error: OSError) -> int:
    """
    Stop writing to standard output, and return the exit status. Print the error, unless the reader
    has closed the pipe, as `| head` does.
    """
    _discard_output(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    _print_error(f"error: standard output cannot be written: {error.strerror or error}; {_ELSEWHERE}")
    return USER_ERROR


def _print_error(text: str) -> None:
    """Print to standard error; do nothing if it is closed."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        _discard_output(sys.stderr)


def _discard_output(stream: TextIO) -> None:
    """Send the unwritten output of a stream, and all further output, to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def plain_console(width: int | None = None) -> "Console":
    """
    Return a console that prints text unchanged, and does not wrap lines.

    *width* is the width of tables in columns, used if standard output is not a terminal.
    """
    from rich.console import Console

    return Console(width=None if Console().is_terminal else width, highlight=False, markup=False, soft_wrap=True)


def time_text(seconds: float) -> str:
    """
    Return seconds as text, in hours, minutes, seconds or milliseconds.

    >>> [time_text(one) for one in (0.25, 9, 100, 7200)]
    ['250 ms', '9.0 s', '1.7 min', '2.00 h']
    """
    if seconds >= 60:
        return f"{seconds / 3600:,.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def parse_number(text: str, least: int = 0, most: int | None = None) -> int:
    """
    Parse a whole number, for argparse.

    Args:
        text: Text of the argument.
        least: Smallest accepted number.
        most: Largest accepted number; None for no limit.
    """
    if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
        bound = f"at least {least}" if most is None else f"at least {least} and at most {most:,}"
        raise argparse.ArgumentTypeError(f"is {text or 'empty'}, but has to be a whole number of {bound}")
    return int(text)


def parse_positive(text: str) -> int:
    """Parse a whole number of at least 1, for argparse."""
    return parse_number(text, least=1)


def parse_ranks(text: str) -> int:
    """Parse a number of ranks, for argparse."""
    from packplan.core.lengths import MOST_RANKS

    return parse_number(text, least=1, most=MOST_RANKS)


def parse_positives(text: str, parse: Callable[[str], int] = parse_positive) -> list[int]:
    """
    Parse comma-separated numbers of at least 1, for argparse; return them sorted, without
    duplicates.
    """
    return sorted({parse(part.strip()) for part in text.split(",")})


def parse_rank_counts(text: str) -> list[int]:
    """
    Parse comma-separated numbers of ranks, for argparse; return them sorted, without duplicates.
    """
    return parse_positives(text, parse_ranks)


class _LevelFormatter(logging.Formatter):
    """Formatter that writes the level before warnings and errors, and wraps long lines."""

    def __init__(self, form: str, text: Callable[[str], str]) -> None:
        super().__init__(form)
        self._text = text

    def format(self, record: logging.LogRecord) -> str:
        record.mark = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return fit_lines(self._text(super().format(record)))


class _ErrorOutput(logging.Handler):
    """Handler that writes to the current standard error, above a progress bar if one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        _print_error(self.format(record))


def _set_up_logging(text: Callable[[str], str], *, verbose: bool, quiet: bool) -> None:
    """
    Log to standard error; *text* converts each line of Packplan before it is shown.

    Rank 0 logs notes, warnings and errors, and with --verbose also details. Other ranks and runs
    with --quiet log only warnings and errors. Without --verbose, libraries log only errors.
    """
    rank = os.environ.get("RANK", "0")
    form = f"packplan{f' rank {rank:.9}' if rank != '0' else ''}: %(mark)s%(message)s"
    logger = logging.getLogger("packplan")
    logger.handlers = [_ErrorOutput()]
    logger.handlers[0].setFormatter(_LevelFormatter(form, text))
    logger.setLevel((logging.DEBUG if verbose else logging.INFO) if rank == "0" and not quiet else logging.WARNING)
    logger.propagate = False
    if not verbose:
        for name in ("swift", "transformers", "accelerate"):
            logging.getLogger(name).setLevel(logging.ERROR)
        # DeepSpeed calls them in each step of each rank.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        # Libraries that are loaded later take their levels from these variables.
        os.environ.setdefault("LOG_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

"""Declares options that several benchmarks have in the same form."""

import argparse
import shlex
from collections.abc import Collection, Sequence

from packplan.app.cli.command import parse_positive


def add_number(
    parser: argparse.ArgumentParser, name: str, default: int | Sequence[int], about: str, *, metavar: str = "N"
) -> None:
    """
    Declare an option for a positive whole number, or for several if its default has several.

    Args:
        parser: Parser of the benchmark.
        name: Name of the option, with its dashes.
        default: Value if the option is not given.
        about: Help text, to which the default is added.
        metavar: Name of a number in the help.
    """
    several = isinstance(default, Sequence)
    shown = " ".join(map(str, default)) if isinstance(default, Sequence) else default
    parser.add_argument(
        name, type=parse_positive, nargs="+" if several else None, default=default, metavar=metavar,
        help=f"{about} (default: {shown})",
    )  # fmt: skip


def add_names(
    parser: argparse.ArgumentParser, name: str, choices: Collection[str], default: Collection[str], about: str = ""
) -> None:
    """
    Declare an option for one or more names.

    Args:
        parser: Parser of the benchmark.
        name: Name of the option, with its dashes.
        choices: All allowed names.
        default: Names if the option is not given.
        about: Help text after the allowed names.
    """
    shown = "all" if list(default) == list(choices) else " ".join(default)
    parser.add_argument(
        name, nargs="+", choices=list(choices), default=list(default), metavar="NAME",
        help=f"any of {', '.join(map(shlex.quote, choices))}{about} (default: {shown})",
    )  # fmt: skip

"""Prints results on standard output, as a Markdown table or one JSON document."""

import json
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import attrs

Columns = Mapping[str, Callable[[Any], str]]
"""Heading of a column -> function that returns the text of a row's cell."""


def show(
    rows: Sequence[Any],
    columns: Columns,
    *,
    left: Collection[str],
    as_json: bool,
    notes: Sequence[str] = (),
    packages: Sequence[str] = ("numpy", "scipy"),
) -> None:
    """
    Print results, and facts about the machine that measured them.

    Args:
        rows: Results, as values of an attrs class; at least one.
        columns: Columns of the table. A JSON document has the fields of the rows instead.
        left: Headings of the columns that are aligned to the left, the others to the right.
        as_json: Whether to print one JSON document.
        notes: Lines below the table.
        packages: Python packages whose versions are printed.
    """
    if as_json:
        print(json.dumps({"machine": machine(packages), "rows": [attrs.asdict(row) for row in rows]}, indent=1))
        return
    print("\n".join(table([list(columns), *([cell(row) for cell in columns.values()] for row in rows)], left=left)))
    facts = "; ".join(f"{name} {value}" for name, value in machine(packages).items())
    print("\n".join(["", *notes, facts]))


def machine(packages: Sequence[str]) -> dict[str, str]:
    """Return facts about the machine and its packages, on which figures depend."""
    return {
        "cores": str(os.cpu_count()),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "processor": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def table(lines: Sequence[Sequence[str]], *, left: Collection[str]) -> Iterator[str]:
    r"""
    Yield the lines of a Markdown table with aligned columns.

    Args:
        lines: Cells of each line; the first line has the headings.
        left: Headings of the columns that are aligned to the left.

    >>> print("\n".join(table([["way", "s"], ["packed", "10"]], left={"way"})))
    | way    |  s |
    | ------ | -: |
    | packed | 10 |
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [heading in left for heading in lines[0]]
    rule = ["-" * width if to_left else "-" * (width - 1) + ":" for width, to_left in zip(widths, sides, strict=True)]
    for cells in (lines[0], rule, *lines[1:]):
        padded = [
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(cells, widths, sides, strict=True)
        ]
        yield f"| {' | '.join(padded)} |"

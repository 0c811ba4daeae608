"""Markdown tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def aligned(lines: Sequence[Sequence[str]], *, left: set[int]) -> Iterator[str]:
    """
    Yield the lines of a table, the first of them its head, columns aligned.

    Args:
        lines: Cells; all lines have as many.

        left: Columns that are aligned to the left, the others to the right.
    """
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for number, line in enumerate(lines):
        padded = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield f"| {' | '.join(padded)} |"
        if number == 0:
            rule = ("-" * width if column in left else "-" * (width - 1) + ":" for column, width in enumerate(widths))
            yield f"| {' | '.join(rule)} |"

"""Numbers with their nouns, and texts that are short enough to be read."""

from collections.abc import Iterable
from itertools import groupby


def counted(number: int, name: str) -> str:
    """
    Return the number with its noun, in the plural where that is due: `1 pack`, `2 epochs`, `0
    batches`.
    """
    return f"{number:,} {name}" + ("" if number == 1 else "es" if name.endswith("tch") else "s")


def agree(number: int, one: str = "is", many: str = "are") -> str:
    """
    Return the verb that agrees with a number: `is` or `are`, or what is given instead.

    Args:
        number: How many there are.
        one: The verb for exactly one.
        many: The verb for any other number.
    """
    return one if number == 1 else many


def ranging(lowest: int, highest: int, name: str) -> str:
    """
    Return what numbers range over, with their noun: `7 tokens`, or `7 to 9 tokens`.

    Args:
        lowest: The least of them.
        highest: The greatest.
        name: The noun, in the singular.
    """
    return counted(highest, name) if lowest == highest else f"{lowest:,} to {counted(highest, name)}"


def in_ranges(indices: Iterable[int], *, most: int | None = None) -> str:
    """
    Return all indices in their order, those that follow each other as a range, and ranges that
    repeat as one.

    Args:
        indices: Whole numbers.
        most: Ranges that are written; an ellipsis stands for the others. None writes all.

    >>> in_ranges([0, 1, 2, 7, 9, 10]), in_ranges([0, 1, 0, 1, 0]), in_ranges([1, 3, 5], most=2)
    ('0..2, 7, 9..10', '0..1 x 2, 0', '1, 3, …')
    """
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], index
        else:
            ranges.append((index, index))
    parts = []
    for (first, last), same in groupby(ranges):
        times = len(list(same))
        parts.append((f"{first}..{last}" if first < last else f"{first}") + (f" x {times}" if times > 1 else ""))
    return ", ".join([*parts[:most], "…"] if most is not None and len(parts) > most else parts)


def in_lines(head: str, items: Iterable[object]) -> str:
    """
    Return a headline with a line for each item below it.

    >>> print(in_lines("the run has 1 fault", ["seed: is x"]))
    the run has 1 fault:
      seed: is x
    """
    return "\n  ".join([f"{head}:", *map(str, items)])


MAX_LINE, MAX_LINES = 500, 60
"""
Characters of a line of an error's text, and lines of it: whatever it quotes, the fact and the
remedy can be read.
"""


def shortened(text: str) -> str:
    """
    Return *text* with the middle of its long lines, and of too many lines, left out.

    >>> len(shortened("x" * 100_000))
    500
    """
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        left_out = f"  … {len(lines) - MAX_LINES + 1:,} more lines …"
        lines = [*lines[: MAX_LINES - 3], left_out, *lines[-2:]]
    return "\n".join(map(_shortened_line, lines))


def _shortened_line(line: str) -> str:
    if len(line) <= MAX_LINE:
        return line
    left_out = f" … {len(line):,} characters … "
    kept = MAX_LINE - len(left_out)
    return f"{line[: kept - kept // 2]}{left_out}{line[len(line) - kept // 2 :]}"

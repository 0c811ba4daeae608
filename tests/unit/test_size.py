"""The counter of lines of code counts code alone."""

from __future__ import annotations

import ast
from pathlib import Path

from tools import size

SOURCE = '''"""A module."""

# a comment
TEXT = """one

two"""  # three lines, of which one is blank


class Kind:
    """A class."""

    field: int
    """A field."""


def call(first, second):
    return (
        first +

        second
    )
'''


def test_docstrings_comments_and_blank_lines_are_no_code():
    """Lines of a text are code, but for blank ones."""
    assert 2 + 2 + 5 == size.code_lines(SOURCE)
    assert len(SOURCE.splitlines()) == size.all_lines(SOURCE)


def test_each_part_has_a_line(capsys):
    """The product is the sum of its layers; the program imports the standard library alone."""
    size.main()

    title, *lines = capsys.readouterr().out.splitlines()
    sizes = {line[:22].strip(): int(line[22:].replace(",", "")) for line in lines}
    assert "without docstrings, comments and blank lines" in title
    assert 8 == 1 + len(lines)
    assert sizes["core + adapters + app"] == sizes["core"] + sizes["adapters"] + sizes["app"] > 10_000
    tree = ast.parse(Path(size.__file__).read_text(encoding="utf-8"))
    imports = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {"ast", "io", "tokenize"} == imports

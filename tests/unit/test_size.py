"""The counter of lines of code counts code alone."""

from __future__ import annotations

import ast
from pathlib import Path

from tools import size


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

"""Docstrings: they name things, and document each argument of public functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FOLDERS = ("core", "adapters", "app", "benchmarks", "tools")

MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

MANY = 3
"""Arguments from which on each is documented."""

CALLED_BY_TRANSFORMERS = {"sample_mask",
    "attend_to_patches", "evaluation_loop", "get_batch_samples", "log", "on_epoch_end", "on_step_end", "row_mask",
    "training_step",
}  # fmt: skip
"""Their arguments are the library's, which documents them."""

Function = ast.FunctionDef | ast.AsyncFunctionDef

parsed = lru_cache(maxsize=1)(ast.parse)
"""Both rules are asked of one module after the other."""

BEGINS = re.compile(r"(What|Of|Its|Whose|Theirs|Hears)\b")
"""Beginnings of docstrings that do not name a thing."""

ARGUMENT = re.compile(r"^\s+\w+: (Hears|Of|What|Its|Theirs)\b", re.MULTILINE)
"""Entries of arguments that do not name a thing."""

FRAGMENTS = Path(__file__).with_name("fragments.txt")
"""Files that still have fragments, one a line. None is added; a file without any is taken out."""

CHECKED = sorted({*MODULES, *(ROOT / "tests").rglob("*.py"), ROOT / "packplan" / "__init__.py"})


def documented(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """
    Yield what is public with its docstring: functions, classes, and values with a string below.
    """
    for node, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, Function | ast.ClassDef):
            if not node.name.startswith("_"):
                yield node, ast.get_docstring(node) or ""
                yield from documented(node.body) if isinstance(node, ast.ClassDef) else ()
        elif (
            isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
        ):
            yield node, below.value.value.strip()


def fragments(source: str, *, laws: bool = False) -> list[int]:
    """
    Return the lines of docstrings that begin with a fragment, or say so of an argument.

    Args:
        source: Content of a module.
        laws: Whether docstrings of tests are left out, which are sentences of any beginning.
    """
    tree = parsed(source)
    tests = {
        node.body[0] for node in ast.walk(tree) if laws and isinstance(node, Function) and node.name.startswith("test_")
    }
    texts = {
        node.lineno: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node not in tests
    }
    return sorted(line for line, text in texts.items() if BEGINS.match(text.strip()) or ARGUMENT.search(text))


def undocumented(source: str) -> list[str]:
    """
    Return the public functions of three or more arguments that neither document each nor say where
    they are.
    """
    found = []
    for node, said in documented(parsed(source).body):
        if not isinstance(node, Function) or node.name in CALLED_BY_TRANSFORMERS:
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = [one.arg for one in arguments if one.arg not in {"self", "cls"}]
        refers = re.search(r"see\s`[\w.]+`", said)
        if (
            len(names) >= MANY
            and not refers
            and not all(re.search(rf"^ *{name}: ", said, re.MULTILINE) for name in names)
        ):
            found.append(node.name)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arguments_are_documented(path):
    """Where there are many arguments, each is documented."""
    assert [] == undocumented(path.read_text(encoding="utf-8"))


def test_no_docstring_is_a_fragment():
    """Docstrings and arguments name things. The list of files with fragments only shrinks."""
    found = {
        str(path.relative_to(ROOT)): lines
        for path in CHECKED
        if (lines := fragments(path.read_text(encoding="utf-8"), laws="tests" in path.relative_to(ROOT).parts))
    }
    allowed = set(FRAGMENTS.read_text(encoding="utf-8").split())

    assert {} == {name: lines for name, lines in found.items() if name not in allowed}
    assert set() == allowed - found.keys(), f"without fragments now: take them out of {FRAGMENTS.name}"


def test_what_breaks_the_rules_is_found():
    """
    Fragments of modules, classes, methods, values and arguments; a missing argument.
    """
    source = '''"""Of a module."""
value: int
"""Of a value."""
_value: int = 0
class Kind:
    """Of a class."""
    field: int
    """Official."""
    def method(self, a, b, c):
        """
        Of a method.

        a: First.

        b: Second.
        """
def all_said(a, *, b, c):
    """
    Say all.

    a: First.

    b: Second.

    c: Third.
    """
def elsewhere(a, b, c):
    """Refer; see `all_said`."""
def _private(a, b, c):
    """
    Do.

    Args:
        a: Hears nothing.
        b: Of nobody.
        c: Official.
    """
def test_law():
    """What is true holds."""
def two(a, b):
    """Say little."""
'''

    assert [1, 3, 6, 10, 30, 39] == fragments(source)
    assert [1, 3, 6, 10, 30] == fragments(source, laws=True)
    assert ["method"] == undocumented(source)

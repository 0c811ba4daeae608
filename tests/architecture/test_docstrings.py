"""What public docstrings say: sentences, and each argument."""

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


def fragments(source: str) -> list[int]:
    """
    Return the lines of what is public and whose docstring begins with "Of", so that it cannot stand
    by itself.
    """
    tree = parsed(source)
    own = [1] * (ast.get_docstring(tree) or "").startswith("Of ")
    return own + [node.lineno for node, said in documented(tree.body) if said.startswith("Of ")]


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
def test_docstrings_stand_by_themselves(path):
    """None is a fragment, and where there are many arguments each is documented."""
    source = path.read_text(encoding="utf-8")

    assert [] == fragments(source)
    assert [] == undocumented(source)


def test_what_breaks_the_rules_is_found():
    """
    Fragments of modules, classes, methods and values; a missing argument; private names are free.
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
    """Of nobody."""
def two(a, b):
    """Say little."""
'''

    assert [1, 2, 5, 9] == fragments(source)
    assert ["method"] == undocumented(source)

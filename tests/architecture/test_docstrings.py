"""Docstrings: they name things, and document each argument of public functions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

SOURCES = {
    path: path.read_text(encoding="utf-8")
    for folder in ("core", "adapters", "app", "benchmarks", "tools")
    for path in (ROOT / folder).rglob("*.py")
}

MANY = 3
"""Arguments from which on each is documented."""

CALLED_BY_TRANSFORMERS = {
    "attend_to_patches", "build_mask", "evaluation_loop", "get_batch_samples", "log", "on_epoch_end", "on_log",
    "on_prediction_step", "on_save", "on_step_end", "on_train_begin", "sample_mask", "training_step",
}  # fmt: skip
"""Their arguments are the library's, which documents them."""

FRAGMENT = re.compile(
    r'^\s*"""\s*(?:What|Of|Its|Whose|Theirs|Hears)\b|^\s+\w+: (?:Hears|Of|What|Its|Theirs)\b', re.MULTILINE
)
"""Beginnings of docstrings, and of entries of arguments, that do not name a thing."""


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Yield the functions that are public, and the methods of public classes."""
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            yield from public_functions(node.body)
        elif isinstance(node, ast.FunctionDef) and node.name[0] != "_":
            yield node


def is_documented(function: ast.FunctionDef) -> bool:
    """Return whether each of many arguments is documented, or another place is named."""
    said, spec = ast.get_docstring(function) or "", function.args
    names = {one.arg for one in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)} - {"self", "cls"}
    refers = function.name in CALLED_BY_TRANSFORMERS or re.search(r"see\s`[\w.]+`", said)
    return bool(len(names) < MANY or refers or names <= {*re.findall(r"^ *(\w+): ", said, re.MULTILINE)})


def test_arguments_are_documented():
    """Where there are many arguments, each is documented."""
    functions = [(path, one) for path, source in SOURCES.items() for one in public_functions(ast.parse(source).body)]

    assert len(functions) > 500
    assert [] == [(path, one.name) for path, one in functions if not is_documented(one)]


def test_no_docstring_is_a_fragment():
    """Docstrings and arguments name things."""
    assert {} == {path: found for path, source in SOURCES.items() if (found := FRAGMENT.findall(source))}

"""Docstrings: they name things, and document each argument of public functions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLDERS = ("core", "adapters", "app", "benchmarks", "tools")

MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

CHECKED = {*MODULES, *(ROOT / "tests").rglob("*.py"), ROOT / "packplan" / "__init__.py"} - {Path(__file__)}

MANY = 3
"""Arguments from which on each is documented."""

CALLED_BY_TRANSFORMERS = {"on_log", "sample_mask",
    "attend_to_patches", "evaluation_loop", "get_batch_samples", "log", "on_epoch_end", "on_step_end", "build_mask",
    "training_step",
}  # fmt: skip
"""Their arguments are the library's, which documents them."""

Function = ast.FunctionDef | ast.AsyncFunctionDef

FRAGMENT = re.compile(
    r'^\s*"""\s*(?:What|Of|Its|Whose|Theirs|Hears)\b|^\s+\w+: (?:Hears|Of|What|Its|Theirs)\b', re.MULTILINE
)
"""Beginnings of docstrings, and of entries of arguments, that do not name a thing."""

LAW = re.compile(r'^(def test_\w+\([^\n]*\n(?:    [^"\n][^\n]*\n|\)[^\n]*\n)*)    """.*?"""', re.MULTILINE | re.DOTALL)
"""A test up to the end of its docstring, which is a sentence of any beginning."""


def fragments(source: str) -> list[str]:
    """Return the beginnings of docstrings and of arguments that are fragments; laws may be any."""
    return [found.strip(' \n"') for found in FRAGMENT.findall(LAW.sub(r"\1", source))]


def public_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """Yield the functions that are public, and the methods of public classes."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            if isinstance(node, ast.ClassDef):
                yield from public_functions(node.body)
            else:
                yield node


def undocumented(source: str) -> list[str]:
    """Return public functions of many arguments that document neither each nor another place."""
    found = []
    for node in public_functions(ast.parse(source).body):
        said = ast.get_docstring(node) or ""
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        names = [one.arg for one in arguments if one.arg not in {"self", "cls"}]
        refers = node.name in CALLED_BY_TRANSFORMERS or re.search(r"see\s`[\w.]+`", said)
        each = all(re.search(rf"^ *{name}: ", said, re.MULTILINE) for name in names)
        found += [node.name] if len(names) >= MANY and not refers and not each else []
    return found


def test_arguments_are_documented():
    """Where there are many arguments, each is documented."""
    found = {path: names for path in MODULES if (names := undocumented(path.read_text(encoding="utf-8")))}

    assert {} == found


def test_no_docstring_is_a_fragment():
    """Docstrings and arguments name things."""
    found = {path: said for path in CHECKED if (said := fragments(path.read_text(encoding="utf-8")))}

    assert {} == found

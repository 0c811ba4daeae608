"""Docstrings: they name things, and document each argument of public functions."""

import ast
import re
from collections.abc import Iterator

from tests.processes import ROOT

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

MOST_WORDS = 25
"""Most words in a sentence of a docstring or a page; what stands in backticks is one word."""

NO_PROSE = re.compile(r"^ *```.*?```|^ *(?:\||#|>>>|!\[|[├│└]).*?$", re.MULTILINE | re.DOTALL)
"""Code, tables, headings, pictures and trees."""

SENTENCE_END = re.compile(r"[.!?:][`*)]*\s+(?=[^a-z])|\n\s*\n|\n\s*(?:[-*]|\d+\.) |\n\s*(?=\w+: )")


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


def yield_strings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module and of its classes, functions and fields."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def long_sentences(text: str) -> list[str]:
    """Return the sentences of *text* that have too many words."""
    sentences = SENTENCE_END.split(re.sub("`[^`]+`", "`…`", NO_PROSE.sub("\n\n", text)))
    return [" ".join(words) for one in sentences if len(words := one.lstrip("-* ").split()) > MOST_WORDS]


def test_arguments_are_documented():
    """Where there are many arguments, each is documented."""
    functions = [(path, one) for path, source in SOURCES.items() for one in public_functions(ast.parse(source).body)]

    assert len(functions) > 500
    assert [] == [(path, one.name) for path, one in functions if not is_documented(one)]


def test_no_docstring_is_a_fragment():
    """Docstrings and arguments name things."""
    assert {} == {path: found for path, source in SOURCES.items() if (found := FRAGMENT.findall(source))}


def test_sentences_are_short():
    """So that a person who skims reads each once; a colon may end one."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    texts = {path: path.read_text(encoding="utf-8") for path in pages}
    texts |= {path: "\n\n".join(yield_strings(source)) for path, source in SOURCES.items()}

    assert [f"{25 * 'A '}b"] == long_sentences(f"Short. {25 * 'A '}b\n\n{24 * 'a '}`b c`.")
    assert {} == {path: found for path, text in texts.items() if (found := long_sentences(text))}

"""
Size of each part of the project in lines of code: `python3 tools/size.py`.

A line counts as code if it holds more than a docstring, a comment or blanks. For tests, all lines
count. The program needs nothing but Python itself.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PRODUCT = ("core", "adapters", "app")

BESIDE = ("benchmarks", "tools")

NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def code_lines(source: str) -> int:
    r"""
    Return the number of lines of code of a Python file.

    A docstring is any string that stands as a statement, so it may belong to a field as well.

    >>> code_lines('x = 1  # one\n# two\n\ny = 2\n"Three."')
    2
    """
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    strings = (one for one in statements if isinstance(one.value, ast.Constant) and isinstance(one.value.value, str))
    docstrings = {line for one in strings for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    held = {line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    blank = {number for number, line in enumerate(source.splitlines(), 1) if not line.strip()}
    return len(held - docstrings - blank)


def main() -> None:
    """Print one line for each part."""
    sizes = {part: sum(map(code_lines, sources(part))) for part in (*PRODUCT, *BESIDE)}
    rows = [(part, sizes[part]) for part in PRODUCT]
    rows.append((" + ".join(PRODUCT), sum(sizes[part] for part in PRODUCT)))
    rows += [(part, sizes[part]) for part in BESIDE]
    rows.append(("tests, all lines", sum(len(source.splitlines()) for source in sources("tests"))))
    print("Python lines of code, without docstrings, comments and blank lines:")
    for name, number in rows:
        print(f"{name:<22} {number:>7,}")


def sources(part: str) -> list[str]:
    """Return the text of every Python file below a folder of the project."""
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / part).rglob("*.py"))]


if __name__ == "__main__":
    main()

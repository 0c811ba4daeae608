"""
Size of each part of the project in lines of code: `python3 tools/size.py`.

A line counts as code if it holds more than a docstring, a comment or blanks. The size of tests is
their number of lines, and the size of pages their number of words. A room is a set of files with a
ceiling, the largest allowed size. `rooms` prints the size of each room beside its ceiling, and
`lower` lowers the ceilings. `check` names the rooms above their ceilings, with exit status 1 if
there is one. The program needs nothing but Python itself.
"""

import ast
import functools
import io
import sys
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


@functools.cache
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


CEILINGS = ROOT / "tests" / "architecture" / "ceilings.txt"
"""File with one line for each room: its name, its ceiling, and patterns of its files."""


def ceilings(path: Path = CEILINGS) -> dict[str, tuple[int, list[str]]]:
    """Return the ceiling of each room, and the patterns of its files, relative to the project."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {name: (int(number), places) for name, number, *places in lines}


def room_size(name: str, places: list[str]) -> int:
    """
    Return the size of a room.

    Args:
        name: Name of the room. The size of `tests` is its number of lines, of `pages` its number of
            words, and of `modules` its number of files. All other sizes are lines of code.
        places: Patterns of the room's files, relative to the project.
    """
    files = sorted({path for place in places for path in ROOT.glob(place) if path.is_file()})
    if name == "modules":
        return len(files)
    texts = [path.read_text(encoding="utf-8") for path in files]
    if name == "pages":
        return sum(any(map(str.isalnum, word)) for text in texts for word in text.split())
    return sum(len(text.splitlines()) if name == "tests" else code_lines(text) for text in texts)


def lower_ceilings(path: Path = CEILINGS) -> None:
    """Lower each ceiling to the room's size, rounded up to a multiple of 50."""
    told = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    sizes = {name: (ceiling, -(-room_size(name, held) // 50) * 50) for name, (ceiling, held) in ceilings(path).items()}
    rows = [(name, min(sizes[name]), *held) for name, (_, held) in ceilings(path).items()]
    path.write_text("\n".join([*told, *(" ".join(map(str, row)) for row in rows)]) + "\n", encoding="utf-8")


def size_faults(path: Path = CEILINGS) -> list[str]:
    """Return a message for each room that is above its ceiling, or that has the size 0."""
    sizes = {name: (room_size(name, held), ceiling) for name, (ceiling, held) in ceilings(path).items()}
    return [
        f"{name} has {found:,}, and its ceiling is {ceiling:,}: take lines out, or raise the ceiling by an ADR"
        for name, (found, ceiling) in sizes.items()
        if not 0 < found <= ceiling
    ]


def main() -> None:
    """Print one line for each part, or each room; check or lower the ceilings if asked."""
    if sys.argv[1:] == ["check"]:
        if faults := size_faults():
            sys.exit("\n".join(faults))
        return
    if sys.argv[1:] == ["lower"]:
        lower_ceilings()
    if sys.argv[1:]:
        for name, (ceiling, places) in ceilings().items():
            print(f"{name:<28} {room_size(name, places):>7,} of {ceiling:>7,}")
        return
    sizes = {part: sum(map(code_lines, read_sources(part))) for part in (*PRODUCT, *BESIDE)}
    rows = [(part, sizes[part]) for part in PRODUCT]
    rows.append((" + ".join(PRODUCT), sum(sizes[part] for part in PRODUCT)))
    rows += [(part, sizes[part]) for part in BESIDE]
    rows.append(("tests, all lines", sum(len(source.splitlines()) for source in read_sources("tests"))))
    print("Python lines of code, without docstrings, comments and blank lines:")
    for name, number in rows:
        print(f"{name:<22} {number:>7,}")


def read_sources(part: str) -> list[str]:
    """Return the text of every Python file below a folder of the project."""
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / part).rglob("*.py"))]


if __name__ == "__main__":
    main()

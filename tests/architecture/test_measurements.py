"""Tests compare measured seconds and bytes with others that were measured, not with numbers."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.processes import ROOT

MEASURED = re.compile(
    r"(?:^|_)(?:seconds|elapsed|process_time|thread_time|perf_counter|monotonic|nbytes|peak|maxrss|rss|traced_memory|"
    r"smaps)(?:_ns|_bytes)?$"
)
"""Names of what a test measures on the machine that it runs on."""

ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def is_number(node: ast.expr) -> bool:
    """Return whether an expression is a number other than 0, as 72 * 2**20."""
    found = [*ast.walk(node)]
    plain = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    return all(isinstance(one, plain) for one in found) and any(getattr(one, "value", 0) for one in found)


def is_measured(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression has a unit of the machine; a ratio of two has none."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and not is_number(node.right):
        return False
    name = getattr(node, "id", getattr(node, "attr", ""))
    if name in names or MEASURED.search(name):
        return True
    return any(is_measured(one, names) for one in ast.iter_child_nodes(node))


def absolute_limits(source: str) -> Iterator[int]:
    """Yield the line of each assertion that orders what is measured and a number."""
    if not any(map(MEASURED.search, re.findall(r"\w+", source))):
        return
    for test in (one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)):
        names: set[str] = set()
        for node in ast.walk(test):
            if isinstance(node, (ast.Assign, ast.NamedExpr)) and is_measured(node.value, names):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}
        for said in (one for one in ast.walk(test) if isinstance(one, ast.Assert)):
            for node in (one for one in ast.walk(said.test) if isinstance(one, ast.Compare)):
                sides = [node.left, *node.comparators]
                for order, left, right in zip(node.ops, sides, sides[1:], strict=False):
                    pairs = ((left, right), (right, left))
                    if isinstance(order, ORDERS) and any(is_number(a) and is_measured(b, names) for a, b in pairs):
                        yield said.lineno


PLANTED = [
    "assert time.process_time() - start < 3", "spent = time.perf_counter() - start\n    assert 0 < spent < 1.5",
    "assert 72 * 2**20 > resource.getrusage(resource.RUSAGE_SELF).ru_maxrss",
    "tracemalloc.start()\n    _, most = tracemalloc.get_traced_memory()\n    assert most <= 80_000_000",
    "assert all(one.seconds < 5 for one in found)", "assert (took := time.monotonic() - start) / 2 < 4",
    "assert array.nbytes < 4e6 and True",
]  # fmt: skip

FINE = [
    "assert 0 < cost.seconds", "assert peak < size / 4", "assert 0.9 < cost.peak_bytes / array.nbytes < 1.6",
    "assert slow_seconds < 3 * fast_seconds", "assert 7.0 == found.seconds",
]  # fmt: skip


@pytest.mark.parametrize(("lines", "expected"), [*((one, 1) for one in PLANTED), *((one, 0) for one in FINE)])
def test_absolute_limits_are_found(lines, expected):
    """Wherever the number stands, and under another name; not ratios, or what is exact."""
    assert expected == len({*absolute_limits(f"def test_it():\n    {lines}\n")})


def test_no_absolute_bytes_or_seconds_decide_a_test():
    """Another machine, or another version of a library, needs others: compare two measurements."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
    found = {str(path.relative_to(ROOT)): [*absolute_limits(source)] for path, source in sources.items()}

    assert {} == {path: lines for path, lines in found.items() if lines}

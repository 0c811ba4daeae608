"""The shape of the project: what may import what, and what loads what."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CORE_MAY_IMPORT = {
    "__future__", "attrs", "bisect", "collections", "contextlib", "core", "decimal", "fractions", "functools", "hashlib", "heapq", "itertools", "json",
    "math", "numbers", "numpy", "scipy", "types", "typing",
}  # fmt: skip
"""Pure arithmetic and values; of scipy, its linear programming alone."""

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "core").rglob("*.py")
)


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "core").rglob("*.py")), ids=lambda path: path.stem)
def test_core_imports_nothing_but_what_is_listed(path):
    """An allow list, so that a new dependency is a decision."""
    assert imported(path) <= CORE_MAY_IMPORT


@pytest.mark.slow
def test_core_loads_neither_torch_nor_a_clock_of_its_own():
    """Importing every module of core, in a fresh process, leaves torch, swift and transformers unloaded."""
    script = (
        f"import sys, {', '.join(MODULES)}; print([n for n in ('torch', 'swift', 'transformers') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)

    assert "[]" == run.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ruff check .", "ruff format --check .", "mypy", "lint-imports"])
def test_linters_find_nothing(command):
    """Style, types, and what may import what: `make lint`, beside other tests."""
    name, *options = command.split()
    run = subprocess.run(
        [Path(sys.executable).with_name(name), *options], capture_output=True, text=True, check=False, cwd=ROOT
    )

    assert 0 == run.returncode, run.stdout + run.stderr


def test_no_pickle_and_no_unsafe_yaml():
    """Neither is imported or called anywhere."""
    for package in ("core", "adapters", "app"):
        for path in (ROOT / package).rglob("*.py"):
            assert not imported(path) & {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
            assert "allow_pickle=True" not in path.read_text(encoding="utf-8")
            assert "broadcast_object" not in path.read_text(encoding="utf-8")


def test_only_wiring_constructs_adapters():
    """Commands and planning get them handed in; classes of adapters are named in the two modules of wiring alone."""
    for path in [*(ROOT / "app").glob("*.py"), *(ROOT / "app" / "plans").glob("*.py")]:
        if path.name in {"wiring.py", "wiring_light.py"}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {
                    "SwiftSamples",
                    "DiskLengthStore",
                    "DiskPlanStore",
                    "TorchGroup",
                    "PackTrainer",
                }


def programs() -> list[str]:
    """Return every module that `python -m` runs, but for the one that hands over to them."""
    files = [*(ROOT / "app").glob("[!_]*.py"), *(ROOT / "app").glob("*/__main__.py")]
    names = [path.parent.name if path.name == "__main__.py" else path.stem for path in files]
    return [f"app.{name}" for name, path in zip(names, files, strict=True) if "def main(" in path.read_text()]


HELP = """
import contextlib, importlib, io, json, sys
loaded = {}
for words in json.loads(sys.argv[1]):
    module = importlib.import_module(words[0] + (".__main__" if words[1] else ""))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        module.main([*words[2:], "--help"])
    heavy = [name for name in ("torch", "swift", "transformers") if name in sys.modules]
    loaded[" ".join([words[0], *words[2:]])] = heavy or ("usage:" not in said.getvalue())
print(json.dumps(loaded))
"""


@pytest.mark.slow
def test_every_help_answers_without_torch_and_without_swift():
    """Of each program, and of each of their commands, in a fresh process."""
    from app.bench.__main__ import BENCHMARKS
    from app.plan import COMMANDS

    calls = [[name, name in {"app.bench", "app.demo"}] for name in sorted(programs())]
    calls += (
        [["app", True]]
        + [["app.plan", False, name] for name in COMMANDS]
        + [["app.bench", True, name] for name in BENCHMARKS]
    )
    run = subprocess.run(
        [sys.executable, "-c", HELP, json.dumps(calls)], capture_output=True, text=True, check=True, cwd=ROOT
    )

    loaded = json.loads(run.stdout)
    assert {"app", "app.sft", "app.check", "app.rl", "app.plan show", "app.demo", "app.bench planner"} <= set(loaded)
    assert not any(loaded.values()), loaded

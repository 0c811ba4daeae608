"""The shape of the project: what may import what, and what loads what."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CORE_MAY_IMPORT = {
    "__future__", "ast", "attrs", "base64", "bisect", "collections", "contextlib", "decimal",
    "fractions", "functools", "hashlib", "heapq", "importlib", "itertools", "json",
    "math", "numbers", "numpy", "packplan.core", "re", "scipy", "shlex", "types", "typing",
}  # fmt: skip
"""Pure arithmetic and values; of scipy, linear programming alone; of ast, literals and sums."""

MODULES = sorted(
    ".".join(("packplan", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in (ROOT / "core").rglob("*.py")
)


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(text_of(path))) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported(path: Path) -> set[str]:
    names = set()
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            names |= {outermost(alias.name) for alias in node.names}
        else:
            names.add(outermost(node.module or ""))
    return names


def outermost(module: str) -> str:
    """Return the package of a module; of ours, the layer."""
    return ".".join(module.split(".")[: 2 if module.startswith("packplan.") else 1])


@pytest.mark.parametrize("path", sorted((ROOT / "core").rglob("*.py")), ids=lambda path: path.stem)
def test_core_imports_nothing_but_what_is_listed(path):
    """
    An allow list, so that a new dependency is a decision; only the face also knows the checkout.
    """
    face = {"packplan.checkout"} if path == ROOT / "core" / "__init__.py" else set()

    assert imported(path) <= CORE_MAY_IMPORT | face


MOST_MODULES = 16
"""In a folder, its `__init__` aside: more are no longer seen at a glance."""


@pytest.mark.parametrize("layer", ["core", "adapters", "app"])
def test_folders_are_seen_at_a_glance(layer):
    """None has more modules than can be read as a list."""
    folders = {path.parent for path in (ROOT / layer).rglob("*.py")}

    crowded = {folder: len(list(folder.glob("*.py"))) - 1 for folder in folders}
    assert [] == [folder for folder, number in crowded.items() if number > MOST_MODULES]


MOST_OF_PLANNING = 20
"""Modules of ours behind `packplan.core.plan`: planning is understood without the rest."""


def test_planning_loads_few_modules():
    """In a fresh process; the two packages that enclose it count too."""
    script = "import sys, packplan.core.plan; print(sum(name.split('.')[0] == 'packplan' for name in sys.modules))"

    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)

    assert int(run.stdout) <= MOST_OF_PLANNING


KNOWS_KEYS = {"config", "conversion"}
"""Rooms of core that may name keys of a YAML."""

KEY = re.compile(r"\b(?:training|template|model|custom|policy|grpo)\.[a-z_]+")


def texts_of(path: Path) -> list[str]:
    """Return the texts of a module, docstrings too, without the code of their examples."""
    constants = (node.value for node in ast.walk(ast.parse(text_of(path))) if isinstance(node, ast.Constant))
    lines = (line for text in constants if isinstance(text, str) for line in text.splitlines())
    return [line for line in lines if not line.lstrip().startswith((">>>", "..."))]


@pytest.mark.parametrize("path", sorted((ROOT / "core").rglob("*.py")), ids=lambda path: path.stem)
def test_core_names_no_key_of_a_yaml(path):
    """But where runs are read and converted: a library's caller has arguments, and no YAML."""
    if path.relative_to(ROOT / "core").parts[0] not in KNOWS_KEYS:
        assert [] == [line for line in texts_of(path) if KEY.search(line)]


FACELESS = {"packplan.core.patterns"}
"""Rooms of core whose modules are imported as they are: packers and bounds take a part each."""


def test_rooms_of_core_are_imported_through_their_faces():
    """
    What another room or layer may use of a room stands in its `__init__`; a room's own modules
    import each other.
    """
    rooms = {f"packplan.core.{path.parent.name}" for path in (ROOT / "core").glob("*/__init__.py")} - FACELESS
    past = []
    for layer in ("core", "adapters", "app", "benchmarks", "tools"):
        for path in (ROOT / layer).rglob("*.py"):
            here = ".".join(("packplan", *path.relative_to(ROOT).with_suffix("").parts))
            for node in imports_of(path):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("packplan.core."):
                    room = ".".join(node.module.split(".")[:3])
                    if room in rooms and node.module != room and not here.startswith(f"{room}."):
                        past.append(f"{here}: from {node.module}")

    assert [] == past


@pytest.mark.slow
def test_core_loads_neither_torch_nor_a_clock_of_its_own():
    """
    Importing every module of core, in a fresh process, leaves torch, swift and transformers
    unloaded.
    """
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
    for package in ("core", "adapters", "app", "benchmarks", "tools"):
        for path in (ROOT / package).rglob("*.py"):
            assert not imported(path) & {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
            assert "allow_pickle=True" not in text_of(path)
            assert "broadcast_object" not in text_of(path)


def test_only_wiring_constructs_adapters():
    """Commands and planning get them handed in; classes of adapters are called in wiring alone."""
    classes = {"SwiftEncoder", "SwiftMeasurer", "DiskLengthStore", "DiskPlanStore", "TorchGroup", "PackTrainer"}
    called = {
        (path.relative_to(ROOT).parts[1], node.func.id)
        for path in (ROOT / "app").rglob("*.py")
        if any(name in text_of(path) for name in classes)
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes
    }

    assert {("wiring", name) for name in classes} == called


def test_one_place_knows_the_formats_of_data_files():
    """Another format is a file beside it, and a line in it."""
    formats = {
        f"packplan.adapters.samples.formats.{name}"
        for name in ("jsonl", "json_array", "csv_rows", "arrow_rows", "rewriting")
    }
    importers = {
        str(path.relative_to(ROOT))
        for layer in ("adapters", "app")
        for path in (ROOT / layer).rglob("*.py")
        for node in imports_of(path)
        if isinstance(node, ast.ImportFrom) and node.module in formats
    }

    assert {"adapters/samples/files.py"} == importers


def programs() -> list[str]:
    """Return every module that `python -m` runs, but for the one that hands over to them."""
    files = [
        *(ROOT / "app").glob("[!_]*.py"), *(ROOT / "app").glob("*/__init__.py"), *(ROOT / "app").glob("*/__main__.py")
    ]  # fmt: skip
    return [
        ".".join(("packplan", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in files
        if "def main(" in path.read_text()
    ]


TYPO = """
import contextlib, importlib, io, json, sys
loaded = {}
for module, *words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        status = importlib.import_module(module).main(words)
    heavy = [name for name in ("torch", "swift", "transformers") if name in sys.modules]
    loaded[" ".join([module, *words])] = [status, heavy, "did you mean" in said.getvalue()]
print(json.dumps(loaded))
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["yaml", "command line"])
def test_a_typo_is_refused_without_torch_and_without_swift(tmp_path, where):
    """
    By every command that reads a YAML: in a key of ours, of ms-swift, or in an override; in a fresh
    process.
    """
    key, override = ("lerning_rate", []) if where == "yaml" else ("learning_rate", ["training.packing_bufer=1"])
    run, mix = tmp_path / "run.yaml", tmp_path / "mix.yaml"
    run.write_text(
        f"model: {{model: m}}\ntemplate: {{max_length: 8}}\ncustom: {{train_jsonl: t}}\ntraining: "
        f"{{output_dir: o, {key}: 1}}\n"
    )
    mix.write_text("sources: [{jsnl: a}]\n" if where == "yaml" else "sources: [{jsonl: a}]\n")
    plan = [["packplan.app.plan.__main__", command, run] for command in ("build", "show", "whatif", "verify")]
    calls = [["packplan.app.sft", run], ["packplan.app.check", run], ["packplan.app.rl.__main__", run], *plan]
    calls += [
        ["packplan.app.plan.__main__", "report", run, "-o", "p.html"],
        ["packplan.app.plan.__main__", "diff", run, run],
    ]
    words = [[*map(str, call), *override] for call in calls]
    words.append(
        [
            "packplan.app.plan.__main__",
            "materialise",
            str(mix),
            *(["sample_per_epoch=1"] if override else []),
            "-o",
            "m.jsonl",
        ]
    )

    done = subprocess.run(
        [sys.executable, "-c", TYPO, json.dumps(words)], capture_output=True, text=True, check=True, cwd=ROOT
    )

    loaded = json.loads(done.stdout)
    assert 10 == len(loaded)
    assert all([2, [], True] == one for one in loaded.values()), loaded


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["model", "data"])
def test_a_missing_input_is_refused_without_torch_and_without_swift(tmp_path, missing):
    """By every command that opens the model and the data, with its path."""
    (tmp_path / "m").mkdir()
    if missing == "data":
        (tmp_path / "m" / "config.json").write_text('{"model_type": "qwen2"}')
    run = tmp_path / "run.yaml"
    run.write_text(
        f"model: {{model: {tmp_path}/m}}\ntemplate: {{max_length: 8}}\ncustom: {{train_jsonl: {tmp_path}/t}}\n"
        f"training: {{output_dir: {tmp_path}/o}}\n"
    )
    calls = [
        ["packplan.app.sft", str(run)],
        ["packplan.app.check", str(run)],
        ["packplan.app.plan.__main__", "build", str(run)],
    ]
    named = f"{tmp_path}/m is no folder" if missing == "model" else f"{tmp_path}/t cannot be read"

    done = subprocess.run(
        [sys.executable, "-c", TYPO.replace("did you mean", named), json.dumps(calls)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip

    assert [[2, [], True]] * 3 == list(json.loads(done.stdout).values())


HELP = """
import contextlib, importlib, io, json, sys
loaded = {}
for words in json.loads(sys.argv[1]):
    module = importlib.import_module(words[0])
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        module.main([*words[1:], "--help"])
    heavy = [name for name in ("torch", "swift", "transformers") if name in sys.modules]
    loaded[" ".join(words)] = heavy or ("usage:" not in said.getvalue())
print(json.dumps(loaded))
"""


@pytest.mark.slow
def test_every_help_answers_without_torch_and_without_swift():
    """Each program is asked, and each of their commands, in a fresh process."""
    from benchmarks.__main__ import BENCHMARKS
    from packplan.app.plan.__main__ import COMMANDS

    calls = [["packplan.app.__main__"], *([name] for name in sorted(programs()))]
    calls += [["packplan.app.plan.__main__", name] for name in COMMANDS] + [
        ["benchmarks.__main__", name] for name in BENCHMARKS
    ]
    calls += [["benchmarks.__main__"], ["tools.models"], ["tools.configuration"]]
    run = subprocess.run(
        [sys.executable, "-c", HELP, json.dumps(calls)], capture_output=True, text=True, check=True, cwd=ROOT
    )

    loaded = json.loads(run.stdout)
    assert {
        "packplan.app.__main__",
        "packplan.app.sft",
        "packplan.app.check",
        "packplan.app.rl.__main__",
        "packplan.app.plan.__main__ show",
        "packplan.app.demo.__main__",
    } <= set(loaded)
    assert not any(loaded.values()), loaded

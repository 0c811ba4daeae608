"""The shape of the project: what may import what, and what loads what."""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from packplan.core.config.keys import yield_keys
from packplan.core.config.run import RunConfig
from tests.processes import ROOT
from tests.stored import store_run

CORE_MAY_IMPORT = {
    "__future__", "ast", "attrs", "base64", "binpacking", "bisect", "collections", "contextlib", "decimal", "difflib",
    "fractions", "functools", "hashlib", "heapq", "importlib", "itertools", "json",
    "math", "numbers", "numpy", "operator", "packplan.core", "re", "scipy", "shlex", "textwrap",
    "types", "typing",
}  # fmt: skip
"""Pure arithmetic and values; of scipy, linear programming alone; of ast, literals and sums."""

LAYERS = ("core", "adapters", "app", "benchmarks", "tools")


def files_of(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the dotted name of a file's module, as the installed package has it."""
    return ".".join(("packplan", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(text_of(path)))]


@cache
def imported(path: Path) -> list[str]:
    """Return the modules that a file imports, or imports names from."""
    nodes = nodes_of(path)
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return plain + [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]


def packages(path: Path) -> set[str]:
    """Return the packages that a file imports from; of ours, the layers."""
    return {".".join(name.split(".")[: 2 if name.startswith("packplan.") else 1]) for name in imported(path)}


def constants_of(path: Path) -> list[str]:
    """Return the texts of a module, docstrings too."""
    constants = (node.value for node in nodes_of(path) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def test_core_imports_nothing_but_what_is_listed():
    """An allow list; but the face knows the checkout, and a plan asks the package for its page."""
    beyond = {path.relative_to(ROOT): packages(path) - CORE_MAY_IMPORT for path in files_of("core")}

    assert {"packplan.checkout"} == beyond.pop(Path("core/__init__.py"))
    assert {"packplan"} == beyond.pop(Path("core/surface.py"))
    assert {} == {path: names for path, names in beyond.items() if names}


MOST_MODULES = 22
"""In a folder, its `__init__` aside: more are no longer seen at a glance."""


def test_folders_are_seen_at_a_glance():
    """None has more modules than can be read as a list."""
    in_folder = Counter(path.parent for path in files_of("core", "adapters", "app") if path.name != "__init__.py")

    assert [] == [folder for folder, number in in_folder.items() if number > MOST_MODULES]


def fresh(script: str, *words: str) -> str:
    """Return the output of a script in a process of its own."""
    command = [sys.executable, "-c", script, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


MOST_OF_PLANNING = 20
"""Modules of ours behind `packplan.core.plan`: planning is understood without the rest."""


def test_planning_loads_few_modules():
    """In a fresh process; the two packages that enclose it count too."""
    script = "import sys, packplan.core.plan; print(sum(name.split('.')[0] == 'packplan' for name in sys.modules))"

    assert int(fresh(script)) <= MOST_OF_PLANNING


KNOWS_KEYS = {"config"}
"""Rooms of core that may name keys of a YAML."""

KEY = re.compile(r"\b(?:training|template|model|custom|policy|grpo)\.[a-z_]+")


def test_core_names_no_key_of_a_yaml():
    """But where runs are read, and in examples: a library's caller has arguments, and no YAML."""
    named = [
        (path, line)
        for path in files_of("core")
        if path.relative_to(ROOT / "core").parts[0] not in KNOWS_KEYS
        for text in constants_of(path)
        for line in text.splitlines()
        if KEY.search(line) and not line.lstrip().startswith((">>>", "..."))
    ]

    assert [] == named


FACELESS = {f"packplan.core.{room}" for room in ("config", "packers", "patterns", "samples", "work")}
"""Rooms of core whose modules are imported as they are: what uses them takes a part each."""


def test_rooms_of_core_are_imported_through_their_faces():
    """What others may use of a room stands in its `__init__`."""
    rooms = {f"packplan.core.{path.parent.name}" for path in (ROOT / "core").glob("*/__init__.py")} - FACELESS
    past = [
        (path, name)
        for path in files_of(*LAYERS)
        for name in imported(path)
        if (room := ".".join(name.split(".")[:3])) in rooms - {name}
        and not f"{module_of(path)}.".startswith(f"{room}.")
    ]

    assert [] == past


def test_constants_stand_at_the_top_of_their_module():
    """Above its functions and classes, unless they are made of them."""
    late = []
    for path in files_of("core", "adapters", "app"):
        made: set[str] = set()
        for node in ast.parse(text_of(path)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                made.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and made:
                names = {one.id: type(one.ctx) for one in ast.walk(node) if isinstance(one, ast.Name)}
                stored = {name for name, context in names.items() if context is ast.Store}
                if not made.isdisjoint(names) or not all(map(str.isupper, stored)):
                    made |= stored
                else:
                    late += [(path.relative_to(ROOT), name) for name in stored]

    assert [] == late


def test_no_pickle_and_no_unsafe_yaml():
    """Neither is imported or called anywhere."""
    for path in files_of(*LAYERS):
        assert not packages(path) & {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
        assert not any(word in text_of(path) for word in ("allow_pickle=True", "broadcast_object"))


def test_one_place_knows_the_formats_of_data_files():
    """Another format is a file beside it, and a line in it."""
    formats = {f"packplan.adapters.samples.formats.{name}" for name in ("lines", "arrow_rows", "rewriting")}
    importers = [path for path in files_of("adapters", "app") if formats.intersection(imported(path))]

    assert [ROOT / "adapters" / "samples" / "data_files.py"] == importers


def programs() -> list[str]:
    """Return every module that `python -m` runs, but for the one that hands over to them."""
    files = [
        *(ROOT / "app").glob("[!_]*.py"), *(ROOT / "app").glob("*/__init__.py"), *(ROOT / "app").glob("*/__main__.py")
    ]  # fmt: skip
    return [module_of(path) for path in files if "def main(" in path.read_text()]


CALLS = """
import contextlib, importlib, io, json, sys
ended = []
for module, *words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            status = importlib.import_module(module).main(words)
        except SystemExit as end:
            status = end.code
    heavy = [name for name in ("torch", "swift", "transformers") if name in sys.modules]
    ended.append([status, heavy, said.getvalue()])
print(json.dumps(ended))
"""

PLAN = "packplan.app.plan.__main__"

Call = tuple[list[str], int, str]
"""Words of a call, its exit status, and what it says."""


def typos(folder: Path) -> list[Call]:
    """In a key of ours, of ms-swift, or in an override, of every command that reads a YAML."""
    calls = []
    for key, override in (("lerning_rate", []), ("learning_rate", ["training.packing_bufer=1"])):
        run = run_of(folder, key=key)
        calls += [[f"packplan.app.{name}", run, *override] for name in ("sft", "check")]
        calls += [["packplan.app.rl", run, "grpo.max_step=1"]]
        calls += [[PLAN, name, run, *override] for name in ("build", "show", "whatif", "time", "fit", "verify")]
    return [(call, 2, "did you mean") for call in calls]


def missing_inputs(folder: Path) -> list[Call]:
    """The model or the data, of every command that opens them; its path is said."""
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text('{"model_type": "qwen2"}')
    calls = []
    for model, says in {"none": f"{folder}/none, which is not a folder", "m": f"{folder}/t cannot be read"}.items():
        run = run_of(folder, model)
        calls += [(words, 2, says) for words in (["packplan.app.sft", run], ["packplan.app.check", run])]
        calls += [([PLAN, "build", run], 2, says)]
    return calls


def looks(folder: Path) -> list[Call]:
    """At a plan that is stored."""
    run = str(store_run(folder))
    calls = ["show"], ["show", "--sample", "3"], ["whatif", "--max-length", "60,80", "--world-size", "2"], ["diff", run]
    calls = *calls, ["report", "-o", str(folder / "report.html")]
    return [([PLAN, *words, run], 0, "") for words in calls]


def helps(folder: Path) -> list[Call]:
    """Of each program, and of each of their commands."""
    from benchmarks.__main__ import BENCHMARKS
    from packplan.app.plan.__main__ import COMMANDS

    found = programs()
    assert {f"packplan.app.{name}" for name in ("sft", "check", "rl")} <= {*found}
    calls = [[name] for name in ("packplan.app.__main__", *found, "benchmarks.__main__")]
    calls += [["tools.demo.__main__"], ["tools.models"], ["tools.configuration"], *([PLAN, name] for name in COMMANDS)]
    calls += [["benchmarks.__main__", name] for name in BENCHMARKS]
    return [([*call, "--help"], 0, "usage:") for call in calls]


def run_of(folder: Path, model: str = "m", key: str = "learning_rate") -> str:
    """Write the YAML of a run whose data are missing."""
    path = folder / f"{model}{key}.yaml"
    path.write_text(
        f"model: {{model: {folder}/{model}}}\ntemplate: {{max_length: 8}}\ncustom: {{train_jsonl: {folder}/t}}\n"
        f"training: {{output_dir: {folder}/o, {key}: 1}}\n"
    )
    return str(path)


@pytest.mark.slow
def test_a_mistake_is_refused_and_a_plan_is_shown_without_torch_and_without_swift(tmp_path):
    """One fresh process answers all calls."""
    calls = [*typos(tmp_path), *missing_inputs(tmp_path), *looks(tmp_path), *helps(tmp_path)]
    ends = json.loads(fresh(CALLS, json.dumps([words for words, _, _ in calls])))

    for (words, status, says), (ended, heavy, said) in zip(calls, ends, strict=True):
        assert (status, []) == (ended, heavy), words
        assert says in said, words


def test_every_option_and_every_key_is_read():
    """Of a command, as `options.NAME`; of a YAML, by its name, outside of its declaration."""
    of_app = "".join(map(text_of, files_of("app")))
    calls = [node for path in files_of("app") for node in nodes_of(path) if isinstance(node, ast.Call)]
    declared = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    declared = [call for call in declared if "action='version'" not in ast.unparse(call)]  # argparse answers it
    names = [one.value for call in declared for one in call.args if str(getattr(one, "value", "")).startswith("--")]
    unread = [name for name in names if not re.search(rf"\boptions\.{name[2:].replace('-', '_')}\b", of_app)]
    keys = ROOT / "core" / "config" / "run.py"
    elsewhere = "".join(text_of(path) for path in files_of("core", "adapters", "app") if path != keys)
    fields = [key.rpartition(".")[2] for key, _ in yield_keys(RunConfig)]
    unread += [name for name in fields if f".{name}" not in elsewhere and f'"{name}"' not in elsewhere]

    assert len(names) > 20
    assert [] == unread, "nothing reads these: read them, or remove them"

"""Names on pages exist; their Python runs, and their tables are current."""

import ast
import json
import re
import runpy
import shlex
import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import attrs
import numpy as np
import pytest
import yaml

from packplan.adapters.config.run import RL_SECTIONS, SECTIONS, known_keys, load_rl_config, parse_config
from packplan.adapters.config.trainer_keys import GRPO_KEYS_FILE, read_key_table
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.stores.plans import DiskPlanStore
from packplan.app.__main__ import COMMANDS
from packplan.app.planning.log_lines import describe_run, plan_warnings
from packplan.app.planning.plan import Ranks, measure_and_plan
from packplan.app.planning.schedule import schedule_of_split
from packplan.app.planning.split import PlannedSplit, Split, Stores
from packplan.core.batch import partial_window
from packplan.core.config.identity import PATH_KEYS, PER_RANK
from packplan.core.config.keys import yield_keys
from packplan.core.config.refusals import Host
from packplan.core.config.run import RunConfig
from packplan.core.forecast import ModelSharding
from packplan.core.inspection import PlanSummary, ScheduleSummary, SourceSummary
from packplan.core.packers import ALGORITHMS
from packplan.core.policy import PlanPolicy
from packplan.core.samples.urls import PACKAGES
from packplan.core.schedule import EpochStats, PackStats
from packplan.core.surface import plan as plan_of
from tests.documents import parsed
from tests.fakes import FreeLock, ListSource, ScriptedGroup
from tests.processes import ROOT
from tools.configuration import HOSTS, rewrite_lists

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("ADR/*.md")])

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

CODE = re.compile(r"`([^`\n]+)`")

KEYS = {*known_keys(RunConfig)} - {*SECTIONS} | {f"training.{key}" for key in read_key_table()}

MODULES = [path for layer in ("core", "adapters", "app") for path in (ROOT / layer).rglob("*.py")]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def fences(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(text_of(page)) if language in languages]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", CODE.sub("", FENCE.sub("", text_of(page)))):
        path, _, anchor = target.partition("#")
        other = page.parent / path if path else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            broken.append(target)
    return broken


@cache
def source_of(module: str) -> Path | None:
    """Return the file or folder of a module of ours, or None; nothing is imported."""
    path = ROOT.joinpath(*module.removeprefix("packplan.").split("."))
    return path if path.is_dir() else path.with_suffix(".py") if path.with_suffix(".py").exists() else None


@cache
def words_of(module: str) -> set[str]:
    """Return the words that a command knows, its options among them, and its helpers' words."""

    def source(name: str) -> str:
        path = source_of(name)
        return "".join(map(text_of, path.rglob("*.py") if path.is_dir() else [path]))

    own = source(module)
    helpers = {
        name for name in re.findall(r"^from (packplan\.app\.[\w.]+) import", own, re.MULTILINE) if source_of(name)
    }
    helpers |= {f"packplan.app.{name}" for name in re.findall(r"^from packplan\.app import (\w+)", own, re.MULTILINE)}
    return {*re.findall(r'"([\w-]+)"', "".join(map(source, {module, *helpers})))}


def wrong_commands(page: Path) -> list[str]:
    """Return commands of ours that name no module, subcommand or option."""
    shown = "\n".join([*fences(page, "bash"), *CODE.findall(FENCE.sub("", text_of(page)))]).replace("\\\n", " ")
    wrong = []
    for line in shown.splitlines():
        start = r"(?:-m (?:packplan\.)?app\.|-m (?=benchmarks\b|tools\.)|\bpackplan )"
        found = re.search(rf"{start}([\w.]+)(?: (.*))?$", line.split("#")[0].strip())
        if not found:
            continue
        module = found[1] if found[1].startswith(("benchmarks", "tools.")) else f"packplan.app.{found[1]}"
        rest = (found[2] or "").split()
        if (found[0].startswith("packplan ") and found[1] not in COMMANDS) or source_of(module) is None:
            wrong.append(line)
        else:
            known = words_of(module)
            options = {word.split("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
            with_subcommands = {"packplan.app.plan", "benchmarks", "tools.models"}
            subcommand = {word for word in rest[:1] if module in with_subcommands and re.match(r"[a-z]+$", word)}
            wrong += [line] * (not options | subcommand <= known | {"--help"})
    return wrong


@cache
def names_of_tests() -> set[str]:
    """Return the names of all test functions."""
    sources = map(text_of, ROOT.glob("tests/**/*.py"))
    return {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}


def lost_names(page: Path) -> list[str]:
    """Return the paths, dotted names and test functions of a page or a module that do not exist."""
    lost = []
    for word in CODE.findall(FENCE.sub("", text_of(page))):
        if re.fullmatch(r"(tests|core|adapters|app|benchmarks|tools|docs|ADR)/[\w/.-]*", word):
            found = (ROOT / word).exists()
        elif re.fullmatch(r"(packplan\.)?(core|adapters|app)(\.\w+)+", word):
            found = is_defined(word)
        elif key := re.match(r"(?:model|template|custom|training)\.\w+(?=$|[: =])", word):
            found = key[0] in KEYS or page.name == "CHANGELOG.md"  # names removed keys too
        else:
            found = not re.fullmatch(r"test_\w+", word) or word in names_of_tests()
        lost += [word] * (not found)
    return lost


def test_each_change_has_its_place():
    """Each name in the table of changes stands in a file of its row."""
    lost = []
    for row in text_of(ROOT / "CONTRIBUTING.md").split("| to | change |")[1].split("\n\n")[0].splitlines()[2:]:
        words = [word.partition("=")[0] for word in CODE.findall(row) if " " not in word]
        places = [ROOT / word for word in words if "/" in word]
        files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))]
        lost += [word for word in words if "/" not in word and not any(word in text_of(file) for file in files)]

    assert [] == lost, "name in CONTRIBUTING.md what the files of the row have now"


def is_defined(name: str) -> bool:
    """Return whether a dotted name is a module, or stands in its source; nothing is imported."""
    module, rest = "", name.split(".")
    while rest and source_of(f"{module}.{rest[0]}".lstrip(".")):
        module = f"{module}.{rest.pop(0)}".lstrip(".")
    path = source_of(module)
    return all(re.search(rf"\b{one}\b", text_of(path / "__init__.py" if path.is_dir() else path)) for one in rest[:1])


@pytest.mark.parametrize("wrong", [broken_links, wrong_commands, lost_names])
def test_what_pages_name_exists(wrong):
    """Links, anchors, commands, paths, dotted names, test functions; in docstrings, names too."""
    files = PAGES if wrong is not lost_names else [*PAGES, *MODULES]
    assert {} == {page: found for page in files if (found := wrong(page))}


def test_lists_are_whole():
    """Of rooms, of pages, of decisions, of keys, of options; and of pages in the code."""
    rooms = {path.parent for path in MODULES if path.name == "__init__.py" and path.parent.parent.parent == ROOT}
    rooms_page, index = text_of(ROOT / "CONTRIBUTING.md"), text_of(ROOT / "README.md")
    named = {name for path in MODULES for name in re.findall(r"docs/[\w/-]+\.md", text_of(path))}
    shown = {word for page in PAGES if "docs" in page.parts for word in re.findall(r"--?[a-z][\w-]*", text_of(page))}
    declared = re.findall(r'add_argument\(\s*((?:"-[\w-]+",?\s*)+)', "\n".join(map(text_of, ROOT.glob("app/**/*.py"))))

    assert len(rooms) > 20
    assert [] == [room.name for room in rooms if f"`{room.relative_to(ROOT)}/`" not in rooms_page]
    assert [] == [page for page in PAGES if f"({page.relative_to(ROOT)})" not in index and "docs" in page.parts]
    assert len(index.split()) < 900, "a first screen is short: move words to a page"
    listed = re.findall(r"\]\((\d{4}-[a-z0-9-]+\.md)\)", text_of(ROOT / "ADR/README.md"))
    assert sorted(listed) == sorted(path.name for path in ROOT.glob("ADR/0*.md")), "list the decision in ADR/README.md"
    assert ("ddp", "fsdp2") == get_args(ModelSharding), "StepTracer and open_step_tracer ask for fsdp2: trace it, too"
    assert {*get_args(Host)} == {*HOSTS}, "name the host in HOSTS of tools/configuration.py"
    assert [] == [page for page in PAGES if text_of(page) != rewrite_lists(text_of(page))], "run make reference"
    assert named
    assert [] == [name for name in named if not (ROOT / name).exists()]
    unnamed = [one for one in declared if shown.isdisjoint(re.findall(r"[\w-]+", one))]
    assert [] == unnamed, "name the option on its page"
    figures = [field.name for kind in (PlanSummary, ScheduleSummary, SourceSummary) for field in attrs.fields(kind)]
    shows = text_of(ROOT / "core/surface.py") + text_of(ROOT / "app/plan/show.py")
    assert [] == [name for name in figures if name not in shows], "show the figure"
    exports = re.findall(r"^def (export_(?!cached)\w+)", text_of(ROOT / "adapters/exports.py"), re.MULTILINE)
    assert [] == [name for name in exports if name not in text_of(ROOT / "docs/files.md")], "name it in docs/files.md"


def test_yaml_that_is_shown_is_a_run(tmp_path):
    """Every key is one, every value has its type; files that are extended may be missing."""
    for name, shown in [(page.name, yaml.safe_load(text)) for page in PAGES for text in fences(page, "yaml")]:
        data = {} if {"fusion_config", "dataset"} & shown.get("custom", {}).keys() else {"train_jsonl": "a"}
        base = {"model": {"model": "m"}, "custom": data, "grpo": {"output_dir": "o", "reward_funcs": "m:f"}}
        if sft := shown.keys().isdisjoint(RL_SECTIONS):
            del base["grpo"]
            base |= {"template": {"max_length": 1}, "training": {"output_dir": "o"}}
        shown |= {section: {**keys, **shown.get(section, {})} for section, keys in base.items()}
        shown.pop("extends", None)
        (tmp_path / name).write_text(yaml.safe_dump(shown))
        if sft:
            assert parse_config(shown, name, read_key_table())
        else:
            assert load_rl_config(tmp_path / name, read_key_table(GRPO_KEYS_FILE))


@pytest.fixture
def planned(tmp_path, monkeypatch) -> str:
    """Store a plan as the demo does, in a scratch working directory; return its checksum."""
    folder = tmp_path / "runs" / "demo" / "run" / "static_packing" / "train"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return plan_split(ListSource(np.random.default_rng(1).geometric(1 / 200, 300).tolist()), folder).raw_checksum


def plan_split(source: ListSource, folder: Path) -> PlannedSplit:
    stores = Stores(DiskLengthStore(folder), DiskPlanStore(folder), FreeLock())
    split = Split("train", PlanPolicy(packing_length=1024), stores=stores, encoder=source, source=source)
    return measure_and_plan(split, Ranks(ScriptedGroup(), timeout_s=1))


OTHERS = {
    *("ATEN_CPU_CAPABILITY=default", "NPROC_PER_NODE=2", "OMP_NUM_THREADS=2"),
    *(".venv/bin/python", "make", "pip", "pytest", "ray", "source", "swift"),
}
"""First words of lines that call other tools, or hosts that `tests/hosts` runs."""


def command_lines(page: Path) -> list[list[str]]:
    """Return the words of each fenced line that calls this project: a module, and its arguments."""
    lines = [line for block in fences(page, "bash") for line in block.replace("\\\n", " ").splitlines() if line]
    found = []
    for words in (shlex.split(line, comments=True) for line in lines):
        if words[0] in {"torchrun", "python"} and "-m" in words:
            found.append(words[words.index("-m") + 1 :])
        elif words[0] == "packplan":
            found.append(["packplan.app", *words[1:]])
        else:
            assert words[0] in OTHERS or words[-1] == "--resume" or ".py" in " ".join(words), f"{page.name}: {words}"
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if command_lines(page)], ids=lambda page: page.name)
def test_commands_that_are_shown_start(page, monkeypatch):
    """Each line of a page, as it stands, reaches the body of its command."""
    reached = []
    for module in {"packplan.app.cli.command", *(name for name, _ in COMMANDS.values())}:
        monkeypatch.setattr(import_module(module), "run_command", lambda *_, **__: reached.append(1) or 0)
    for name, *words in command_lines(page):
        reached.clear()
        monkeypatch.setattr(sys, "argv", [name, *words])
        if not name.startswith("packplan."):
            assert find_spec(name), f"{page.name}: {name}"
            continue
        with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        assert (0, [1]) == (ended.value.code, reached), f"{page.name}: {name} {words}"


HOSTED = ("# dpo.py", "# own.py", "# prove.py", "# train.py")
"""First lines of files that need a trainer of others, or workers: other tests run them."""


def test_python_that_is_shown_runs(planned):
    """Block after block; what a comment says a line gives, it gives."""
    for page in PAGES:
        names = {"lengths": [700, 200, 1100, 640, 5, 3000] * 4}
        for block in fences(page, "python"):
            if block.startswith(HOSTED):
                continue
            exec(compile(block, page.name, "exec"), names)  # noqa: S102  # the page's own code
            for line, value in re.findall(r"^(\w.*?)  # ([\[(\d][^:\n]*)", block, re.MULTILINE):
                assert ast.literal_eval(value) == eval(line, names), (page, line)  # noqa: S307


def test_the_artefacts_page_names_every_file_and_key(planned):
    page = text_of(ROOT / "docs" / "files.md")
    names = {re.sub(r"(?<=^plan_ws)\d+", "<W>", path.name) for path in Path().rglob("*.*") if path.is_file()}
    manifests = [json.loads(path.read_text()) for path in Path().rglob("*.json")]

    assert 3 == len(manifests)
    assert [] == [name for name in {*names}.union(*manifests) if f"`{name}`" not in page]


def test_the_example_plans_three_kinds_of_lengths_alike(capsys, monkeypatch, planned):
    """And the stored lengths as the run did."""
    script = str(ROOT / "docs" / "examples" / "plan_a_list.py")
    for arguments in ([], ["runs/demo/run/static_packing/train"]):
        monkeypatch.setattr("sys.argv", [script, *arguments])
        runpy.run_path(script, run_name="__main__")

    said = [line.split(": ", 1) for line in capsys.readouterr().out.splitlines()]
    assert ["a list", "a numpy array", "a column of a data set"] * 2 == [kind for kind, _ in said]
    assert [1, 1] == [len({plan for _, plan in said[:3]}), len({plan for _, plan in said[3:]})]
    assert said[3][1].endswith(f"checksum {planned[:12]}")


def test_every_field_and_every_algorithm_is_in_its_table():
    """In the order of the class or the registry; the tables have no other rows."""
    page = text_of(ROOT / "docs" / "planner.md")
    listed, table = page.split("Each field, and its key in a YAML:\n\n")[1], page.split("| name | method | use it |")[1]

    fields = re.findall(r"^- `(\w+)`:", listed, re.MULTILINE)
    assert [field.name for field in attrs.fields(PlanPolicy)] == fields, "list the field in docs/planner.md"
    rows = re.findall(r"^\| `(\w+)` \|", table.split("\n\n")[0], re.MULTILINE)
    assert [*ALGORITHMS] == rows, "list the algorithm in docs/planner.md"


def test_every_kind_of_place_is_on_its_page():
    """By its scheme, or the package that reads it; all but the one of tests."""
    page = text_of(ROOT / "docs" / "records.md")
    needs = {(f"{scheme}://", f"pip install {package}") for scheme, package in PACKAGES.items() if scheme != "memory"}

    assert [] == [need for need in needs if not any(one in page for one in need)], "docs/records.md#places lists them"


def test_every_figure_of_training_is_on_its_page():
    """Those of steps in the list of the log, those of an epoch below it."""
    plan = plan_of([9] * 6, 20)
    stats = EpochStats.from_schedule(PackStats.from_plan(plan.raw, plan.lengths), plan.schedule(), 0)
    page = text_of(ROOT / "docs" / "training.md").split("## The log")[1].split("\n## ")[0]
    listed, below = page.split("At the end of an epoch")

    assert {*stats.statistics(0, 1)} <= {*re.findall(r"^- `(\w+)`:", listed, re.MULTILINE)}
    assert {*stats.epoch_statistics(1)} == {*CODE.findall(below)}


def test_the_page_lists_the_keys_that_ranks_may_have_for_themselves():
    """All but those of type path, which the page does not list, and no other."""
    page = text_of(ROOT / "docs" / "how-it-works.md")
    (rows,) = re.findall(r"^\| keys \| why \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    listed = [key for row in rows.splitlines() for key in CODE.findall(row.split("|")[1])]

    named = {*PER_RANK, "custom.fusion_config"} | PATH_KEYS - dict(yield_keys(RunConfig)).keys()
    assert sorted(key.rpartition(".")[2] for key in named) == sorted(key.rpartition(".")[2] for key in listed)


def test_quoted_log_lines_are_logged(tmp_path):
    """Numbers aside, by a plan of long and unsupervised samples, and an uneven accumulation."""
    source = ListSource([2000, 2000, 640, 486, 384, 204, 230])
    source.masked = (2, 3)
    partial = partial_window(per_rank_batches=7, gradient_accumulation_steps=4)
    split, config = plan_split(source, tmp_path), parsed()
    rows = describe_run(config, [split], schedule_of_split(config, "train", split.aligned))
    logged = "\n".join([str(partial), *rows.values(), *plan_warnings(split)])
    quoted = re.findall(r"^- `(.+?)(?: …)?`", text_of(ROOT / "docs" / "how-it-works.md"), re.MULTILINE)

    assert quoted
    assert [] == [line for line in quoted if line not in re.sub(r"\d[\d,]*", "N", logged)], "quote these on the page"


def rows_of(program: str) -> list[tuple[str, str]]:
    """Return the keys of another program, each with the key here."""
    page = text_of(ROOT / "docs" / "configuration.md").partition("\n## Keys of TRL")[2]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    column = table[0].index(program)
    return [(theirs, row[0].strip("`")) for row in table[2:] for theirs in re.findall(r"`(\w+)`", row[column])]


@pytest.mark.parametrize("program", ["TRL", "axolotl", "LLaMA-Factory"])
def test_keys_that_others_become_are_keys(program):
    """Each row names one that a run's YAML has; those of TRL are declared by the installed one."""
    files = [Path(find_spec("trl").origin).parent / "trainer" / f"{name}_config.py" for name in ("sft", "model")]
    declared = "\n".join(map(text_of, [*files, Path(find_spec("transformers").origin).with_name("training_args.py")]))

    assert len(rows_of(program)) > 15
    assert [] == [key for _, key in rows_of(program) if key not in KEYS]
    assert [] == [name for name, _ in rows_of("TRL") if f"\n    {name}: " not in declared]

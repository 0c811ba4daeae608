"""The page about a plan: the figures of `show`, whatever users named, on any screen."""

import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import attrs
import numpy as np
import pytest

from packplan.adapters.report import HEAD, render_page, write_report
from packplan.app.opening.runs import read_config
from packplan.app.plan import __main__ as command
from packplan.app.plan import report
from packplan.app.plan.report import reported_plan
from packplan.app.plan.stored import open_split
from packplan.core.errors import UserError
from packplan.core.metrics import padded_positions
from packplan.core.packers import ALGORITHMS
from packplan.core.plan import build_raw_plan
from packplan.core.samples.tables import BadRecord, DataFile
from packplan.core.surface import draw_first_packs
from packplan.core.surface import plan as plan_of
from tests.stored import LENGTHS, store_run

HOSTILE = """</title><script>alert(1)</script>"'&$x_{$<img src=x onerror=alert(2)>"""


class Page(HTMLParser):
    """Elements of a page: tables as rows of texts by the heading above them, and each start tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.tags, self.tables, self.heading, self.path = text, [], {}, "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.path.append(tag)
        if tag in {"h1", "h2", "h3"}:
            self.heading = ""
        rows = self.tables.setdefault(self.heading, [])
        if tag == "tr":
            rows.append([])
        elif tag in {"th", "td"}:
            rows[-1].append("")

    def handle_endtag(self, tag):
        while self.path.pop() != tag:
            pass

    def handle_data(self, data):
        if self.path and self.path[-1] in {"h1", "h2", "h3"}:
            self.heading += data
        elif self.path and self.path[-1] in {"th", "td"}:
            self.tables[self.heading][-1][-1] += data


def number(text: str) -> float:
    return float(text.replace(",", "").rstrip("%"))


def total(rows) -> list[float]:
    """Return the sum of each column of numbers, below the head of a table."""
    return [sum(map(number, column)) for column in list(zip(*rows[1:], strict=True))[1:]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the YAML of a stored run, of hostile names, dropped packs and long samples."""
    folder = tmp_path_factory.mktemp("report")
    sources = ((HOSTILE, 20), ("scenes", 20), ("", len(LENGTHS) - 40))
    files = [DataFile(f"{at}.jsonl", name, "text", records) for at, (name, records) in enumerate(sources)]
    path = store_run(folder, HOSTILE.replace("/", "_"), files=files, world_sizes=(4,))
    (folder / path.stem / "logging.jsonl").write_text('{"train_speed(s/it)": 0.5, "memory(GiB)": 7.25}\n')
    return path


@pytest.fixture(scope="module")
def page(run):
    """Return the page that the command writes about the run."""
    written = run.with_name("report.html")
    assert 0 == command.main(["report", str(run), "-o", str(written)])
    return Page(written.read_text(encoding="utf-8"))


def test_its_numbers_are_those_of_show(run, page, capfd):
    """Each figure with its remark; and the counts of each plot add up to them."""
    assert 0 == command.main(["show", str(run), "--json"])
    shown = json.loads(capfd.readouterr().out)["splits"]["train"]
    assert 0 == command.main(["show", str(run), "--all"])
    everything = " ".join(capfd.readouterr().out.replace("│", " ").split())
    plan, schedule = shown["plan"], shown["schedule"]
    figures = page.tables["All figures"]

    for row in figures[:-2]:
        assert len(row[0]) > 40 or " ".join(" ".join(row).split()) in everything  # a table folds long names
    named = {row[0].strip(): row[1] for row in figures}
    assert [plan["num_packs"], schedule["total_steps"] // 3] == [
        number(named["packs"]),
        number(named["optimizer steps"]),
    ]
    assert [["500 ms", "7.25 GiB"]] == [[row[1] for row in figures[-2:]]]
    sources = sorted(shown["sources"], key=lambda one: -one["num_tokens"])
    lengths = page.tables["Samples by length"]
    assert [one["name"] for one in sources] == lengths[0][1:]
    assert [one["num_samples"] for one in sources] == total(lengths)
    assert [plan["num_packs"]] == total(page.tables["Packs by fill"]) == total(page.tables["Samples of a pack"])
    needed = {name: number(packs) for name, _, packs in page.tables["Packs by other algorithms"]}
    assert plan["lower_bound"] == needed.pop("no plan has fewer")
    assert plan["num_packs"] + plan["dropped_packs"] == needed.pop("this plan")
    positions = padded_positions(LENGTHS, batch_size=round(plan["samples_per_pack"]))
    assert round(positions / plan["packing_length"]) == needed.pop("padded batches")
    quick = [name for name, algorithm in ALGORITHMS.items() if not algorithm.takes]
    others = {name: build_raw_plan(LENGTHS, packing_length=80, algorithm=name) for name in quick}
    assert {name: len(other.packs) for name, other in others.items()} == needed
    works = [4 * number(row[1]) for row in page.tables["Work of each step"][1:]]
    assert len(works) == schedule["steps_per_epoch"]
    assert sum(works) / len(works) == pytest.approx(schedule["work_per_step"], rel=1e-3)
    left_out = [row[1:] for row in page.tables["Left out, and why"][1:]]
    assert [[f"{plan['dropped_samples']}", f"{plan['dropped_tokens']}"]] == left_out


def test_names_and_texts_of_users_are_escaped(run, page):
    """Nothing of a name becomes an element, in the head, a table or a reason of a bad record."""
    opened = open_split(read_config(run), "train", world_size=None)
    bad = tuple(BadRecord(index, f"{HOSTILE}, line 3", HOSTILE, "0" * 64) for index in (1, 2))
    origin = attrs.evolve(opened.lengths.origin, bad=bad)
    other = attrs.evolve(opened, lengths=attrs.evolve(opened.lengths, origin=origin), warnings=(HOSTILE,))
    short = attrs.evolve(reported_plan(other), needs={}, works=None)  # one plot, which takes time
    with_bad = Page(render_page(HOSTILE, [short]))

    assert [HOSTILE, "2", "not measured"] == with_bad.tables["Left out, and why"][-1]
    assert HOSTILE in page.tables["Samples by length"][0]
    for one in (page, with_bad):
        attributes = [(name, value) for _, held in one.tags for name, value in held.items()]
        assert {"script", "img", "link", "iframe"}.isdisjoint(tag for tag, _ in one.tags)
        assert not [
            name for name, _ in attributes if name.startswith("on") or name in {"src", "href", "id", "clip-path"}
        ]
        assert "url(" not in one.text
        assert 1 + one.text.count('viewBox="0 0 640 ') == sum(tag == "title" for tag, _ in one.tags)


@pytest.mark.covers
def test_a_page_is_small_whatever_the_number_of_samples(tmp_path):
    """No plot has a point for each, and packs of too many to be seen are not drawn."""
    lengths = np.random.default_rng(0).integers(1, 60, 50_000)
    plan = plan_of(lengths, 64, algorithm="best_fit_decreasing")
    plan.report(tmp_path / "plan.html")
    page = Page((tmp_path / "plan.html").read_text(encoding="utf-8"))

    assert len(page.text) < 10**6
    assert 3 == page.text.count('viewBox="0 0 640 ')
    assert [len(lengths)] == total(page.tables["Samples by length"])
    assert f"{len(plan.packs):,}" == page.tables["Packs by other algorithms"][1][2]
    assert not re.search("font-family|font:", page.text.split("</style>")[1])
    assert [] == draw_first_packs(plan_of(lengths, 10**6, algorithm="best_fit_decreasing").raw, lengths)
    for held, says in ((plan, "Is a directory"), (plan.packs, "takes a Plan of .*, not a Packs")):
        with pytest.raises(UserError, match=says):
            write_report(held, tmp_path)


def test_a_report_is_written_again_and_no_other_file_is_replaced(run, tmp_path, capfd, monkeypatch):
    """An own page of another plan is; what somebody else wrote is refused, as a folder is."""
    monkeypatch.setattr(report, "render_page", lambda *_: f"{HEAD}new")
    out = tmp_path / "out.html"
    for held, status in ((f"{HEAD}old", 0), ("notes", 2)):
        out.write_text(held)
        assert status == command.main(["report", str(run), "-o", str(out)])
    assert "notes" == out.read_text()
    assert f"--output is {out}, which has other content" in capfd.readouterr().err
    assert 2 == command.main(["report", str(run), "-o", str(tmp_path)])
    assert 2 == command.main(["report", str(run), "-o", str(tmp_path / "no" / "out.html")])
    assert "no/out.html, whose folder does not exist: create it" in capfd.readouterr().err


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch, tmp_path):
    """In Python as by the command."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {package}: pip install 'packplan\[report\]'"):
        plan_of([3, 4], 8).report(tmp_path / "plan.html")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_a_browser_shows_it_on_phones_and_screens(page, tmp_path):
    """Without scrolling sideways, and without running anything that a name holds."""
    frames = "".join(
        f'<iframe width={width} height=900 srcdoc="{html.escape(page.text)}"></iframe>' for width in (390, 1200)
    )
    script = """onload = () => {
        const sizes = [...document.querySelectorAll("iframe")].map(one => one.contentDocument.documentElement)
        document.title = "measured " + sizes.map(one => one.scrollWidth - one.clientWidth).join()
    }"""
    (tmp_path / "both.html").write_text(f"<title>not yet</title>{frames}<script>{script}</script>", encoding="utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    ended = subprocess.run(
        ["chromium", *words, (tmp_path / "both.html").as_uri()], capture_output=True, text=True, timeout=300, check=True
    )  # fmt: skip

    assert "<title>measured 0,0</title>" in ended.stdout

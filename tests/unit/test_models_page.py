"""The page of models has two sections, each of which is written without the other."""

from __future__ import annotations

import pytest

from packplan.core.equality import PackingVerdict, ProbeResult
from tools import models

SECTION = "## Models that see\n\nTiny models.\n\n| model |\n|---|\n| glm4v |\n"

FOUND = PackingVerdict("llama", "own", "sdpa", "sdpa", (), follows_rows=False, measured=ProbeResult(0, 1e-7), reason="")


@pytest.fixture
def page(monkeypatch, tmp_path):
    """Return a function that writes a family on a page; its verdict is given."""
    monkeypatch.setattr(models, "probe_families", lambda _: [FOUND])

    def write(before: str | None) -> str:
        path = tmp_path / "models.md"
        if before is not None:
            path.write_text(before)
        assert 0 == models.main(["families", str(path)])
        return path.read_text()

    return write


def test_the_table_of_families_keeps_the_models_that_see(page):
    """Its own rows are new, and the section after them is the same, however often it is written."""
    first = page(f"# Which models pack\n\n| family |\n|---|\n| old |\n\n{SECTION}")

    assert "| `own` | llama |" in first
    assert "| old |" not in first
    assert first.endswith(f"\n\n{SECTION}")
    assert 1 == first.count(models.HEADING)
    assert first == page(first)


@pytest.mark.parametrize("before", [None, "", "# Which models pack\n\n| old |\n"])
def test_a_page_without_models_that_see_gets_none(page, before):
    """A page that is not there yet, an empty one, one of families alone."""
    written = page(before)

    assert "| `own` | llama |" in written
    assert models.HEADING not in written


def test_another_section_of_models_that_see_leaves_the_families():
    """Whether the page had one or not."""
    for before in ("# Which models pack\n\n| llama |\n", f"# Which models pack\n\n| llama |\n\n{SECTION}"):
        written = models.with_section(before, "## Models that see\n\nOthers.\n")

        assert "# Which models pack\n\n| llama |\n\n## Models that see\n\nOthers.\n" == written


def verdict(family: str, strategy=None, *, split=(), measured=None, reason="") -> PackingVerdict:
    """Return a verdict on a family."""
    return PackingVerdict(family, strategy, "a", "a", split, follows_rows=False, measured=measured, reason=reason)


def test_every_family_stands_in_the_table_of_its_verdict():
    """Families of one strategy or reason share a row; those with numbers have one each."""
    page = models.families_page(
        [
            verdict("llama", "varlen", measured=ProbeResult(0, 1e-7)),
            verdict("jamba", "varlen", split=("Mixer",), measured=ProbeResult(0, 1e-7)),
            verdict("bloom", measured=ProbeResult(0.24, 0.54), reason="gradients pass"),
            verdict("blt", reason="its small copy has 192,555,136 weights, more than 20,000,000"),
            verdict("blip", reason="its small copy does not run (TypeError)"),
            verdict("udop", reason="its small copy does not run (ValueError)"),
            verdict("kimi", reason="its images: RuntimeError"),
            verdict("cosmos", reason="RuntimeError: sizes"),
        ],
        date="2026-01-02",
    )

    rows = [line for line in page.splitlines() if line.startswith("| ") and "---" not in line]
    assert [
        "| strategy | families |",
        "| `varlen` | llama, jamba* |",
        "| family | isolation | equality |",
        "| bloom | 0.24 | 5.4e-01 |",
        "| reason | families |",
        "| its small copy has more than 20,000,000 weights | blt |",
        "| its small copy does not run | blip, udop |",
        "| its small copy cannot compute images | kimi |",
        "| its small copy fails otherwise | cosmos |",
    ] == rows
    assert "2 of 8 pass" in " ".join(page.split())


def test_a_family_that_sees_and_differs_names_the_checks():
    """Instead of its equality."""
    assert ("a", "b", "full", "differs: lengths, logits") == models.vision_cells(
        models.VisionRow("a", "b", headers=False, equality=1.0, failed=("lengths", "logits"))
    )

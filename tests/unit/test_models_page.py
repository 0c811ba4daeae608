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
    monkeypatch.setattr(models, "ask_families", lambda _: [FOUND])

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

    assert "| llama | own | 0 | 1.0e-07 |" in first
    assert "| old |" not in first
    assert first.endswith(f" |\n\n{SECTION}")
    assert 1 == first.count(models.HEADING)
    assert first == page(first)


@pytest.mark.parametrize("before", [None, "", "# Which models pack\n\n| old |\n"])
def test_a_page_without_models_that_see_gets_none(page, before):
    """A page that is not there yet, an empty one, one of families alone."""
    written = page(before)

    assert "| llama | own |" in written
    assert models.HEADING not in written


def test_another_section_of_models_that_see_leaves_the_families():
    """Whether the page had one or not."""
    for before in ("# Which models pack\n\n| llama |\n", f"# Which models pack\n\n| llama |\n\n{SECTION}"):
        written = models.with_section(before, "## Models that see\n\nOthers.\n")

        assert "# Which models pack\n\n| llama |\n\n## Models that see\n\nOthers.\n" == written

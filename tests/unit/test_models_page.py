"""The page of models has two sections, each of which is written without the other."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from packplan.app import families, vision
from packplan.core.equality import Measured, PackingVerdict

SECTION = "## Models that see\n\nTiny models.\n\n| model |\n|---|\n| glm4v |\n"


@pytest.fixture
def page(monkeypatch, tmp_path):
    """Return a function that lists a family on a page; its verdict is given."""
    asked = ModuleType("families")
    found = PackingVerdict(
        "llama", "own", "sdpa", "sdpa", (), follows_rows=False, measured=Measured(0, 1e-7), reason=""
    )
    asked.verdicts = lambda _: [found]
    asked.versions = lambda: {"torch": "2.13.0"}
    # Both, whether another test has imported the real one or not.
    monkeypatch.setitem(sys.modules, "packplan.app.wiring.families", asked)
    monkeypatch.setattr("packplan.app.wiring.families", asked, raising=False)

    def write(before: str | None) -> str:
        path = tmp_path / "models.md"
        if before is not None:
            path.write_text(before)
        families.list_families(["llama"], as_json=True, output=path)
        return path.read_text()

    return write


def test_the_table_of_families_keeps_the_models_that_see(page):
    """Its own rows are new, and the section after them is the same, however often it is written."""
    first = page(f"# Which models pack\n\n| family |\n|---|\n| old |\n\n{SECTION}")

    assert "| llama | own |" in first
    assert "| old |" not in first
    assert first.endswith(f" |\n\n{SECTION}")
    assert 1 == first.count(vision.HEADING)
    assert first == page(first)


@pytest.mark.parametrize("before", [None, "", "# Which models pack\n\n| old |\n"])
def test_a_page_without_models_that_see_gets_none(page, before):
    """A page that is not there yet, an empty one, one of families alone."""
    written = page(before)

    assert "| llama | own |" in written
    assert vision.HEADING not in written

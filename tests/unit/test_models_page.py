"""The page of models has two sections, each of which is written without the other."""

import pytest

from packplan.core.equality import PackingVerdict, ProbeResult
from tools import models

SECTION = "## Vision-language models\n\nTiny models.\n\n| model |\n|---|\n| glm4v |\n"


def verdict(family, strategy=None, *, split=(), measured=None, reason=""):
    return PackingVerdict(family, strategy, "a", "a", split, keeps_rows=False, measured=measured, reason=reason)


@pytest.mark.parametrize("before", [None, "", "# Which models pack\n\n| family |\n|---|\n| old |\n"])
@pytest.mark.parametrize("section", ["", f"\n{SECTION}"])
def test_the_table_of_families_keeps_the_models_that_see(monkeypatch, tmp_path, before, section):
    """Its own rows are new, and the section after them is the same, however often it is written."""
    monkeypatch.setattr(models, "probe_families", lambda _: [verdict("llama", "own", measured=ProbeResult(0, 1e-7))])
    path = tmp_path / "models.md"
    if before is not None:
        path.write_text(before + section)
    written = []
    for _ in range(2):
        assert 0 == models.main(["families", str(path)])
        written.append(path.read_text())

    first, again = written
    assert first == again
    assert "| `own` | llama |" in first
    assert "| old |" not in first
    has_section = bool(section) and before is not None
    assert has_section == (models.HEADING in first) == first.endswith(SECTION)


def test_every_family_stands_in_the_table_of_its_verdict():
    """Families of one strategy or reason share a row; those with numbers have one each."""
    page = models.families_page(
        [
            verdict("llama", "varlen", measured=ProbeResult(0, 1e-7)),
            verdict("jamba", "varlen", split=("Mixer",), measured=ProbeResult(0, 1e-7)),
            verdict("bloom", measured=ProbeResult(0.24, 0.54), reason="gradients pass"),
            verdict("blt", reason="the probe's small copy of the model has 192,555,136 weights, more than 20,000,000"),
            verdict("blip", reason="a small copy of the model does not run (TypeError)"),
            verdict("udop", reason="a small copy of the model does not run (ValueError)"),
            verdict("kimi", reason="a small copy of the model cannot compute images (RuntimeError)"),
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
        "| the small copy has more than 20,000,000 weights | blt |",
        "| the small copy does not run | blip, udop |",
        "| the small copy cannot compute images | kimi |",
        "| the small copy fails for another reason | cosmos |",
    ] == rows
    assert "2 of 8 pass" in " ".join(page.split())

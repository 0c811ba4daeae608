"""Families on the page of models, read back."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

_PACKING = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)

_DIFFERENT = re.compile(r"^\| ([\w.-]+) \| [\d.]+ \| \S+ \|$", re.MULTILINE)

_UNPROVEN = re.compile(r"^\| [^|`]{20,} \| ([^|]*) \|$", re.MULTILINE)
"""Reasons are longer than names."""


def packing_families() -> dict[str, tuple[str, bool]]:
    """Return family -> its strategy, and whether some of its layers run sample by sample."""
    return {
        family.rstrip("*"): (strategy, family.endswith("*"))
        for strategy, families in _PACKING.findall(_section("Families that pack"))
        for family in families.split(", ")
    }


def unpacked_families() -> set[str]:
    """Return the families that do not pack."""
    section = _section("Families that do not")
    unproven = {family for families in _UNPROVEN.findall(section) for family in families.split(", ")}
    return unproven | set(_DIFFERENT.findall(section))


def _section(title: str) -> str:
    page = PAGE.read_text(encoding="utf-8")
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]

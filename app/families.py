"""Which families of models may pack: the verdict on a small model of each, as a table or a page."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from packplan.adapters.progress import progress
from packplan.app.vision import section_of
from packplan.core.equality import STRATEGIES, PackingVerdict

_ABOUT = """Asked of a small model of each family that transformers knows, as its default configuration
has it: `packplan check --families --output docs/models.md` wrote this page on {date}, with
{versions}. {passing} of {all} pass. A run asks its own model in the same way before it measures
anything; other configurations of a family may come out otherwise."""

_TERMS = """**Isolation**: the largest gradient of a sample's logits with respect to another sample,
over the largest of its own; only 0 passes. **Equality**: the largest relative difference of logits,
losses and gradients between a sample in a row and the same one alone, under transformers' own
attention; 2e-05 passes. Of what a family takes besides text, images alone are asked."""

_WIDTH = 100
"""Characters of a line of prose."""


def list_families(names: Sequence[str], *, as_json: bool, output: Path | None) -> None:
    """
    Ask families, and print the verdicts.

    Args:
        names: Of the families; none means all.

        as_json: Print one document instead of a table.

        output: Markdown page to write, too.
    """
    from packplan.app.wiring import families, stores

    verdicts = list(progress(families.verdicts(names), desc="asking", unit=" families"))
    if output is not None:
        before = output.read_text(encoding="utf-8") if output.exists() else ""
        text = page(verdicts, families.versions(), date=f"{datetime.now(UTC):%Y-%m-%d}")
        stores.write_text(output, text + section_of(before))
    if as_json:
        rows = [row(one) for one in verdicts]
        print(json.dumps({"versions": families.versions(), "families": rows}, indent=2))
    else:
        _show(verdicts)


def row(verdict: PackingVerdict) -> dict[str, Any]:
    """Return a verdict for programs."""
    numbers = verdict.to_dict()["measured"]
    return {
        "family": verdict.model_type,
        "strategy": verdict.strategy,
        "isolation": None if numbers is None else numbers["isolation"],
        "equality": None if numbers is None or None in numbers.values() else verdict.equality,
        "passes": verdict.passes,
        "native": verdict.native or None,
        "split": list(verdict.split),
        "reason": verdict.reason,
    }


def page(verdicts: Sequence[PackingVerdict], versions: Mapping[str, str], *, date: str) -> str:
    """
    Return the page of verdicts.

    Args:
        verdicts: On all families.

        versions: Of the packages that they hold for.

        date: When they were asked.
    """
    about = _ABOUT.format(
        date=date,
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
        passing=sum(one.passes for one in verdicts),
        all=len(verdicts),
    )
    prose = [textwrap.fill(" ".join(text.split()), _WIDTH) for text in (about, _TERMS)]
    strategies = "\n".join(f"- `{name}`: {what}" for name, what in STRATEGIES.items())
    head = "| family | strategy | isolation | equality | remark |\n|---|---|---:|---:|---|\n"
    rows = "".join(f"| {' | '.join(_cells(one))} |\n" for one in verdicts)
    return "\n\n".join(["# Which models pack", *prose, strategies, head + rows])


def _cells(verdict: PackingVerdict) -> tuple[str, ...]:
    remark = " and ".join(f"`{name}`" for name in verdict.split) + " by sample" if verdict.split else ""
    numbers = ("", "") if verdict.measured is None else (f"{verdict.isolation:.2g}", f"{verdict.equality:.1e}")
    return (verdict.model_type, verdict.strategy or "none", *numbers, remark if verdict.passes else _plain(verdict))


def _plain(verdict: PackingVerdict) -> str:
    return verdict.reason.replace("|", "/").replace("<", "").replace(">", "")[:160]


def _show(verdicts: Sequence[PackingVerdict]) -> None:
    console = Console(width=None if Console().is_terminal else 140, highlight=False)
    table = Table()
    for name in ("family", "strategy", "isolation", "equality", "remark"):
        table.add_column(name, justify="right" if name in {"isolation", "equality"} else "left", overflow="fold")
    for one in verdicts:
        table.add_row(*(cell.replace("`", "") for cell in _cells(one)), style="" if one.passes else "bold red")
    console.print(table)
    passing = sum(one.passes for one in verdicts)
    console.print(f"{passing:,} of {len(verdicts):,} pass")

"""
Writes a page about plans, as one HTML file that loads no other file.

The page has tables of figures, plots by matplotlib as SVG, and a table with the numbers of each
plot. Jinja escapes all texts from users; plots have no such texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import ArgumentError, OutputError
from packplan.core.inspection import PlanSummary, packs_by_algorithm
from packplan.core.lengths import IntArray
from packplan.core.packs import filled_tokens
from packplan.core.plan import RawPlan
from packplan.core.surface import COLOURS, Figure, Plan, draw_first_packs

HEAD = "<!doctype html>\n<!-- A report by Packplan -->\n"
"""First lines of a page; `packplan plan report` overwrites only a file that begins with them."""

_CLEANED = {
    # Removes definitions that would apply to the whole page, sizes, and fonts, since the page sets
    # its own font.
    r'(?s)<defs>.*?</defs>| (?:width|height)="[\d.]+pt"| (?:id|clip-path|xmlns:xlink)="[^"]*"|; font-family:[^;"]*': "",
    r"font: ([\d.]+px) [^;\"]*": r"font-size: \1",
    "#010203": "currentColor",
    "#010204": "var(--line)",
}
"""Patterns in matplotlib's SVG, each with the text that replaces it in the page."""

Row = tuple[str, ...]

Numbers = NDArray[Any]


@attrs.frozen
class Chart:
    """Plot with a title, a sentence and a table of its numbers, whose first row is the heading."""

    title: str
    text: str
    svg: str
    rows: Sequence[Row]


@attrs.frozen(eq=False)
class ReportedPlan:
    """Plan with all that the page shows about it."""

    name: str
    plan: RawPlan

    lengths: IntArray
    """Number of tokens in each record; int64, shape (num_records,)."""

    summary: PlanSummary

    figures: Sequence[Iterable[Figure]]
    """Groups of figures, each shown as a block of table rows."""

    sources: Mapping[str, IntArray]
    """Number of tokens in each sample, by source; at most as many sources as there are colours."""

    needs: Mapping[str, int] = attrs.field(factory=dict)
    """Number of packs that each algorithm needs (`packs_by_algorithm`); empty without packing."""

    drawings: Sequence[str] = ()
    """SVG drawings of the first packs."""

    works: tuple[Numbers, Numbers, Numbers] | None = None
    """Work of steps, as `work_of_steps` returns it; None if it is unknown."""

    tables: Sequence[tuple[str, Row, Sequence[Row]]] = ()
    """Title, heading row and other rows of each additional table."""

    warnings: Sequence[str] = ()

    def charts(self) -> Iterator[Chart]:
        """Yield plots of lengths, of fill and pack sizes if packed, and of work if it is known."""
        plan, summary, sources = self.plan, self.summary, self.sources
        limit, longest = plan.packing_length, max(one.max() for one in sources.values())
        edges = np.geomspace(min(one.min() for one in sources.values()), max(longest, limit) + 1, 41)
        text = f"The longest sample has {longest:,} tokens; the dashed line marks a pack of {limit:,} tokens."
        yield _histogram(("Samples by length", text), "tokens", sources, edges.round(), limit=limit)
        if self.needs:
            fills = 100 * filled_tokens(plan.packs.loads(self.lengths), limit) / limit
            edges = np.linspace(min(95, fills.min() // 5 * 5), 100, 41)
            text = f"Packs are filled to {summary.fill_mean:.2%} on average; a long pack counts as full."
            yield _histogram(("Packs by fill", text), "fill in %", {"packs": fills}, edges)
            sizes = plan.packs.sizes()
            text = f"A pack has {summary.samples_per_pack:.2f} samples on average, and at most {sizes.max():,}."
            edges = np.arange(1, sizes.max() + (each := -(-sizes.max() // 40)) + 1, each)
            yield _histogram(("Samples of a pack", text), "samples", {"packs": sizes}, edges)
        if self.works is not None:
            edges, mean, busiest = self.works
            text = "FLOPs of the mean rank, and those of the busiest rank beyond that, for which all other ranks wait."
            parts = {"mean rank": mean, "more on the busiest rank": busiest - mean}
            yield _stacked_chart(("Work of each step", text), "steps", parts, edges)


def render_page(title: str, plans: Sequence[ReportedPlan]) -> str:
    """
    Return the HTML text of a page about plans.

    Raises:
        ModuleNotFoundError: matplotlib or jinja2 is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401  # checked once, for all plots
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a report needs {error.name}: pip install 'packplan[report]'", name=error.name
        ) from None
    page = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined)
    return HEAD + page.get_template("report.html").render(title=title, plans=plans, colours=COLOURS) + "\n"


def write_report(plan: Plan, path: str | Path) -> None:
    """
    Write a page about a plan that was made from a list of lengths; see `Plan.report`.

    An existing file at *path* is replaced.

    Raises:
        ArgumentError: *plan* is not a `Plan`.
        OutputError: The file cannot be written.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError("argument", f"write_report takes a Plan of packplan.plan(…), not a {type(plan).__name__}")
    raw, lengths = plan.raw, plan.lengths
    needs, drawings = packs_by_algorithm(raw, lengths), draw_first_packs(raw, lengths)
    shown = ReportedPlan(
        "lengths", raw, lengths, plan.summary, [plan.show().figures], {"all": lengths}, needs, drawings
    )
    try:
        Path(path).write_text(render_page("Plan", [shown]), encoding="utf-8")
    except OSError as error:
        raise OutputError(str(path), error.strerror or str(error)) from error


def _histogram(titles: tuple[str, str], unit: str, parts: Mapping[str, Numbers], edges: Numbers, **line: Any) -> Chart:
    edges = np.unique(edges)
    counts = {name: np.histogram(values, edges)[0] for name, values in parts.items()}
    return _stacked_chart(titles, unit, counts, edges, **line)


def _stacked_chart(
    titles: tuple[str, str], unit: str, parts: Mapping[str, Numbers], edges: Numbers, *, limit: int | None = None
) -> Chart:
    """Return a chart of stacked bars; a *limit* is marked by a line on a logarithmic axis."""
    from matplotlib import figure as plots
    from matplotlib import rc_context

    with rc_context(fname=Path(__file__).with_suffix(".mplstyle")):
        figure, written, base = plots.Figure(figsize=(4.6, 2.5), layout="constrained"), StringIO(), np.zeros(1)
        axes = figure.subplots()
        for heights in parts.values():
            axes.bar(edges[:-1], heights, np.diff(edges), base, align="edge")
            base = base + heights
        axes.set(xlabel=unit, xlim=(edges[0], edges[-1]))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.locator_params(integer=True)
        if limit is not None:
            axes.set_xscale("log", base=2)
            axes.axvline(limit, color="#010203", linestyle="--", linewidth=1)
        axes.xaxis.set_major_formatter("{x:,g}")
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = "<svg" + written.getvalue().partition("<svg")[2]
    for pattern, by in _CLEANED.items():
        svg = re.sub(pattern, by, svg)
    columns = zip(edges.tolist(), edges[1:].tolist(), *(heights.tolist() for heights in parts.values()), strict=False)
    rows = [(f"{low:,g} to below {high:,g}", *map("{:,.6g}".format, row)) for low, high, *row in columns if any(row)]
    return Chart(*titles, svg, [(unit, *parts), *rows])

"""
A page about plans, as one HTML file that loads nothing: figures in words, plots by matplotlib as
SVG, and the numbers of each plot as a table. Jinja escapes all texts of users; no plot has one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.errors import counted
from packplan.core.inspection import PlanSummary
from packplan.core.lengths import IntArray
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.packs import filled_tokens
from packplan.core.plan import RawPlan
from packplan.core.surface import COLOURS, Plan, draw_packs

HEAD = "<!doctype html>\n<!-- A report by Packplan -->\n"
"""First lines of a page, by which its file may be written again."""

_DRAWN_PACKS, _PACKS_A_DRAWING, _DRAWN_SAMPLES = 60, 20, 4000
"""Packs that are drawn, those of one drawing, and the most samples of all: each is a rectangle."""

_BINS = 40
"""Most bars of a histogram."""

_CLEANED = {
    r"(?s)<defs>.*?</defs>": "",  # styles and clips, which would be the whole page's
    r' (?:width|height)="[\d.]+pt"| (?:id|clip-path|xmlns:xlink)="[^"]*"': "",
    r"font: ([\d.]+px) [^;\"]*": r"font-size: \1",
    r"; font-family: [^;\"]*": "",  # in the font of the page
    "#010203": "currentColor",
    "#010204": "var(--line)",
}
"""Patterns of matplotlib's SVG, each with its replacement within a page."""

Row = tuple[str, ...]

Numbers = NDArray[Any]


@attrs.frozen
class Chart:
    """A plot, the sentence that it shows, its numbers, and the colour of each of their columns."""

    title: str
    text: str
    svg: str
    head: Row
    rows: Sequence[Row]
    colours: Sequence[str] = COLOURS


@attrs.frozen(eq=False)
class ReportedPlan:
    """A plan as the page shows it."""

    name: str
    plan: RawPlan

    lengths: IntArray
    """Tokens of each record; int64, shape (num_records,)."""

    summary: PlanSummary

    figures: Sequence[Sequence[Row]]
    """Name, value and remark of each figure, in groups."""

    sources: Mapping[str, IntArray]
    """Source -> tokens of each of its samples."""

    packed: bool = True

    compared: bool = True
    """Whether other algorithms may make the packs: they know no limit of images."""

    step_works: NDArray[np.float64] | None = None
    """Work of each step of an epoch on each rank; shape (steps, world_size). None if unknown."""

    tables: Sequence[tuple[str, Row, Sequence[Row]]] = ()
    """Title, head and rows of each further table."""

    warnings: Sequence[str] = ()

    def charts(self) -> Iterator[Chart]:
        """Yield the plots of the plan."""
        plan, summary, sources = self.plan, self.summary, self._coloured_sources()
        limit, longest = plan.packing_length, max(one.max() for one in sources.values())
        edges = np.geomspace(min(one.min() for one in sources.values()), max(longest, limit) + 1, _BINS + 1)
        text = f"The longest has {longest:,} tokens; the dashed line is a pack of {limit:,}."
        yield _histogram(("Samples by length", text), "tokens", sources, edges.round(), limit=limit)
        if self.packed:
            fills = 100 * filled_tokens(plan.packs.loads(self.lengths), limit) / limit
            edges = np.linspace(min(95, fills.min() // 5 * 5), 100, _BINS + 1)
            text = f"Packs are filled to {summary.fill_mean:.2%} in the mean; a long pack counts as full."
            yield _histogram(("Packs by fill", text), "fill in %", {"packs": fills}, edges)
            sizes = plan.packs.sizes()
            text = f"A pack has {summary.samples_per_pack:.2f} samples in the mean, and at most {sizes.max():,}."
            edges = np.arange(1, sizes.max() + (each := -(-sizes.max() // _BINS)) + 1, each)
            yield _histogram(("Samples of a pack", text), "samples", {"packs": sizes}, edges)
        if self.step_works is not None:
            works = self.step_works
            starts = np.unique(np.linspace(0, len(works), 101).astype(np.int64)[:-1])
            mean, busiest = (np.add.reduceat(one, starts) for one in (works.mean(axis=1), works.max(axis=1)))
            sizes = np.diff([*starts, len(works)])
            imbalance = (works.max(axis=1) / works.mean(axis=1)).mean()
            text = f"A step waits for its busiest rank, which has {imbalance:.4f} times the work of the mean one."
            parts = {"mean rank": mean / sizes, "more of the busiest": (busiest - mean) / sizes}
            yield _stacked_chart(("Work of each step", text), "steps", parts, np.append(starts, len(works)))

    def _coloured_sources(self) -> Mapping[str, IntArray]:
        """Return as many sources as there are colours, of most tokens; the last are all others."""
        names = sorted(self.sources, key=lambda name: -int(self.sources[name].sum()))
        if len(names) <= len(COLOURS):
            return {name: self.sources[name] for name in names}
        first, others = names[: len(COLOURS) - 1], names[len(COLOURS) - 1 :]
        joined = np.concatenate([self.sources[name] for name in others])
        return {name: self.sources[name] for name in first} | {counted(len(others), "other source"): joined}

    def needs(self) -> dict[str, int]:
        """Return the packs of the bound, the plan, each fast algorithm, and padded batches."""
        if not self.packed:
            return {}
        plan, saved = self.plan, self.summary.padding_saved or 0
        tokens = self.lengths[np.sort(np.concatenate([plan.packs.indices, plan.dropped_packs.indices]))]
        short = tokens[tokens < plan.packing_length]
        quick = [name for name, one in ALGORITHMS.items() if not one.takes and short.size and self.compared]
        found = {name: len(pack(short, capacity=plan.packing_length, algorithm=name)) for name in quick}
        return {
            "no plan has fewer": plan.lower_bound,
            "this plan": len(plan.packs) + len(plan.dropped_packs),
            **{name: number + len(plan.single_long) for name, number in found.items()},
            "padded batches": round(plan.planned_tokens / (1 - saved) / plan.packing_length),
        }

    def drawings(self) -> list[str]:
        """Return drawings of the first packs; none where they hold too many samples to be seen."""
        count = min(_DRAWN_PACKS, int(np.searchsorted(self.plan.packs.offsets, _DRAWN_SAMPLES, side="right")) - 1)
        packs = [self.lengths[samples].tolist() for samples in self.plan.packs[: count if self.packed else 0]]
        parts = (packs[start : start + _PACKS_A_DRAWING] for start in range(0, len(packs), _PACKS_A_DRAWING))
        drawn = (draw_packs(part, packing_length=self.plan.packing_length) for part in parts)
        return [re.sub("<title>.*?</title>", "", svg) for svg in drawn]


def render_page(title: str, plans: Sequence[ReportedPlan]) -> str:
    """
    Return a page about plans.

    Raises:
        ModuleNotFoundError: matplotlib or jinja2 is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401  # said here once, for all plots
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ModuleNotFoundError as error:
        message = f"a report needs {error.name}: pip install 'packplan[report]'"
        raise ModuleNotFoundError(message, name=error.name) from None
    loader = FileSystemLoader(Path(__file__).parent)
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return HEAD + page.get_template("report.html").render(title=title, plans=plans) + "\n"


def write_plan(plan: Plan, path: str | Path) -> None:
    """
    Write a page about the plan of a list of lengths.

    Raises:
        ModuleNotFoundError: matplotlib or jinja2 is not installed.
    """
    figures, sources = [[(name, value, "") for name, value in plan.show().rows]], {"samples": plan.lengths}
    page = render_page("Plan", [ReportedPlan("lengths", plan.raw, plan.lengths, plan.summary, figures, sources)])
    Path(path).write_text(page, encoding="utf-8")


def _histogram(titles: tuple[str, str], unit: str, parts: Mapping[str, Numbers], edges: Numbers, **line: Any) -> Chart:
    edges = np.unique(edges)
    counts = {name: np.histogram(values, edges)[0] for name, values in parts.items()}
    return _stacked_chart(titles, unit, counts, edges, **line)


def _stacked_chart(
    titles: tuple[str, str], unit: str, parts: Mapping[str, Numbers], edges: Numbers, *, limit: int | None = None
) -> Chart:
    """Return stacked bars of parts; if there is a *limit*, it is marked on a logarithmic axis."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(fname=Path(__file__).with_suffix(".mplstyle")):
        figure, base, written = Figure(figsize=(4.6, 2.5), layout="constrained"), np.zeros(len(edges) - 1), StringIO()
        axes = figure.subplots()
        for heights in parts.values():
            axes.bar(edges[:-1], heights, np.diff(edges), base, align="edge")
            base += heights
        axes.set(xlabel=unit, xlim=(edges[0], edges[-1]))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.locator_params(axis="x", integer=True)
        if limit is not None:
            axes.set_xscale("log", base=2)
            powers = 2.0 ** np.arange(np.ceil(np.log2(edges[0])), np.log2(edges[-1]))
            axes.set_xticks(powers[:: len(powers) // 6 + 1])
            axes.axvline(limit, color="#010203", linestyle="--", linewidth=1)
        axes.xaxis.set_major_formatter("{x:,g}")
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    for pattern, by in _CLEANED.items():
        svg = re.sub(pattern, by, svg)
    columns = zip(edges.tolist(), edges[1:].tolist(), *(heights.tolist() for heights in parts.values()), strict=False)
    rows = [
        (f"{low:,g} to below {high:,g}", *(f"{one:,.6g}" for one in row)) for low, high, *row in columns if any(row)
    ]
    return Chart(*titles, svg, (unit, *parts), rows)

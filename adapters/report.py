"""
A page about plans, as one HTML file that loads nothing: figures in words, plots by matplotlib as
SVG, and the numbers of each plot as a table. Jinja escapes all texts of users; no plot has one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # takes half a second to load

HEAD = "<!doctype html>\n<!-- A report by Packplan -->\n"
"""First lines of a page, by which its file may be written again."""

DRAWN_PACKS, _PACKS_A_DRAWING, _DRAWN_SAMPLES = 60, 20, 4000
"""Packs that are drawn, those of one drawing, and the most samples of all: each is a rectangle."""

_BINS, _SOURCES = 40, 6
"""Most bars of a histogram, and most sources that have a colour of their own."""

_INK, _LINE = "#010203", "#010204"
"""Stand-ins for colours of the page, which light and dark screens show differently."""

_STYLE: Any = {  # its type lists 300 names
    "svg.fonttype": "none", "svg.hashsalt": "packplan", "text.parse_math": False, "font.size": 9,
    "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.edgecolor": _LINE,
    "grid.color": _LINE, "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.facecolor": "none",
    "axes.spines.top": False, "axes.spines.right": False, "xtick.major.size": 0, "ytick.major.size": 0,
    "xtick.minor.size": 0, "figure.facecolor": "none",
}  # fmt: skip

_CLEANED = (
    (re.compile(r"<defs>.*?</defs>", re.DOTALL), ""),  # styles and clips, which would be the whole page's
    (re.compile(r' (?:width|height)="[\d.]+pt"| (?:id|clip-path|xmlns:xlink)="[^"]*"'), ""),
    (re.compile(r"font: ([\d.]+px) [^;\"]*"), r"font-size: \1"),
    (re.compile(r"; font-family: [^;\"]*"), ""),  # in the font of the page
    (re.compile(_INK), "currentColor"),
    (re.compile(_LINE), "var(--line)"),
)
"""Patterns of matplotlib's SVG, each with its replacement within a page."""

Row = tuple[str, ...]


@attrs.frozen
class Chart:
    """A plot, the sentence that it shows, and its numbers."""

    title: str
    text: str
    svg: str
    head: Row
    rows: Sequence[Row]
    legend: Sequence[tuple[str, str]] = ()
    """Colour and name of each part."""


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
    """Whether other algorithms could make the packs: they know no limit of images."""

    step_works: NDArray[np.float64] | None = None
    """Work of each step of an epoch on each rank; shape (steps, world_size). None if unknown."""

    tables: Sequence[tuple[str, Row, Sequence[Row]]] = ()
    """Title, head and rows of each further table."""

    warnings: Sequence[str] = ()

    def charts(self) -> Iterator[Chart]:
        """Yield the plots of the plan."""
        yield _length_chart(self)
        if self.packed:
            loads = self.plan.packs.loads(self.lengths)
            fills = 100 * filled_tokens(loads, self.plan.packing_length) / self.plan.packing_length
            edges = np.linspace(np.floor(fills.min() / 5) * 5 if fills.min() < 100 else 95, 100, _BINS + 1)
            text = f"Packs are filled to {self.summary.fill_mean:.2%} in the mean; a long pack counts as full."
            yield _histogram(("Packs by fill", text), "fill in %", {"packs": fills}, edges)
            sizes = self.plan.packs.sizes()
            edges = np.unique(np.linspace(1, sizes.max() + 1, _BINS + 1).astype(np.int64))
            text = f"A pack has {self.summary.samples_per_pack:.2f} samples in the mean, and at most {sizes.max():,}."
            yield _histogram(("Samples of a pack", text), "samples", {"packs": sizes}, edges)
            yield _need_chart(self)
        if self.step_works is not None:
            yield _work_chart(self.step_works)

    def drawings(self) -> list[str]:
        """Return drawings of the first packs; none where they hold too many samples to be seen."""
        count = min(DRAWN_PACKS, int(np.searchsorted(self.plan.packs.offsets, _DRAWN_SAMPLES, side="right")) - 1)
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
    return HEAD + page.get_template("report.html").render(title=title, plans=plans, drawn=DRAWN_PACKS) + "\n"


def write_plan(plan: Plan, path: str | Path) -> None:
    """
    Write a page about the plan of a list of lengths.

    Raises:
        ModuleNotFoundError: matplotlib or jinja2 is not installed.
    """
    figures, sources = [[(name, value, "") for name, value in plan.show().rows]], {"samples": plan.lengths}
    page = render_page("Plan", [ReportedPlan("lengths", plan.raw, plan.lengths, plan.summary, figures, sources)])
    Path(path).write_text(page, encoding="utf-8")


def _draw(plot: Callable[[Axes], None]) -> str:
    """Return the SVG of a plot for the middle of a page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 2.5), layout="constrained")
        plot(figure.subplots())
        written = StringIO()
        figure.savefig(written, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    for pattern, by in _CLEANED:
        svg = pattern.sub(by, svg)
    return svg


def _histogram(
    titles: tuple[str, str], unit: str, parts: Mapping[str, NDArray[Any]], edges: NDArray[Any], limit: int | None = None
) -> Chart:
    """Return stacked bars of parts; if there is a *limit*, it is marked on a logarithmic axis."""
    counts = {name: np.histogram(values, edges)[0] for name, values in parts.items()}

    def plot(axes: Axes) -> None:
        base = np.zeros(len(edges) - 1, dtype=np.int64)
        for colour, heights in zip(COLOURS, counts.values(), strict=False):
            axes.bar(edges[:-1], heights, np.diff(edges), base, align="edge", color=colour, clip_on=False)
            base += heights
        axes.set_xlabel(unit)
        axes.set_xlim(edges[0], edges[-1])
        axes.yaxis.set_major_formatter("{x:,.0f}")
        if limit is not None:
            axes.set_xscale("log", base=2)
            powers = range(int(np.ceil(np.log2(edges[0]))), int(np.log2(edges[-1])) + 1)
            axes.set_xticks([2.0**power for power in powers[:: len(powers) // 6 + 1]])
            axes.axvline(limit, color=_INK, linestyle="--", linewidth=1, clip_on=False)
        axes.xaxis.set_major_formatter("{x:,g}")

    ranges = [f"{low:,g} to below {high:,g}" for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]
    columns = zip(*(heights.tolist() for heights in counts.values()), strict=True)
    rows = [(name, *(f"{number:,}" for number in row)) for name, row in zip(ranges, columns, strict=True) if any(row)]
    legend = [*zip(COLOURS, counts, strict=False)] if len(counts) > 1 else []
    return Chart(*titles, _draw(plot), (unit, *counts), rows, legend)


def _length_chart(of: ReportedPlan) -> Chart:
    """Return the samples of each source by their tokens, and where a pack ends."""
    ranked = sorted(of.sources, key=lambda name: -int(of.sources[name].sum()))
    parts = {name: of.sources[name] for name in ranked[:_SOURCES]}
    if len(ranked) > _SOURCES:
        others = ranked[_SOURCES - 1 :]
        joined = np.concatenate([of.sources[name] for name in others])
        parts = {name: parts[name] for name in ranked[: _SOURCES - 1]} | {counted(len(others), "other source"): joined}
    of_all, limit = np.concatenate([*parts.values()]), of.plan.packing_length
    edges = np.unique(np.geomspace(of_all.min(), max(of_all.max(), limit) + 1, _BINS + 1).round().astype(np.int64))
    text = f"{counted(of_all.size, 'sample')} of up to {of_all.max():,} tokens; the dashed line is a pack of {limit:,}."
    return _histogram(("Samples by length", text), "tokens", parts, edges, limit)


def _need_chart(of: ReportedPlan) -> Chart:
    """Return the packs of the plan beside the bound, other algorithms, and padded batches."""
    plan, summary = of.plan, of.summary
    samples = np.sort(np.concatenate([plan.packs.indices, plan.dropped_packs.indices]))
    tokens = of.lengths[samples]
    short = tokens[tokens < plan.packing_length]
    quick = [name for name, one in ALGORITHMS.items() if not one.takes and short.size and of.compared]
    found = {name: len(pack(short, capacity=plan.packing_length, algorithm=name)) for name in quick}
    need = {"no plan has fewer": plan.lower_bound, "this plan": len(plan.packs) + len(plan.dropped_packs)}
    need |= {name: packs + len(plan.single_long) for name, packs in found.items()}
    padded = summary.planned_tokens / (1 - (summary.padding_saved or 0))
    need["padded batches"] = round(padded / plan.packing_length)

    def plot(axes: Axes) -> None:
        colours = [COLOURS[2], COLOURS[0], *[COLOURS[4]] * len(found), COLOURS[1]]
        bars = axes.barh([*need], [*need.values()], color=colours, clip_on=False)
        axes.bar_label(bars, [f"{number:,}" for number in need.values()], padding=3)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.xaxis.set_visible(False)

    text = (
        f"Packs of {plan.packing_length:,} tokens for the same samples. Padded batches are of as many samples as a "
        f"mean pack; {summary.padding_saved:.1%} of their positions are padding, and packs save them."
    )
    rows = [(name, f"{number:,}") for name, number in need.items()]
    return Chart("What others would need", text, _draw(plot), ("", "packs"), rows)


def _work_chart(works: NDArray[np.float64]) -> Chart:
    """Return the work of each step on the mean rank and the busiest, in at most some 100 parts."""
    starts = np.unique(np.linspace(0, len(works), 101).astype(np.int64)[:-1])
    sizes = np.diff([*starts, len(works)])
    mean = np.add.reduceat(works.mean(axis=1), starts) / sizes
    busiest = np.maximum.reduceat(works.max(axis=1), starts)

    def plot(axes: Axes) -> None:
        edges = [*starts, len(works)]
        axes.stairs(busiest, edges, fill=True, color=COLOURS[1], clip_on=False)
        axes.stairs(mean, edges, fill=True, color=COLOURS[0], clip_on=False)
        axes.set_xlabel("step of the epoch")
        axes.locator_params(axis="x", integer=True)
        axes.set_xlim(0, len(works))
        axes.yaxis.set_major_formatter("{x:,.2g}")

    imbalance = (works.max(axis=1) / works.mean(axis=1)).mean()
    text = f"A step waits for its busiest rank: {imbalance:.4f} times the work of the mean rank, over all steps."
    columns = zip(starts.tolist(), mean.tolist(), busiest.tolist(), strict=True)
    rows = [(f"{start:,}", f"{one:,.4g}", f"{most:,.4g}") for start, one, most in columns]
    legend = [(COLOURS[0], "mean rank"), (COLOURS[1], "busiest rank")]
    return Chart("Work of each step", text, _draw(plot), ("from step", "mean rank", "busiest rank"), rows, legend)

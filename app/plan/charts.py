"""
Plots of a plan, as SVG that takes its colours and its font from the page, each with the numbers
that it shows.

A plot's colours are the placeholders below, which become variables of the page's style: one plot
serves a light and a dark page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import attrs
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from packplan.app.plan.stored import PlanView
from packplan.app.planning.log_lines import BOUNDS
from packplan.core.errors import counted
from packplan.core.inspection import fills
from packplan.core.lengths import IntArray
from packplan.core.packers import pack
from packplan.core.plan import RawPlan
from packplan.core.schedule import EpochSchedule, EpochStats, PackStats

INK, GRID, FIRST, SECOND, THIRD = "#010101", "#020202", "#030303", "#040404", "#050505"

VARIABLES = {INK: "--ink", GRID: "--grid", FIRST: "--first", SECOND: "--second", THIRD: "--third"}

STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": "small",
}

SIZE = (5.0, 2.9)
"""Inches: small, so that its text is still read on a phone's width."""

BARS = 48
"""Bars of a histogram, at most."""

LINES = ((SECOND, "-"), (INK, "--"), (FIRST, "-"), (THIRD, ":"))
"""Colour and dashes of each line of the work per step."""

POINTS = 120
"""Points of a line, at most: steps are averaged to as many."""


@attrs.frozen
class Chart:
    """A plot, and what it shows."""

    name: str
    """An identifier on its page."""

    title: str

    says: str
    """Text alternative: the main fact of the plot, in a sentence."""

    draw: Callable[[Axes], None]

    head: tuple[str, ...]
    rows: Iterable[tuple[str, ...]]
    """The numbers, as a table; read once."""

    size: tuple[float, float] = SIZE

    @property
    def svg(self) -> str:
        """A scalable SVG element, whose identifiers are unlike those of other plots."""
        text = io.StringIO()
        with mpl.rc_context({**STYLE, "svg.hashsalt": self.name}):
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure.subplots())
            figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        svg = text.getvalue()[text.getvalue().index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{self.name}-", svg)
        svg = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
        svg = svg.replace("xlink:href", "href")
        for placeholder, variable in VARIABLES.items():
            svg = svg.replace(placeholder, f"var({variable})")
        return re.sub(r"\n\s*", "\n", svg)


def charts(view: PlanView) -> Iterator[Chart]:
    """Yield the plots of a split."""
    yield _lengths(view)
    if view.stored.packed:
        yield _fill(view)
        yield _samples_per_pack(view)
        yield _gap(view)
    yield _work(view)


DRAWN_PACKS = 16
"""Packs that are drawn sample by sample."""


def drawing(view: PlanView) -> Chart:
    """Return some packs drawn sample by sample, spread evenly over the plan."""
    plan, lengths = view.planned.raw, view.stored.lengths.tokens
    places = np.unique(np.linspace(0, len(plan.packs) - 1, min(DRAWN_PACKS, len(plan.packs))).astype(int)).tolist()
    packs = {place: lengths[plan.packs[place]].tolist() for place in places}

    def draw(axes: Axes) -> None:
        for row, parts in enumerate(packs.values()):
            starts = np.cumsum([0, *parts[:-1]]).tolist()
            colours = [(FIRST, THIRD)[number % 2] for number in range(len(parts))]
            axes.broken_barh(list(zip(starts, parts, strict=True)), (row - 0.42, 0.84), facecolors=colours)
        _mark_budget(axes, plan)
        axes.set(xlabel="tokens, sample after sample", yticks=range(len(packs)), yticklabels=[f"{p:,}" for p in packs])
        axes.set(ylabel="pack", xlim=(0, None))
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1))

    shown = counted(len(packs), "pack")
    says = f"{shown} of {len(plan.packs):,}: each row is a pack, and each block of a row is a sample."
    rows = ((f"{place:,}", f"{len(parts):,}", f"{sum(parts):,}") for place, parts in packs.items())
    name, head = f"{view.stored.name}-drawing", ("pack", "samples", "tokens")
    return Chart(name, "Packs, sample by sample", says, draw, head, rows, size=(5.0, 3.4))


def _bars(axes: Axes, counts: IntArray, edges: NDArray[np.floating] | IntArray) -> None:
    # One outline: a rectangle each would take ten times the bytes.
    axes.stairs(counts, edges, fill=True, color=FIRST)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _rows(
    counts: IntArray, edges: NDArray[np.floating] | IntArray, *, precision: int = 0
) -> Iterator[tuple[str, str, str]]:
    bounds = pairwise(f"{edge:,.{precision}f}" for edge in edges.tolist())
    return ((low, high, f"{count:,}") for (low, high), count in zip(bounds, counts.tolist(), strict=True) if count)


def _counts(values: IntArray, *, first: int) -> tuple[IntArray, IntArray]:
    """
    Return counts, and whole edges of equal distance from *first* on, the last beyond every value.
    """
    width = -(-(int(values.max()) + 1 - first) // BARS)
    number = -(-(int(values.max()) + 1 - first) // width)
    edges = first + width * np.arange(number + 1)
    return np.histogram(values, edges)[0], edges


def _mark_budget(axes: Axes, plan: RawPlan) -> None:
    axes.axvline(plan.packing_length, color=SECOND, linestyle="--", label=f"budget, {plan.packing_length:,}")


def _lengths(view: PlanView) -> Chart:
    lengths, plan = view.stored.lengths.tokens, view.plan_summary
    lengths = lengths[lengths > 0]
    counts, edges = _counts(lengths, first=0)

    def draw(axes: Axes) -> None:
        _bars(axes, counts, edges)
        _mark_budget(axes, view.planned.raw)
        axes.set(xlabel="tokens of a sample", ylabel="samples")
        axes.legend()

    says = (
        f"Samples have {int(lengths.min()):,} to {counted(int(lengths.max()), 'token')}, the median "
        f"{int(np.median(lengths)):,}; "
        f"{plan.long_samples + plan.skipped_samples:,} have the budget of {plan.packing_length:,} or more."
    )
    name, head = f"{view.stored.name}-lengths", ("tokens from", "to below", "samples")
    return Chart(name, "Length of samples", says, draw, head, _rows(counts, edges))


def _fill(view: PlanView) -> Chart:
    plan, shares = view.plan_summary, fills(view.planned.raw, view.stored.lengths.tokens)
    # Good plans are nearly full: an axis from 0 would show one bar.
    edges = np.linspace(min(np.floor(shares.min() * 20) / 20, 0.95), 1, 41)
    counts, _ = np.histogram(shares, edges)

    def draw(axes: Axes) -> None:
        _bars(axes, counts, edges)
        axes.set(xlabel="filled share of the budget", ylabel="packs (logarithmic)", yscale="log", ylim=(0.5, None))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_minor_formatter(NullFormatter())

    says = (
        f"Packs are filled to {plan.fill_mean:.4f} on average; 95 % of them reach {plan.fill_p5:.4f}, the worst has "
        f"{plan.fill_worst:.4f}. A pack of a long sample counts as full."
    )
    name, head = f"{view.stored.name}-fill", ("fill from", "to below", "packs")
    return Chart(name, "Fill of packs", says, draw, head, _rows(counts, edges, precision=4))


def _samples_per_pack(view: PlanView) -> Chart:
    sizes = view.planned.raw.packs.sizes()
    counts, edges = _counts(sizes, first=1)

    def draw(axes: Axes) -> None:
        _bars(axes, counts, edges - 0.5)
        axes.set(xlabel="samples of a pack", ylabel="packs")

    says = f"A pack has {int(sizes.min()):,} to {counted(int(sizes.max()), 'sample')}, {sizes.mean():.2f} on average."
    name, head = f"{view.stored.name}-sizes", ("samples from", "to below", "packs")
    return Chart(name, "Samples per pack", says, draw, head, _rows(counts, edges))


def _gap(view: PlanView) -> Chart:
    plan, bound = view.planned.raw, view.plan_summary.lower_bound
    lengths = view.stored.lengths.tokens
    short = lengths[(lengths > 0) & (lengths < plan.packing_length)]
    numbers = {"this plan": len(plan.packs) + len(plan.dropped_packs)}
    others = {"best fit": "best_fit_decreasing", "next fit": "concatenative"}
    for name, algorithm in others.items():
        numbers[name] = len(pack(short, capacity=plan.packing_length, algorithm=algorithm)) + len(plan.single_long)
    gaps = {name: number / bound - 1 for name, number in numbers.items()}

    def draw(axes: Axes) -> None:
        bars = axes.barh(list(gaps), [100 * gap for gap in gaps.values()], color=[FIRST, THIRD, THIRD])
        axes.bar_label(bars, [f" {gap:.3%}" for gap in gaps.values()], color=INK)
        axes.set(xlabel="packs above the lower bound, %", xlim=(0, max(0.1, 125 * max(gaps.values()))))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")

    above = ", ".join(f"{name} {gap:.3%}" for name, gap in gaps.items())
    says = (
        f"No plan of these samples has fewer than {counted(bound, 'pack')} ({BOUNDS[plan.bound_kind]}), before any are "
        "dropped. Above it are: "
        f"{above}."
    )
    rows = ((name, f"{number:,}", f"{gaps[name]:.3%}") for name, number in numbers.items())
    name, head = f"{view.stored.name}-gap", ("planner", "packs", "above the bound")
    return Chart(name, "Packs above the lower bound", says, draw, head, rows)


def _work(view: PlanView) -> Chart:
    tokens, packed = view.stored.lengths.tokens, view.stored.packed
    stats = PackStats.from_plan(view.planned.raw, tokens, packed=packed, works=view.work.samples)

    def per_step(schedule: EpochSchedule) -> NDArray[np.float64]:
        return EpochStats.from_schedule(stats, schedule, 0).works(0, schedule.steps_per_epoch)

    works, schedule, before = per_step(view.schedule), view.schedule_summary, ""
    ranks = {"busiest": works.max(axis=1), "mean": works.mean(axis=1), "idlest": works.min(axis=1)}
    if view.schedule.works is not None:
        plain = per_step(attrs.evolve(view.schedule, works=None, group_by_work=0))
        ranks["not assigned by work, busiest"] = plain.max(axis=1)
        before = f", {schedule.unbalanced_work_imbalance:.3f} times if packs came as they are"
    starts = np.unique(np.linspace(0, len(works), min(POINTS, len(works)) + 1).astype(int))[:-1]
    steps = np.diff([*starts, len(works)])
    lines = {f"{name} rank": np.add.reduceat(values, starts) / steps for name, values in ranks.items()}

    def draw(axes: Axes) -> None:
        marker = "." if len(starts) < 30 else ""
        for (name, values), (colour, dashes) in zip(lines.items(), LINES, strict=False):
            axes.plot(starts, values, dashes, color=colour, label=name, marker=marker)
        axes.set(xlabel="step of the first epoch", ylabel="work, FLOPs", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(ncols=2 if len(lines) > 3 else 3, loc="lower center", bbox_to_anchor=(0.5, 1))

    mean = f"; each point is the mean of about {len(works) / len(starts):,.0f} steps"
    says = (
        f"Over {counted(schedule.world_size, 'rank')}, the busiest does {schedule.work_imbalance:.3f} times the mean "
        f"rank's work in a step, {schedule.worst_work_imbalance:.3f} times in the worst step{before}. "
        f"Work is in {view.work.unit}{mean if len(works) > len(starts) else ''}."
    )
    numbers = zip(starts.tolist(), *lines.values(), strict=True)
    rows = ((f"{start:,}", *(f"{value:,.0f}" for value in values)) for start, *values in numbers)
    return Chart(f"{view.stored.name}-work", "Work per step over the ranks", says, draw, ("from step", *lines), rows)

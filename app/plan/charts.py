"""
Plots of a plan, as SVG that takes its colours and its font from the page, each with the numbers
that it shows.

A plot's colours are the placeholders below, which become variables of the page's style: one plot
serves a light and a dark page.
"""

import io
import re
from collections.abc import Callable, Iterable

import attrs
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, NullFormatter

from packplan.app.plan.stored import PlanView
from packplan.core.errors import counted
from packplan.core.inspection import fills

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

SIZE = (5.0, 3.2)
"""Inches: small, so that its text is still read on a phone's width."""

DRAWN_PACKS = 16
"""Packs that are drawn sample by sample."""


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

    @property
    def svg(self) -> str:
        """A scalable SVG element, whose identifiers are unlike those of other plots."""
        text = io.StringIO()
        with mpl.rc_context({**STYLE, "svg.hashsalt": self.name}):
            figure = Figure(figsize=SIZE, layout="constrained")
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


def draw_packs(view: PlanView) -> Chart:
    """Return some packs drawn sample by sample, spread evenly over the plan."""
    plan, lengths = view.planned.raw, view.stored.lengths.tokens
    places = np.unique(np.linspace(0, len(plan.packs) - 1, min(DRAWN_PACKS, len(plan.packs))).astype(int)).tolist()
    packs = {place: lengths[plan.packs[place]].tolist() for place in places}

    def draw(axes: Axes) -> None:
        for row, parts in enumerate(packs.values()):
            starts = np.cumsum([0, *parts[:-1]]).tolist()
            colours = [(FIRST, THIRD)[number % 2] for number in range(len(parts))]
            axes.broken_barh(list(zip(starts, parts, strict=True)), (row - 0.42, 0.84), facecolors=colours)
        axes.axvline(plan.packing_length, color=SECOND, linestyle="--", label=f"budget, {plan.packing_length:,}")
        axes.set(xlabel="tokens, sample after sample", yticks=range(len(packs)), yticklabels=[f"{p:,}" for p in packs])
        axes.set(ylabel="pack", xlim=(0, None))
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1))

    shown = counted(len(packs), "pack")
    says = f"{shown} of {len(plan.packs):,}: each row is a pack, and each block of a row is a sample."
    rows = ((f"{place:,}", f"{len(parts):,}", f"{sum(parts):,}") for place, parts in packs.items())
    name, head = f"{view.stored.name}-drawing", ("pack", "samples", "tokens")
    return Chart(name, "Packs, sample by sample", says, draw, head, rows)


def plot_fill(view: PlanView) -> Chart:
    """Return a histogram of the fill of packs."""
    plan, shares = view.plan_summary, fills(view.planned.raw, view.stored.lengths.tokens)
    # Good plans are nearly full: an axis from 0 would show one bar.
    edges = np.linspace(min(np.floor(shares.min() * 20) / 20, 0.95), 1, 41)
    counts, _ = np.histogram(shares, edges)

    def draw(axes: Axes) -> None:
        # One outline: a rectangle each would take ten times the bytes.
        axes.stairs(counts, edges, fill=True, color=FIRST)
        axes.set(xlabel="filled share of the budget", ylabel="packs (logarithmic)", yscale="log", ylim=(0.5, None))
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_minor_formatter(NullFormatter())

    says = (
        f"Packs are filled to {plan.fill_mean:.4f} on average; 95 % of them reach {plan.fill_p5:.4f}, the worst has "
        f"{plan.fill_worst:.4f}. A pack of a long sample counts as full."
    )
    bounds = [f"{edge:,.4f}" for edge in edges.tolist()]
    rows = ((*bounds[n : n + 2], f"{count:,}") for n, count in enumerate(counts.tolist()) if count)
    name, head = f"{view.stored.name}-fill", ("fill from", "to below", "packs")
    return Chart(name, "Fill of packs", says, draw, head, rows)

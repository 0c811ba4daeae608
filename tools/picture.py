"""
Draw samples of the demo in padded batches and in packs. After `make demo`, `python -m
tools.picture` writes `docs/plan.svg`.
"""

import json
import random
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

from packplan.core.plan import build_raw_plan

STORED = Path("runs/demo/run/static_packing/train")
NUM_PACKS, BATCH_SIZE, PACKS_A_LINE = 12, 5, 4
WIDTH, BAR, GAP, TEXT = 840, 16, 10, 38
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
STYLE = """.ground { fill: #ffffff } text { font: 18px system-ui, sans-serif; fill: #1f2328 } .empty { fill: #d8dce1 }
@media (prefers-color-scheme: dark) { .ground { fill: #0d1117 } text { fill: #f0f6fc } .empty { fill: #3d444d } }"""


def spread_packs(lengths: Sequence[int], *, packing_length: int) -> list[list[int]]:
    """
    Return the sample lengths of some packs, spread evenly over a plan. Packs above the packing
    length are left out.
    """
    plan = build_raw_plan(lengths, packing_length=packing_length, min_fill_ratio="0.65")
    packs = [[lengths[index] for index in pack] for pack in plan.packs.tolist()]
    packs = [pack for pack in packs if sum(pack) <= packing_length]
    return packs[:: len(packs) // NUM_PACKS][:NUM_PACKS]


def _corners(widths: Sequence[float], *, top: float, height: float) -> list[tuple[float, float]]:
    """Return the upper left corners of blocks of one height that flow into lines of `WIDTH`."""
    found, x, y = [], 0.0, top
    for width in widths:
        if x and x + width > WIDTH + 0.01:
            x, y = 0.0, y + height + GAP
        found.append((x, y))
        x += width + GAP
    return found


def _bar(x: float, y: float, width: float, colour: str = "") -> str:
    """Return an SVG rectangle for a sample or, without a colour, for empty positions."""
    kind = f'fill="{colour}"' if colour else 'class="empty"'
    return f'<rect {kind} x="{x:.1f}" y="{y:.1f}" width="{width - 1:.1f}" height="{BAR - 1}"/>'


def draw_packs(packs: Sequence[Sequence[int]], *, packing_length: int) -> str:
    """Return an SVG drawing of the same samples in shuffled, padded batches, and in *packs*."""
    scale = (WIDTH - (PACKS_A_LINE - 1) * GAP) / PACKS_A_LINE / packing_length
    samples = [(pack, place) for pack, lengths in enumerate(packs) for place in range(len(lengths))]
    random.Random(0).shuffle(samples)  # noqa: S311  # an order, not a secret
    batches = [samples[start : start + BATCH_SIZE] for start in range(0, len(samples), BATCH_SIZE)]
    widths = [max(packs[pack][place] for pack, place in batch) for batch in batches]
    colours, bars = {}, []
    for number, (x, y) in enumerate(_corners([scale * width for width in widths], top=TEXT, height=BATCH_SIZE * BAR)):
        for row, (pack, place) in enumerate(batches[number]):
            colours[pack, place] = COLOURS[number % len(COLOURS)]
            bars.append(_bar(x, y + row * BAR, scale * widths[number]))
            bars.append(_bar(x, y + row * BAR, scale * packs[pack][place], colours[pack, place]))
    top = y + BATCH_SIZE * BAR + TEXT
    for number, (x, y) in enumerate(_corners([scale * packing_length] * len(packs), top=top + GAP, height=BAR)):
        bars.append(_bar(x, y, scale * packing_length))
        for place, end in enumerate(accumulate(packs[number])):
            length = packs[number][place]
            bars.append(_bar(x + scale * (end - length), y, scale * length, colours[number, place]))
    tokens, padded = sum(map(sum, packs)), sum(len(batch) * width for batch, width in zip(batches, widths, strict=True))
    share, limit = f"{1 - tokens / padded:.0%}", f"{packing_length:,}"
    titles = (
        f"Padded: {len(samples)} samples in {len(batches)} batches, {padded:,} positions, {share} padding (grey)",
        f"Packed: the same samples in {len(packs)} packs of {limit} tokens, {tokens:,} positions, no padding",
    )
    view = f"-12 -4 {WIDTH + 24} {round(y) + BAR + 16}"
    text = [f'<text x="0" y="{at}">{title}</text>' for at, title in zip((22, round(top)), titles, strict=True)]
    ground = '<rect class="ground" x="-12" y="-4" width="100%" height="100%"/>'
    lines = [f"<title>{'. '.join(titles)}</title>", f"<style>{STYLE}</style>", ground, *text, *bars]
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" role="img">', *lines, "</svg>\n"])


def main() -> None:
    """Write the picture of the demo's plan."""
    columns = json.loads((STORED / "lengths.json").read_text())["samples"]["columns"]
    table = np.fromfile(STORED / "lengths.bin", dtype="<i4").reshape(-1, len(columns))
    packing_length = json.loads((STORED / "raw_plan.json").read_text())["packing_length"]
    packs = spread_packs(table[:, columns.index("length")].tolist(), packing_length=packing_length)
    Path("docs/plan.svg").write_text(draw_packs(packs, packing_length=packing_length), encoding="utf-8")


if __name__ == "__main__":
    main()

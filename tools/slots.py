"""
Draw the slots of a step whose long packs are shared: `python -m tools.slots` writes
`docs/slots.svg`.

Packs and slots are those of a plan and a schedule that Packplan makes.
"""

from pathlib import Path

from packplan.core.surface import plan
from tools.picture import COLOURS, STYLE

DRAWING = Path(__file__).resolve().parents[1] / "docs" / "slots.svg"

RANKS, MICROBATCHES, PACKING_LENGTH = 4, 3, 8192
LENGTHS = (5000, 3100, 30_000, 7900, 11_000, 4200, 3800, 15_500, 2000, 6150)
"""Number of tokens of each sample in the drawn step."""

LEFT, TOP, WIDTH, HEIGHT, GAP = 80, 56, 250, 34, 4


def draw_step() -> str:
    """Return an SVG drawing with a row for each rank and a column for each microbatch."""
    planned = plan(LENGTHS, PACKING_LENGTH)
    schedule = planned.schedule(world_size=RANKS, packs_per_step=RANKS * MICROBATCHES, degrees="auto")
    order, degrees = schedule.order(0).reshape(-1, RANKS), schedule.pack_degrees(0)
    tokens = planned.packs.loads(planned.lengths)
    parts = [f'<text x="0" y="{_top(rank) + 22}">rank {rank}</text>' for rank in range(RANKS)]
    for number, packs in enumerate(order.tolist()):
        x = LEFT + number * (WIDTH + GAP)
        parts.append(f'<text x="{x}" y="{TOP - 10}">microbatch {number + 1}</text>')
        for rank, pack in enumerate(packs):
            if rank % (size := int(degrees[pack])):
                continue
            height, colour = size * HEIGHT - GAP, COLOURS[pack % len(COLOURS)]
            each = "" if size == 1 else f", {-(-tokens[pack] // size):,} a rank"
            parts.append(f'<rect fill="{colour}" x="{x}" y="{_top(rank)}" width="{WIDTH}" height="{height}"/>')
            text = f"{tokens[pack]:,} tokens{each}"
            parts.append(f'<text class="on" x="{x + 8}" y="{_top(rank) + height // 2 + 6}">{text}</text>')
    title = f"One step of {RANKS} ranks: {len(degrees)} packs in {order.size} slots of {PACKING_LENGTH:,} tokens"
    view = f"-12 -4 {LEFT + len(order) * (WIDTH + GAP) + 20} {TOP + RANKS * HEIGHT + 12}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{view}" role="img">'
    ground = '<rect class="ground" x="-12" y="-4" width="100%" height="100%"/>'
    lines = [f"<title>{title}</title>", f"<style>{STYLE} .on {{ fill: #ffffff; font-size: 15px }}</style>", ground]
    return "\n".join([head, *lines, f'<text x="0" y="20">{title}</text>', *parts, "</svg>\n"])


def _top(rank: int) -> int:
    return TOP + rank * HEIGHT


if __name__ == "__main__":
    DRAWING.write_text(draw_step(), encoding="utf-8")

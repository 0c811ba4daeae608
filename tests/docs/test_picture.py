"""The drawings of the README and of the rooms: each file is that of its tool."""

import json
import re
from xml.etree import ElementTree as ET

from tests.processes import ROOT
from tools import bars, rooms, slots
from tools.picture import GAP, PACKS_A_LINE, WIDTH, draw_packs

DRAWING = (ROOT / "docs" / "plan.svg").read_text(encoding="utf-8")

PACKING_LENGTH = 1024

SCALE = (WIDTH - (PACKS_A_LINE - 1) * GAP) / PACKS_A_LINE / PACKING_LENGTH


def drawn_bars(drawing: str) -> list[tuple[str | None, int]]:
    """Return the colour of each bar, None if it holds no sample, and its tokens."""
    found = [one.attrib for one in ET.fromstring(drawing).iter() if one.tag.endswith("rect")]  # noqa: S314  # our own
    return [(one.get("fill"), round((float(one["width"]) + 1) / SCALE)) for one in found if "%" not in one["width"]]


def drawn_packs(drawing: str) -> list[list[int]]:
    """Return the lengths in each pack: bars that follow an empty one of the packing length."""
    packs: list[list[int]] = []
    for colour, length in drawn_bars(drawing):
        if colour is None and length == PACKING_LENGTH:
            packs.append([])
        elif packs:
            packs[-1].append(length)
    return packs


def test_the_drawing_is_that_of_the_tool():
    """Its bars give the same file again; the README has its numbers in words."""
    packs = drawn_packs(DRAWING)
    samples, share = re.search(r"Padded: (\d+) samples .*?(\d+)% padding", DRAWING).groups()

    assert 12 == len(packs)
    assert draw_packs(packs, packing_length=PACKING_LENGTH) == DRAWING
    assert f"![{samples} samples of the demo: padded, {share} %" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_drawing_of_the_rooms_is_that_of_the_imports():
    """Each file of a sample's way is one."""
    assert [] == [file for file in rooms.WAY.values() if not (ROOT / file).exists()], "name its place in tools/rooms.py"
    assert rooms.draw_rooms() == rooms.DRAWING.read_text(encoding="utf-8"), "run python -m tools.rooms"


def test_the_drawing_of_slots_is_that_of_a_schedule():
    """One step of it: all packs, and every slot."""
    assert slots.draw_step() == slots.DRAWING.read_text(encoding="utf-8"), "run python -m tools.slots"


def test_the_drawing_of_bars_is_that_of_what_was_measured():
    """The README and the page of the trainers have its figures in tables."""
    measured = json.loads(bars.MEASURED.read_text(encoding="utf-8"))
    rows = {host: bars.gains(row) for host, row in bars.least_gain(measured).items()}
    page = (ROOT / "docs" / "use-it-in" / "transformers.md").read_text(encoding="utf-8")

    assert bars.draw_bars(measured) == bars.DRAWING.read_text(encoding="utf-8"), "run python -m tools.bars"
    assert f"\n{bars.table(measured)}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert [] == [host for host, (fast, share) in rows.items() if f" | {fast} | {share} |" not in page]

"""The drawing of the README: every sample twice, and the file is that of the tool."""

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tools.picture import GAP, PACKS_A_LINE, WIDTH, picture

ROOT = Path(__file__).parents[2]

DRAWING = (ROOT / "docs" / "plan.svg").read_text(encoding="utf-8")

PACKING_LENGTH = 1024

SCALE = (WIDTH - (PACKS_A_LINE - 1) * GAP) / PACKS_A_LINE / PACKING_LENGTH


def bars(drawing: str) -> list[tuple[str | None, int]]:
    """Return the colour of each bar, None if it holds no sample, and its tokens."""
    found = [one.attrib for one in ET.fromstring(drawing).iter() if one.tag.endswith("rect")]  # noqa: S314  # our own
    return [(one.get("fill"), round((float(one["width"]) + 1) / SCALE)) for one in found if "%" not in one["width"]]


def drawn_packs(drawing: str) -> list[list[int]]:
    """Return the lengths in each pack: bars that follow an empty one of the packing length."""
    packs: list[list[int]] = []
    for colour, length in bars(drawing):
        if colour is None and length == PACKING_LENGTH:
            packs.append([])
        elif packs:
            packs[-1].append(length)
    return packs


@pytest.mark.parametrize("packs", [[[5]], [[700, 300], [1000], [20, 500, 504]], [[100] * 10] * 9])
def test_every_sample_is_drawn_padded_and_packed(packs):
    """In one colour and width; the figures in the text are those of the samples."""
    drawing = picture(packs, packing_length=PACKING_LENGTH)
    drawn = sorted(bar for bar in bars(drawing) if bar[0])
    num_samples, num_tokens = sum(map(len, packs)), sum(map(sum, packs))

    assert packs == drawn_packs(drawing)
    assert drawn[::2] == drawn[1::2]
    assert 2 * num_samples == len(drawn)
    assert f"{num_samples} samples in" in drawing
    assert f"{len(packs)} packs of 1,024 tokens, {num_tokens:,} positions" in drawing


def test_the_drawing_is_that_of_the_tool():
    """Its bars give the same file again; the README has its numbers in words."""
    packs = drawn_packs(DRAWING)
    samples, share = re.search(r"Padded: (\d+) samples .*?(\d+)% padding", DRAWING).groups()

    assert 12 == len(packs)
    assert picture(packs, packing_length=PACKING_LENGTH) == DRAWING
    assert f"![{samples} samples of the demo: padded, {share} %" in (ROOT / "README.md").read_text(encoding="utf-8")

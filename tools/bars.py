"""
Draw the time and memory of trainers with and without padding: `python -m tools.bars` writes
`docs/bars.svg` from `benchmarks/unpad.json`.

The JSON file contains the output of two runs of `python -m benchmarks unpad --json`, with their
date and command. For each trainer, the run that saved less time is drawn.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

MEASURED = ROOT / "benchmarks" / "unpad.json"

DRAWING = ROOT / "docs" / "bars.svg"

TRAINERS = {"sft": "SFT", "dpo": "DPO", "grpo": "GRPO", "kto": "KTO", "reward": "rewards"}
"""Trainer of the benchmark -> its name in the drawing, from the top."""

WIDTH, BAR, ROW, TOP = 840, 17, 46, 62

PANELS = ((90, 320), (530, 250))
"""Left edge and width in pixels of the bars of time, and of the bars of memory."""

STYLE = """.ground { fill: #ffffff } text { font: 18px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 14px }
.padded { fill: #b8bfc8 } .packed { fill: #0072b2 }
@media (prefers-color-scheme: dark) { .ground { fill: #0d1117 } text { fill: #f0f6fc } .padded { fill: #656d76 } }"""


def least_gain(measured: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """
    Return the row of each trainer: name -> row. Of several rows, the row that saves the least time
    is returned.
    """
    rows = sorted(measured["rows"], key=lambda row: row["packed_s"] / row["padded_s"])
    return {row["host"]: row for row in rows}


def gains(row: Mapping[str, Any]) -> tuple[str, str]:
    """
    Return two figures of a trainer without padding, relative to padded batches: its speed, and its
    memory.
    """
    return f"{row['padded_s'] / row['packed_s']:.1f}", f"{row['peak']:.2f}"


def table(measured: Mapping[str, Any]) -> str:
    """Return the figures of the drawing as two rows of a Markdown table."""
    rows = {host: gains(row) for host, row in least_gain(measured).items()}
    fast, small = ("|".join(rows[host][at] for host in TRAINERS) for at in (0, 1))
    return f"|Speedup in processor time|{fast}|\n|Memory relative to padded batches|{small}|"


def sentence(measured: Mapping[str, Any]) -> str:
    """Return the figures of the drawing in words."""
    rows = {host: gains(row) for host, row in least_gain(measured).items()}
    fast, small = (", ".join(f"{name} {rows[host][at]}" for host, name in TRAINERS.items()) for at in (0, 1))
    return f"Speedup without padding: {fast}. Memory relative to padded batches: {small}"


def draw_bars(measured: Mapping[str, Any]) -> str:
    """
    Return an SVG drawing. Each trainer has two bars for time and two bars for memory: with padding,
    and without.
    """
    rows = least_gain(measured)
    (left, _), (right, _) = PANELS
    shapes = [_text(left, 22, "Processor time of two steps"), _text(right, 22, "Peak of tensors, share")]
    shapes += [_bar(left, 32, 12, "padded"), _text(left + 18, 46, "padded")]
    shapes += [_bar(left + 110, 32, 12, "packed"), _text(left + 128, 46, "without padding, by unpad")]
    for number, (host, name) in enumerate(TRAINERS.items()):
        row, y = rows[host], TOP + number * ROW
        faster, share = gains(row)
        shapes.append(_text(0, y + 23, name))
        seconds = (
            (row["padded_s"], f"{row['padded_s']:.1f} s"),
            (row["packed_s"], f"{row['packed_s']:.1f} s: {faster} times as fast"),
        )
        bytes_ = ((1.0, "1"), (row["peak"], share))
        for (x, width), values in zip(PANELS, (seconds, bytes_), strict=True):
            for kind, (value, text), below in zip(("padded", "packed"), values, (0, BAR + 1), strict=True):
                long = width * value / values[0][0]
                shapes += [_bar(x, y + below, long, kind), _text(x + long + 6, y + below + 14, text)]
    end = TOP + len(TRAINERS) * ROW
    facts = "; ".join(f"{name} {value}" for name, value in measured["machine"].items())
    shapes += [
        _text(0, end + 18, f"{measured['date']}: {measured['command']}", "small"),
        _text(0, end + 38, facts, "small"),
    ]
    ground = f'<rect class="ground" x="-8" y="-4" width="{WIDTH + 16}" height="{end + 56}"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -4 {WIDTH + 16} {end + 56}" role="img">'
    return "\n".join(
        [head, f"<title>{sentence(measured)}</title>", f"<style>{STYLE}</style>", ground, *shapes, "</svg>\n"]
    )


def _bar(x: float, y: float, width: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{width:.1f}" height="{BAR - 1}"/>'


def _text(x: float, y: float, text: str, kind: str = "text") -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{text}</text>'


def main() -> None:
    """Write the drawing to `docs/bars.svg`."""
    DRAWING.write_text(draw_bars(json.loads(MEASURED.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()

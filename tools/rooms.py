"""
Draw the rooms of the project and the way of a sample: `python -m tools.rooms` writes
`docs/rooms.svg`.

A room is a folder of core, adapters or app, or a file that `WAY` names. Arrows are imports, which
are read from the source without importing anything. Imports that a longer path implies are left
out, and so are other files directly in core or adapters.
"""

import ast
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

DRAWING = ROOT / "docs" / "rooms.svg"

LAYERS = {
    "app": "puts both together in commands, and imports adapters and core",
    "adapters": "do input and output, and import core",
    "core": "decides, and imports neither",
}

WAY = {
    "read": "adapters/config/run.py",
    "measure": "app/planning/measure.py",
    "pack": "core/plan.py",
    "schedule": "core/schedule/schedule.py",
    "load": "adapters/loaders/batches.py",
    "train": "adapters/trainer/trainer.py",
}
"""Stage that a sample passes on its way into training -> file in which the stage begins."""

WIDTH, BOX, ROW = 960, (112, 28), 52

STYLE = """.ground { fill: #ffffff } text { font: 14px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px }
.band { fill: #eef2f6 } .box { fill: #ffffff; stroke: #57606a } .line { stroke: #8c959f; marker-end: url(#head) }
.step { fill: #0072b2 } .number { fill: #ffffff; font-size: 11px; font-weight: bold } #head path { fill: #8c959f }
@media (prefers-color-scheme: dark) { .ground { fill: #0d1117 } text { fill: #f0f6fc } .band { fill: #161b22 }
.box { fill: #0d1117; stroke: #8c959f } }"""


def room_of(path: Path) -> str:
    """
    Return the room of a file: its folder, the file itself if `WAY` names it, or `app/commands`.
    Other files directly in core or adapters belong to the layer.
    """
    layer, first, *rest = path.relative_to(ROOT).parts
    if rest or str(path.relative_to(ROOT)) in WAY.values():
        return f"{layer}/{first.removesuffix('.py')}"
    return "app/commands" if layer == "app" else layer


def imported_file(module: str, name: str) -> Path | None:
    """Return the project's file that `from module import name` imports, or None."""
    parts = [*module.split("."), name][1:]
    for end in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[:end])
        if found := [one for one in (path / "__init__.py", path.with_suffix(".py")) if one.exists()]:
            return found[0]
    return None


def imports_by_room() -> dict[str, set[str]]:
    """Return a dict of room -> rooms of the same layer that this room imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")):
        if "/" not in (room := room_of(path)):
            continue
        below = found.setdefault(room, set())
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
        ]
        names = [(node.module, alias.name) for node in nodes if node.module for alias in node.names]
        files = [imported_file(module, name) for module, name in names if module.startswith("packplan.")]
        below |= {room_of(file) for file in files if file and file.parts[len(ROOT.parts)] == room.split("/")[0]} - {
            room
        }
    return {room: {one for one in below if one in found} for room, below in found.items()}


def rooms_below(room: str, below: dict[str, set[str]]) -> set[str]:
    """Return every room that *room* imports, directly or through others."""
    reached, ahead = set(), list(below[room])
    while ahead:
        if (one := ahead.pop()) not in reached:
            reached.add(one)
            ahead += below[one]
    return reached


def drop_implied(below: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports without those that a longer path of imports implies."""
    reached = {room: rooms_below(room, below) for room in below}
    return {
        room: {
            one
            for one in ones
            if not any(one in reached[other] and room not in reached[other] for other in ones - {one})
        }
        for room, ones in below.items()
    }


def arrange_in_rows(rooms: Iterable[str], below: dict[str, set[str]]) -> list[list[str]]:
    """Return rooms in rows. Each room is in a row below the rooms that import it, and near them."""
    level = dict.fromkeys(rooms, 0)
    for _ in level:  # no way is longer; in a circle, this ends too
        for room in level:
            for one in below[room]:
                level[one] = max(level[one], min(level[room] + 1, len(level)))
    rows = [[room for room in level if level[room] == number] for number in sorted(set(level.values()))]
    for upper, row in pairwise(rows):
        place = {room: number - len(upper) / 2 for number, room in enumerate(upper)}
        row.sort(key=lambda room: (sum(place[one] for one in place if room in below[one]), room))
    return rows


def draw_rooms() -> str:
    """Return an SVG drawing of the rooms, their imports and the way of a sample."""
    below = drop_implied(imports_by_room())
    step = (WIDTH - 20) / len(WAY)
    shapes, boxes = ['<text x="10" y="22">Six stages of a sample, and the rooms of code that it passes</text>'], []
    for number, (name, file) in enumerate(WAY.items()):
        x = 10 + number * step
        shapes += [*_badge(x + 9, 44, number + 1), f'<text x="{x + 22:.0f}" y="49">{name}</text>']
        shapes.append(f'<text class="small" x="{min(x, WIDTH - 152):.0f}" y="{68 + 14 * (number % 2)}">{file}</text>')
    top = 98
    for layer, does in LAYERS.items():
        rows = arrange_in_rows([room for room in below if room.startswith(f"{layer}/")], below)
        at = {
            room: (WIDTH * (place + 1) / (len(row) + 1), top + 34 + number * ROW)
            for number, row in enumerate(rows) for place, room in enumerate(row)
        }  # fmt: skip
        height = 34 + (len(rows) - 1) * ROW + BOX[1] + 14
        shapes += [f'<rect class="band" x="4" y="{top}" width="{WIDTH - 8}" height="{height}" rx="6"/>']
        shapes += [f'<text x="14" y="{top + 20}">{layer} {does}</text>']
        for room, (x, y) in at.items():
            lines = [(at[one][0], at[one][1]) for one in sorted(below[room])]
            shapes += [
                f'<line class="line" x1="{x:.0f}" y1="{y + BOX[1]}" x2="{to:.0f}" y2="{end}"/>' for to, end in lines
            ]
            boxes += _box(room, x, y)
        top += height + 14
    head = '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    start = [f"<style>{STYLE}</style>", f'<defs>{head}<path d="M0 0L8 4L0 8z"/></marker></defs>']
    ground = f'<rect class="ground" width="{WIDTH}" height="{top}"/>'
    view = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img">'
    title = f"<title>Rooms of {', '.join(LAYERS)}; an arrow is an import</title>"
    return "\n".join([view, title, *start, ground, *shapes, *boxes, "</svg>\n"])


def _badge(x: float, y: float, number: int) -> list[str]:
    """Return the SVG of a numbered dot, which marks a stage of a sample."""
    dot = f'<circle class="step" cx="{x:.0f}" cy="{y:.0f}" r="9"/>'
    return [dot, f'<text class="number" text-anchor="middle" x="{x:.0f}" y="{y + 4:.0f}">{number}</text>']


def _box(room: str, x: float, y: float) -> list[str]:
    """Return the SVG of a room: a box with its name, and with the stages that begin in the room."""
    left, name = x - BOX[0] / 2, room.partition("/")[2]
    steps = [number for number, file in enumerate(WAY.values(), 1) if room_of(ROOT / file) == room]
    badges = [part for place, number in enumerate(steps) for part in _badge(left + 4 + 20 * place, y + 2, number)]
    rect = f'<rect class="box" x="{left:.0f}" y="{y}" width="{BOX[0]}" height="{BOX[1]}" rx="4"/>'
    return [rect, f'<text text-anchor="middle" x="{x:.0f}" y="{y + 19}">{name}</text>', *badges]


def main() -> None:
    """Write the drawing."""
    if lost := [file for file in WAY.values() if not (ROOT / file).exists()]:
        message = f"WAY of tools/rooms.py names {', '.join(lost)}, which does not exist: name the present file"
        raise SystemExit(message)
    DRAWING.write_text(draw_rooms(), encoding="utf-8")


if __name__ == "__main__":
    main()

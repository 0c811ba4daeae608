"""The product stays below its ceilings, and new modules are worth a file."""

from pathlib import Path

from tools import size

FEW = 40
"""Lines of code below which a module needs a reason."""

SMALL = Path(__file__).with_name("small_modules.txt")
"""Modules below it, one a line with a reason."""


def test_no_room_is_above_its_ceiling(tmp_path, monkeypatch):
    """An ADR alone raises one; `make lint` names the room, both numbers, and what to do."""
    low = tmp_path / "ceilings.txt"
    low.write_text("core/align 1 core/align.py\ncore/plan 9999 core/plan.py\n")

    told = "core/align has {}, and its ceiling is 1: take lines out, or raise the ceiling by an ADR"
    assert [told.format(size.room_size("core/align", ["core/align.py"]))] == size.size_faults(low)
    monkeypatch.setattr("sys.argv", ["size.py", "check"])
    size.main()


def test_every_module_has_one_room():
    """The rooms are the product: their sizes add up to it."""
    rooms = size.ceilings()
    product = size.room_size("product", rooms["product"][1])

    assert product == sum(size.room_size(name, places) for name, (_, places) in rooms.items() if "/" in name)


def test_a_small_module_has_a_reason():
    """Beside it in `small_modules.txt`; a function that two modules share is one."""
    reasons = dict(line.partition(" ")[::2] for line in SMALL.read_text(encoding="utf-8").splitlines())
    names = reasons.keys()
    assert all(reasons.values()), "give a reason"
    found = {
        str(path.relative_to(size.ROOT))
        for part in size.PRODUCT
        for path in (size.ROOT / part).rglob("*.py")
        if path.name not in {"__init__.py", "__main__.py"} and size.code_lines(path.read_text(encoding="utf-8")) < FEW
    }

    assert set() == found - names, "join these to the module that uses them, or give a reason"
    assert set() == names - found, f"no longer small, or gone: take them out of {SMALL.name}"


def test_lower_never_raises(tmp_path):
    """A room that grew keeps its ceiling, and fails; one that shrank gets under 50 lines more."""
    path, align = tmp_path / "ceilings.txt", -(-size.room_size("core/align", ["core/align.py"]) // 50) * 50
    path.write_text("# a comment\ncore/plan 1 core/plan.py\ncore/align 99999 core/align.py\n")

    size.lower_ceilings(path)

    assert path.read_text() == f"# a comment\ncore/plan 1 core/plan.py\ncore/align {align} core/align.py\n"

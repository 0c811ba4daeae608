"""The report's page in a browser: accessible, in any scheme and width, offline."""

import json
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from packplan.app.plan import __main__ as plan
from tests.stored import LENGTHS, store_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

BROWSER = ROOT / ".browser"

TEXT, GRAPHICS = 4.5, 3.0
"""Contrasts that WCAG 2.2 asks for (1.4.3, 1.4.11)."""


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    """What a browser finds on a page with warnings, in every view."""
    if not shutil.which("node") or not (BROWSER / "node_modules" / "@sparticuz").is_dir():
        pytest.skip("no headless Chromium: .ci/browser installs one, with node and npm")
    folder = tmp_path_factory.mktemp("page")
    training = {"packing_min_fill_ratio": 1.0, "effective_batch_size": 6}
    path = store_run(folder, eval_lengths=LENGTHS[:9], training=training)
    assert 0 == plan.main(["report", str(path), "-o", str(folder / "plan.html")])
    command = ["node", str(ROOT / "tests" / "browser" / "look.mjs"), str(BROWSER), str(folder / "plan.html")]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert 0 == run.returncode, run.stderr
    return json.loads(run.stdout)


def luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`, as WCAG defines it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_the_page_is_for_everyone(views):
    """Four views, each without a violation or a sideways scroll, with readable text."""
    assert [("light", 1300), ("light", 390), ("dark", 1300), ("dark", 390)] == [
        (v["scheme"], v["width"]) for v in views
    ]
    for view in views:
        assert [] == view["violations"]
        assert view["num_passes"] > 20
        assert view["scroll_width"] <= view["width"]
        assert view["smallest_text"] > 8
        assert view["toggled"], "a table does not open by keyboard"
        assert [True] == [request.startswith("file:") for request in view["requests"]]
        assert len(set(view["identifiers"])) == len(view["identifiers"])
        levels = view["headings"]
        assert 1 == levels[0]
        assert all(deeper <= level + 1 for level, deeper in pairwise(levels))
    backgrounds = {view["scheme"]: view["background"] for view in views}
    assert {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"} == backgrounds


def test_colours_have_contrast(views):
    """Text and plots, against what lies behind them."""
    for view in views:
        colours = view["colours"]
        for name in ("ink", "soft", "link"):
            assert contrast(colours[name], colours["page"]) >= TEXT, (view["scheme"], name)
        assert contrast(colours["warn-ink"], colours["warn"]) >= TEXT
        for name in ("first", "second", "third"):
            assert contrast(colours[name], colours["page"]) >= GRAPHICS, (view["scheme"], name)

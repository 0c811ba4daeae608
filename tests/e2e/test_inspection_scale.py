"""
Looking at a million samples takes seconds: CPU seconds of whole processes, which other load leaves
alone.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packplan.app.bench.__main__ import main
from packplan.app.bench.distributions import DISTRIBUTIONS
from packplan.app.bench.inspection import store
from packplan.app.plan import __main__ as plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def started_cpu_seconds(*arguments: object) -> float:
    """Return the CPU time that a command takes, its start included."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    subprocess.run(
        [sys.executable, "-m", "packplan.app.plan", *map(str, arguments)], check=True, capture_output=True, cwd=ROOT
    )
    return spent() - before


def cpu_seconds(*arguments: object) -> float:
    """Return the CPU time that a command takes in this process."""
    before = time.process_time()
    assert 0 == plan.main([*map(str, arguments)])
    return time.process_time() - before


def test_a_million_samples_are_looked_at_in_seconds(tmp_path):
    """Show in 2 with its start, two combinations in 3, a page in 9 and under 3 MB."""
    distribution = DISTRIBUTIONS["vlm-16384"]
    path, _ = store(tmp_path, distribution.lengths(1_000_000, seed=0), packing_length=distribution.capacity)

    assert started_cpu_seconds("show", path, "--json") < 2
    assert cpu_seconds("whatif", path, "--max-length", "3000", "--world-size", "4,8") < 3
    assert cpu_seconds("report", path, "-o", tmp_path / "plan.html") < 9
    assert (tmp_path / "plan.html").stat().st_size < 3_000_000


def test_the_benchmark_measures_every_command(capsys):
    """With what each took, and what it gave."""
    assert 0 == main(["inspect", "--samples", "3000", "--distributions", "chat-8192", "--repeat", "1", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]

    assert ["show", "whatif, 12 combinations", "diff", "report"] == [row["command"] for row in rows]
    assert all(row["seconds"] > 0 and row["num_bytes"] > 100 for row in rows)

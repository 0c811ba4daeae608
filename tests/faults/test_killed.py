"""
Runs killed at any line: what is stored is never torn, little is measured again, and the end is the
same bytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.seeded]

SEED = os.environ.get("EXPLORE_SEED", "0")
"""Other moments to be killed at; `make explore` sets it."""


@pytest.mark.parametrize("start", ["nothing", "another plan", "bad records"])
def test_a_run_killed_at_any_line_ends_as_one_that_was_not(start, tmp_path):
    """
    Killed once and, going on, killed again: rows are a prefix, at most one flush is measured again,
    bytes are equal.
    """
    command = [sys.executable, "-m", "tests.faults.killed", start, SEED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])

    assert 0 == done.returncode, done.stderr

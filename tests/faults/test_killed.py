"""Runs killed at any line: nothing torn, little measured again, the same end."""

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
    """Killed twice: rows are a prefix, one flush is measured again, bytes are equal."""
    command = [sys.executable, "-m", "tests.faults.killed", start, SEED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])

    assert 0 == done.returncode, done.stderr

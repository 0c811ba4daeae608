"""
Runs killed at any line: nothing torn, little measured again, the same end. `main` measures and
plans in a small process, which forks fast.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import pytest

from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.core.samples.tables import column
from tests.faults.runs import FLUSH_EVERY, POLICY, FileSource, Forked, artefacts_of, at_each_line, execute, write_data
from tests.processes import DEADLINE_S, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.seeded]

SEED = os.environ.get("EXPLORE_SEED", "0")
"""Other moments to be killed at; `make explore` sets it."""

RUNS = 16

LENGTHS = [random.Random(5).randint(1, 95) for _ in range(40)]  # noqa: S311  # lengths of a test

BAD = (11, 30)
"""Records that are bad at the start `bad records`, and fixed when it goes on."""

OTHER = attrs.evolve(POLICY, packing_length=70)


def run_and_kill(data: Path, folder: Path, line: int) -> bool:
    """Kill a run before this line, and check what it left; return whether it was killed."""

    def run(process: Forked) -> None:
        source = FileSource(data, before_each=lambda index: setattr(process.counter, "value", index))
        at_each_line(lambda executed: os.kill(os.getpid(), signal.SIGKILL) if executed == line else None)
        execute(source, folder)

    process = Forked(run)
    status = process.wait()
    assert status in {0, -signal.SIGKILL}, status
    source, store = FileSource(data), DiskLengthStore(folder)
    bad = [one.index for one in store.bad_records()]
    stored = store.read(source.fingerprint(), len(source), partial(source.data_digest, without=bad))
    assert [0 if index in bad else LENGTHS[index] for index in range(len(stored.table))] == stored.table[:, 0].tolist()
    assert bad == np.flatnonzero(column(stored.table, "bad")).tolist()
    assert len(stored.table) == len(stored.media) + len(bad)
    if stored.repeatability is None:
        assert process.counter.value - len(stored.table) <= FLUSH_EVERY
    return status != 0


def main(start: str, seed: int, folder: Path) -> None:
    """Kill runs from nothing, from another plan, and after fixes, at drawn moments."""
    os.fsync = lambda _: None  # the pages of a killed process are not lost
    data, before = write_data(folder / "data.jsonl", LENGTHS), folder / "before"
    execute(FileSource(data), folder / "whole")
    whole = artefacts_of(folder / "whole")
    before.mkdir()
    if start == "another plan":
        execute(FileSource(data), before, policy=OTHER)
    if start == "bad records":
        broken = [-1 if index in BAD else length for index, length in enumerate(LENGTHS)]
        execute(FileSource(write_data(folder / "broken.jsonl", broken)), before)
    shutil.copytree(before, folder / "counted")

    def count(process: Forked) -> None:
        at_each_line(lambda executed: setattr(process.counter, "value", executed))
        execute(FileSource(data), folder / "counted")

    counted = Forked(count)
    assert 0 == counted.wait()
    num_lines = counted.counter.value
    killed, rng = 0, random.Random(seed)  # noqa: S311  # moments of a test
    for number in range(RUNS):
        run = folder / str(number)
        shutil.copytree(before, run)
        # The first moments are spread evenly over the whole run.
        for line in (int((number + rng.random()) * num_lines / RUNS) + 1, rng.randint(1, num_lines)):
            killed += run_and_kill(data, run, line)
        # Whoever goes back to the other plan must not find a mixture of both.
        execute(FileSource(data), run, policy=OTHER)
        execute(FileSource(data), run)
        assert whole == artefacts_of(run), f"run {number}"
    # A run that goes on has fewer lines to be killed at than the first one, so some are over
    # before.
    assert killed >= RUNS, killed


@pytest.mark.parametrize("start", ["nothing", "another plan", "bad records"])
def test_a_run_killed_at_any_line_ends_as_one_that_was_not(start, tmp_path):
    """Killed twice: rows are a prefix, one flush is measured again, bytes are equal."""
    command = [sys.executable, "-m", "tests.faults.test_killed", start, SEED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=DEADLINE_S)

    assert 0 == done.returncode, done.stderr


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

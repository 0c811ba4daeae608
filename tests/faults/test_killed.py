"""
Runs killed at any line: what is stored is never torn, little is measured again, and the end is the
same bytes.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import attrs
import pytest

from adapters.stores.lengths import DiskLengthStore
from tests.faults.runs import FLUSH_EVERY, POLICY, FileSource, Forked, artefacts_of, at_each_line, execute, write_data

pytestmark = [pytest.mark.slow, pytest.mark.seeded]

RUNS = 24

SEED = int(os.environ.get("EXPLORE_SEED", "0"))
"""Other moments to be killed at; `make explore` sets it."""

LENGTHS = [random.Random(5).randint(1, 95) for _ in range(40)]  # noqa: S311  # lengths of a test


OTHER = attrs.evolve(POLICY, packing_length=70)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.jsonl", LENGTHS)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> dict[str, bytes]:
    """What a run leaves that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    execute(FileSource(data), folder)
    return artefacts_of(folder)


@pytest.fixture(scope="module", params=["nothing", "another plan"])
def start(request, data, tmp_path_factory):
    """
    Return a function that prepares a folder, and the number of lines that a run there executes.
    """
    before = tmp_path_factory.mktemp("before")
    if request.param == "another plan":
        execute(FileSource(data), before, policy=OTHER)

    def prepare(folder: Path) -> None:
        shutil.copytree(before, folder)

    def run(process: Forked) -> None:
        source = FileSource(data)
        at_each_line(lambda executed: setattr(process, "counter", executed))
        execute(source, counted)

    counted = tmp_path_factory.mktemp("counted") / "run"
    prepare(counted)
    process = Forked(run)
    assert 0 == process.wait()
    return prepare, process.counter


def test_a_run_killed_at_any_line_ends_as_one_that_was_not(data, whole, start, tmp_path):
    """
    Killed once and, going on, killed again: rows are a prefix, at most one flush is measured again,
    bytes are equal.
    """
    killed, (prepare, num_lines) = 0, start
    rng = random.Random(SEED)  # noqa: S311  # moments of a test
    for number in range(RUNS):
        folder = tmp_path / str(number)
        prepare(folder)
        # The first moments are spread evenly over the whole run.
        for line in (int((number + rng.random()) * num_lines / RUNS) + 1, rng.randint(1, num_lines)):

            def run(process: Forked, line: int = line, folder: Path = folder) -> None:
                source = FileSource(data, before_each=lambda index: setattr(process, "counter", index))
                os.fsync = lambda _: None  # the pages of a killed process are not lost
                at_each_line(lambda executed: os.kill(os.getpid(), signal.SIGKILL) if executed == line else None)
                execute(source, folder)

            process = Forked(run)
            status = process.wait()
            assert status in {0, -signal.SIGKILL}
            killed += status != 0
            source = FileSource(data)
            stored = DiskLengthStore(folder).read(source.fingerprint(), len(source), source.data_digest)
            assert LENGTHS[: len(stored.table)] == stored.table[:, 0].tolist()
            assert len(stored.table) == len(stored.images)
            if stored.probe is None:
                assert process.counter - len(stored.table) <= FLUSH_EVERY

        # Whoever goes back to the other plan must not find a mixture of both.
        execute(source, folder, policy=OTHER)
        execute(source, folder)
        assert whole == artefacts_of(folder), f"run {number}"
    # A run that goes on has fewer lines to be killed at than the first one, so some are over
    # before.
    assert killed >= RUNS

"""Full disks, read-only folders, two jobs on one folder, changed files: no wrong plan."""

import os
import resource
import tempfile
import time
from pathlib import Path

import pytest

from packplan.app.planning.audit import REPEATED_SAMPLES
from packplan.core.errors import OutputError
from tests.faults.runs import FileSource, Forked, artefacts_of, execute, write_data

pytestmark = pytest.mark.slow

LENGTHS = [60, 20, 50, 30, 40, 40, 80, 7] * 5


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch):
    """Pages of a killed process are not lost, and no test here takes the power away."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def data(tmp_path) -> Path:
    return write_data(tmp_path / "data.jsonl", LENGTHS)


@pytest.fixture
def whole(data, tmp_path) -> dict[str, bytes]:
    """Artefacts of an undisturbed run."""
    execute(FileSource(data), tmp_path / "whole")
    return artefacts_of(tmp_path / "whole")


def test_a_disk_that_is_full_is_named_and_the_next_run_goes_on(data, whole, tmp_path):
    """Nothing torn stays, and the end is the same bytes."""
    limits = [0, 1, 100, 139, 140, 141, 300, 700, 790, 1000, 1279]

    def run(_: Forked) -> None:
        for limit in limits:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            with pytest.raises(OutputError, match="File too large"):
                execute(FileSource(data), tmp_path / f"run{limit}")

    assert 0 == Forked(run).wait()
    for limit in limits:
        folder = tmp_path / f"run{limit}"
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        execute(FileSource(data), folder)
        assert whole == artefacts_of(folder), limit


@pytest.mark.parametrize("warm", [False, True])
def test_a_folder_that_may_not_be_written_is_named(warm):
    """By a user without rights there, with lengths stored or not."""

    def run(_: Forked) -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        with pytest.raises(OutputError, match="cannot be written: Permission denied"):
            execute(FileSource(data), folder)

    # Each start of pytest closes the folders of all its runs to other users.
    with tempfile.TemporaryDirectory() as of_all:
        Path(of_all).chmod(0o755)
        data, folder = write_data(Path(of_all, "data.jsonl"), LENGTHS), Path(of_all, "run")
        folder.mkdir()
        if warm:
            execute(FileSource(data), folder)
        for path in (folder, *folder.iterdir()):
            path.chmod(0o555 if path.is_dir() else 0o444)
        assert 0 == Forked(run).wait()


@pytest.mark.parametrize("is_killed", [False, True])
def test_of_two_jobs_one_measures_and_the_other_waits_and_reads_or_takes_over(data, whole, tmp_path, is_killed):
    """It says for whom, for its time; what is killed holds no lock, and its rest is swept away."""
    folder, go = tmp_path / "run", os.pipe()

    def hold(process: Forked) -> None:
        def pause(index: int) -> None:
            if index == 20 and not process.counter.value:
                process.counter.value = 1
                os.read(go[0], 1)

        execute(FileSource(data, before_each=pause), folder)

    holder, source, heard = Forked(hold), FileSource(data), []
    while not holder.counter.value:
        time.sleep(0.01)
    with pytest.raises(OutputError, match=rf"process {holder.pid} on .* has waited for \d+ s") as raised:
        execute(FileSource(data), folder, timeout_s=0.2)
    assert "locked" == raised.value.kind
    if is_killed:
        holder.kill()
        (folder / ".lengths.json.left.tmp").write_text("{")

    execute(source, folder, report=lambda words: heard.append(words) or os.write(go[1], b"."))

    assert whole == artefacts_of(folder)
    if not is_killed:
        assert 0 == holder.wait()
        assert heard[0].startswith(f"waiting for process {holder.pid} on ")
        assert REPEATED_SAMPLES == len(source.measured), "what is compared, and no more"

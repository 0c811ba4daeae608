"""
The code of docs/use-it-in/ runs as it stands there, by the page's own commands.

A command's `path/to/…` is replaced by a tiny model and its data. Nothing else is set.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import packplan as pp
from tests.processes import ROOT, descendants, end, is_whole

pytestmark = pytest.mark.slow

PAGES = ROOT / "docs" / "use-it-in"

HOSTS = Path(os.environ["HOST_PYTHON"]).parent if "HOST_PYTHON" in os.environ else None

hosted = pytest.mark.skipif(HOSTS is None, reason="needs the environment of `make test-hosts`")

DEADLINE_S = 300

TRAINED = re.compile(r"rank (\d+) step (\d+) pack (\d+)")

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def blocks(page: str, language: str) -> list[str]:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """Return the commands of a page that run its files."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if not line.startswith("pip ")]


class Reader:
    """Somebody who copies a page's files into a folder and types its commands."""

    def __init__(self, page: str, folder: Path, given: dict[str, Path], python: Path) -> None:
        self.folder, self._given, self._python = folder, given, python
        self.commands = commands(page)
        for block in blocks(page, "python"):
            name = re.match(r"# (\w+\.py)\n", block)
            assert name, f"a block of {page}.md does not say which file it is"
            for text, path in given.items():
                block = block.replace(f'"{text}"', repr(str(path)))  # noqa: PLW2901
            (folder / name.group(1)).write_text(block)

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        """Type a command; what it prints goes to `printed.txt`."""
        named = [str(self._given.get(word, word)) for word in words]
        with (self.folder / "printed.txt").open("a") as printed:
            return subprocess.Popen(
                [self._python / named[0], *named[1:]], cwd=self.folder, stdout=printed, stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip

    def run(self, words: list[str]) -> str:
        """Type a command, wait for its end, and return what it printed."""
        before = len(self.printed())
        process = self.start(words)
        try:
            assert 0 == process.wait(DEADLINE_S), self.printed()[-3000:]
        finally:
            self.kill(process)
        return self.printed()[before:]

    def run_until(self, words: list[str], there: str | Callable[[], bool]) -> str:
        """Type a command, kill it once it printed or did something, and return what it printed."""
        process = self.start(words)
        try:
            self.wait_until(process, there if callable(there) else lambda: there in self.printed())
        finally:
            self.kill(process)
        return self.printed()

    def wait_until(self, process: subprocess.Popen[str], holds: Callable[[], bool]) -> None:
        """Wait for something that a running command does."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert process.poll() is None, self.printed()[-3000:]
            assert time.monotonic() < deadline, self.printed()[-3000:]
            time.sleep(0.05)

    def kill(self, process: subprocess.Popen[str]) -> None:
        """Kill a process and all that it started."""
        started = descendants(process.pid)
        process.kill()
        end(started)
        process.wait()

    def printed(self) -> str:
        path = self.folder / "printed.txt"
        return COLOURS.sub("", path.read_text(errors="replace")) if path.exists() else ""


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """A folder with a tiny model and tokenized rows."""
    folder = tmp_path_factory.mktemp("made")
    python = HOSTS / "python" if HOSTS else sys.executable
    subprocess.run([python, "-m", "tests.hosts.made", str(folder)], check=True, cwd=ROOT, capture_output=True)
    return folder


@pytest.fixture
def reader(made, tmp_path):
    given = {"path/to/model": made / "model", "path/to/rows": made / "rows"}
    return lambda page: Reader(page, tmp_path, given, HOSTS or Path(sys.executable).parent)


def plan_of(made: Path) -> pp.Plan:
    import pyarrow as pa

    (path,) = (made / "rows").glob("data-*.arrow")  # beside what trainers cache
    with pa.memory_map(str(path)) as source:
        ids = pa.ipc.open_stream(source).read_all()["input_ids"]
    return pp.plan([len(row) for row in ids.to_pylist()], 256)


def trained_packs(printed: str) -> Counter[tuple[int, int, int]]:
    """Return how often each rank printed each step and pack."""
    return Counter(tuple(map(int, found)) for found in TRAINED.findall(printed))


def planned_packs(schedule: pp.EpochSchedule, *, start: int = 0) -> Counter[tuple[int, int, int]]:
    """Return the steps and packs of all ranks behind step *start*."""
    return Counter(
        (rank, step.number, pack)
        for rank in range(schedule.world_size)
        for step in schedule.steps(rank=rank)
        if step.number > start
        for (pack,) in step.batches
    )


@hosted
@pytest.mark.parametrize("page", ["transformers", "trl"])
def test_the_trainers_of_two_pages_go_on_after_a_kill(page, reader, made):
    """On two ranks, from the newest checkpoint to the last of the steps that the page prints."""
    at = reader(page)
    if page == "transformers":
        at.run_until(at.commands[0], partial(is_whole, at.folder / "out" / "checkpoint-3" / "trainer_state.json"))
    printed = at.run(at.commands[page == "transformers"])

    total = int(re.search(r"(\d+) steps", printed).group(1))
    assert plan_of(made).schedule(world_size=2, packs_per_step=4, epochs=2).total_steps == total
    state = json.loads((at.folder / "out" / f"checkpoint-{total}" / "trainer_state.json").read_text())
    assert list(range(1, total + 1)) == [entry["step"] for entry in state["log_history"] if "loss" in entry]


@hosted
def test_the_page_of_proofs_proves(reader):
    """A model by its name, a trainer's own batch and step, on ranks too, and the page's tests."""
    at = reader("prove")
    probed, alone, together, tested = (at.run(command) for command in at.commands)

    assert re.search(r"^auto +yes +0 ", probed, re.MULTILINE)
    assert re.search(r"Differences\(logits=[\d.e-]+, losses=", alone)
    assert 1 == len(re.findall(r"StepLoss\(loss=[\d.]+, due=", alone))
    assert 2 == len(re.findall(r"StepLoss\(loss=[\d.]+, due=", together))
    assert re.search(r"2 passed, 1 skipped|3 passed", tested)


@hosted
def test_the_loop_goes_on_with_fewer_ranks(reader, made):
    """Of the epoch in which it was killed, each pack is trained that was not before."""
    import attrs

    at = reader("torch")
    first = at.run_until(at.commands[0], "rank 0 step 3 ")
    rest = trained_packs(at.run(at.commands[1]))

    plan = plan_of(made)
    whole = plan.schedule(world_size=2, packs_per_step=4, epochs=2)
    start = min(step for _, step, _ in rest) - 1
    resumed = attrs.evolve(plan.schedule(packs_per_step=4, epochs=2), start=whole.at(start))
    assert planned_packs(resumed) == rest
    assert trained_packs(first) <= planned_packs(whole)


@hosted
def test_lightning_goes_on_in_the_middle_of_an_epoch(reader, made):
    """With the batch behind the checkpoint's last one."""
    at = reader("lightning")
    first = trained_packs(at.run_until(at.commands[0], "rank 0 step 5 "))
    rest = trained_packs(at.run(at.commands[1]))

    schedule = plan_of(made).schedule(packs_per_step=2, epochs=2)
    planned = planned_packs(schedule)
    start = min(step for _, step, _ in rest) - 1
    # The process may save once more before it is killed.
    assert start in range(3, schedule.total_steps, 3), "a checkpoint of every third step"
    assert start % schedule.steps_per_epoch, "in the middle of an epoch"
    assert first <= planned
    assert {key: times for key, times in planned.items() if key[1] > start} == rest


@hosted
def test_ray_starts_lost_workers_again_where_they_were(reader, made):
    """From the checkpoint of the last step that all workers reported."""
    at = reader("ray-train")
    process = at.start(at.commands[0])
    log = at.folder / "rank0.txt"
    try:
        at.wait_until(process, lambda: log.exists() and "rank 0 step 2 " in log.read_text())
        (worker, *_) = [one for one in descendants(process.pid) if "RayTrainWorker" in " ".join(one.cmdline())]
        worker.kill()
        assert 0 == process.wait(DEADLINE_S), at.printed()[-3000:]
    finally:
        at.kill(process)

    trained = trained_packs("".join(path.read_text() for path in at.folder.glob("rank*.txt")))
    planned = planned_packs(plan_of(made).schedule(world_size=2, packs_per_step=4))
    again = {step for (_, step, _), times in trained.items() if times > 1}
    assert set(planned) == set(trained)
    assert len(again) <= 2, "the steps behind the last checkpoint"


@hosted
def test_grain_reads_on(reader, made):
    """Both reads together are what a rank trains."""
    at = reader("grain")
    read = [at.run(command) for command in at.commands]

    packs = [int(pack) for printed in read for pack in re.findall(r"pack (\d+) of \d+ tokens", printed)]
    schedule = plan_of(made).schedule(world_size=2, packs_per_step=4, epochs=2)
    assert 5 == len(re.findall("pack", read[0]))
    assert [pack for step in schedule.steps(rank=0) for (pack,) in step.batches] == packs


@pytest.mark.skipif(HOSTS is not None, reason="the demo, which makes the processor, needs ms-swift")
def test_the_trainer_of_transformers_sees_images(demo, tmp_path):
    """By the page's second file, with the processor of a tiny model."""
    (picture, *_) = sorted((demo / "data").rglob("*.png")) or sorted((demo / "data").rglob("*.jpg"))
    text = "<|vision_start|><|image_pad|><|vision_end|>" + "a red dot " * 3
    records = tmp_path / "records.jsonl"
    records.write_text(
        "".join(json.dumps({"text": text + "and blue " * n, "image": str(picture)}) + "\n" for n in range(6))
    )
    given = {"path/to/vision-model": demo / "models" / "qwen2_5_vl", "path/to/records.jsonl": records}
    at = Reader("transformers", tmp_path, given, Path(sys.executable).parent)

    printed = at.run(at.commands[2])

    assert re.search(r"'loss': '?\d", printed), printed

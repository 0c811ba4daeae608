"""Reader of docs/use-it-in/, who copies a page's files and types its commands."""

import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import packplan as pp
from tests.processes import ROOT, descendants, end

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


def call(name: str, folder: str, *given: str) -> Any:
    """Call a function, named as `module:function`, in a folder."""
    module, _, function = name.partition(":")
    sys.path.insert(0, str(ROOT))
    os.chdir(folder)
    if "swift" in sys.modules:  # which the server of tests has imported: every trainer gets its callbacks
        from transformers import trainer, trainer_callback

        trainer.DEFAULT_CALLBACKS = [trainer_callback.DefaultFlowCallback]
        trainer.DEFAULT_PROGRESS_CALLBACK = trainer_callback.ProgressCallback
        trainer.PrinterCallback = trainer_callback.PrinterCallback
    return getattr(importlib.import_module(module), function)(*given)


def run_script(*words: str) -> None:
    """Run a script as its command does."""
    sys.argv = list(words)
    runpy.run_path(words[0], run_name="__main__")


class Reader:
    """Somebody who copies a page's files into a folder and types its commands."""

    def __init__(self, page: str, folder: Path, given: dict[str, Path], python: Path) -> None:
        self.folder, self._given, self._python = folder, given, python
        self.commands = commands(page)
        linked = re.findall(r"\(\.\./examples/(\w+\.py)\)", (PAGES / f"{page}.md").read_text(encoding="utf-8"))
        files = {name: (ROOT / "docs" / "examples" / name).read_text(encoding="utf-8") for name in linked}
        files |= {block.split()[1]: block for block in blocks(page, "python")}
        for name, text in files.items():
            for word, path in given.items():
                text = text.replace(f'"{word}"', repr(str(path)))  # noqa: PLW2901
            (folder / name).write_text(text)

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        """Type a command; what it prints goes to `printed.txt`."""
        named = self.named(words)
        with (self.folder / "printed.txt").open("a") as printed:
            return subprocess.Popen(
                [self._python / named[0], *named[1:]], cwd=self.folder, stdout=printed, stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip

    def named(self, words: list[str]) -> list[str]:
        """Return the words of a command with the reader's own paths."""
        return [str(self._given.get(word, word)) for word in words]

    def run(self, words: list[str], until: Callable[[], bool] | None = None) -> str:
        """Type a command, wait for its end or kill it once something holds; return its output."""
        before, process = len(self.printed()), self.start(words)
        try:
            if until is None:
                assert 0 == process.wait(DEADLINE_S), self.printed()[-3000:]
            else:
                self.wait_until(process, until)
        finally:
            self.kill(process)
        return self.printed()[before:]

    def run_until(self, words: list[str], printed: str) -> str:
        """Type a command, kill it once it printed something, and return what it printed."""
        return self.run(words, lambda: printed in self.printed())

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

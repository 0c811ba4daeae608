"""Reader of docs/use-it-in/, who copies a page's files and types its commands."""

import contextlib
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import packplan as pp
from tests.processes import ROOT, Server, Started, descendants, end, wait_for

PAGES = ROOT / "docs" / "use-it-in"

HOSTED = "HOST_PYTHON" in os.environ

hosted = pytest.mark.skipif(not HOSTED, reason="needs the environment of `make test-hosts`")

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def own_callbacks() -> Any:
    """Give trainers transformers' callbacks: ms-swift, once imported, gives all its own."""
    from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback, ProgressCallback

    kinds = {"DEFAULT_PROGRESS_CALLBACK": ProgressCallback, "PrinterCallback": PrinterCallback}
    return mock.patch.multiple("transformers.trainer", DEFAULT_CALLBACKS=[DefaultFlowCallback], **kinds)


def call(function: Callable[..., object], folder: str, *given: object) -> None:
    """Call a function in a folder; it may return False where it fails."""
    os.chdir(folder)
    with own_callbacks():
        assert function(*given) is not False


def type_command(folder: str, name: str, *words: str) -> None:
    """
    Do what a command does, in this process.

    Ranks of `torchrun` are forked, with its variables (`faults/test_parents.py`), instead of
    importing for 5 s each; those of `train.py` are its own.
    """
    os.chdir(folder)
    sys.path.insert(0, folder)
    if name == "torchrun" and "train.py" not in words:
        from tests.hosts.law import fork_ranks  # it imports this module

        first = next(place for place, word in enumerate(words) if word.endswith(".py"))
        sys.exit(not fork_ranks(int(words[first - 1]), run_file, *words[first:]))
    if name != "python":
        words = (str(Path(sys.executable).with_name(name)), *words)
    if name in {"torchrun", "swift"}:
        os.execv(words[0], words)  # noqa: S606  # the pages' own commands
    run_file(0, *words)


def run_file(_: int, *words: str) -> None:
    """Run a file of a page with its arguments, on any rank."""
    sys.argv = [*words]
    with own_callbacks():
        runpy.run_path(words[0], run_name="__main__")


class Reader:
    """Somebody who copies a page's files into a folder and types its commands."""

    def __init__(self, server: Server, page: str, folder: Path, given: Mapping[str, Path]) -> None:
        self._server, self.folder = server, folder
        text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
        blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
        lines = [line for language, block in blocks if language == "bash" for line in block.splitlines()]
        typed = [shlex.split(line, comments=True) for line in lines if not line.startswith("pip ")]
        self.commands = [[str(given.get(word, word)) for word in words] for words in typed]
        """Commands that run the files, with the reader's own paths."""
        linked = re.findall(r"\(\.\./examples/(\w+\.py)\)", text)
        files = {name: (ROOT / "docs" / "examples" / name).read_text(encoding="utf-8") for name in linked}
        files |= {block.split()[1]: block for language, block in blocks if language == "python"}
        for name, code in files.items():
            for word, path in given.items():
                code = code.replace(f'"{word}"', repr(str(path)))  # noqa: PLW2901
            (folder / name).write_text(code)

    @contextlib.contextmanager
    def typing(self, words: list[str]) -> Iterator[Started]:
        """Type a command with its variables; kill it at the end, with all that it started."""
        number = next(number for number, word in enumerate(words) if "=" not in word)
        env = dict(word.split("=", 1) for word in words[:number])
        printed, command = self.folder / "printed.txt", words[number:]
        started = self._server.start(type_command, str(self.folder), *command, log=printed, env=env)
        try:
            yield started
        finally:
            left = descendants(started.pid)
            started.process.kill()
            end(left)
            started.process.join()

    def run(self, words: list[str], until: Callable[[], bool] | None = None) -> str:
        """Type a command, wait for its end or kill it once something holds; return its output."""
        before = len(self.printed)
        with self.typing(words) as started:
            process = started.process
            wait_for(lambda: process.exitcode is not None or (until is not None and until()), f"{words} goes on")
            assert process.exitcode == (0 if until is None else None), self.printed[-3000:]
        return self.printed[before:]

    def run_until(self, words: list[str], text: str) -> str:
        """Type a command, kill it once it printed a text, and return what it printed."""
        return self.run(words, lambda: text in self.printed)

    @property
    def printed(self) -> str:
        """Text that the commands have printed."""
        path = self.folder / "printed.txt"
        return COLOURS.sub("", path.read_text(errors="replace")) if path.exists() else ""


def plan_of(made: Path) -> pp.Plan:
    """Return the plan of the made rows."""
    import pyarrow as pa

    (path,) = (made / "rows").glob("data-*.arrow")  # beside what trainers cache
    with pa.memory_map(str(path)) as source:
        ids = pa.ipc.open_stream(source).read_all()["input_ids"]
    return pp.plan([len(row) for row in ids.to_pylist()], 256)

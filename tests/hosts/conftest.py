"""Fixtures of the pages that people read, and of trainers in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.pages import HOSTED, Reader, call, own_callbacks
from tests.processes import ROOT, finished

if HOSTED:

    @pytest.fixture(scope="session")
    def apart():
        """Return a function that calls another one, by its name, in a process and a folder."""

        def run(name: str, *given: object, folder: Path) -> None:
            code = f"from tests.hosts.pages import call; call{(name, str(folder), *map(str, given))}"
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=900)

        return run

else:

    @pytest.fixture(scope="session")
    def apart(server):
        """Return the same of a process with the stack imported, which returns what is printed."""

        def run(name: str, *given: object, folder: Path) -> str:
            started = server.start(call, name, str(folder), *map(str, given), log=folder / "printed.txt")
            assert [0] == finished([started])
            return started.said

        return run


@pytest.fixture(autouse=True)
def _own_callbacks():
    with own_callbacks():
        yield


@pytest.fixture(scope="session")
def made(apart, tmp_path_factory) -> Path:
    """A folder with a tiny model and tokenized rows."""
    folder = tmp_path_factory.mktemp("made")
    apart("tests.hosts.law:make", folder, folder=folder)
    return folder


@pytest.fixture
def reader(made, tmp_path):
    given = {"path/to/model": made / "model", "path/to/rows": made / "rows"}
    return lambda page: Reader(page, tmp_path, given)

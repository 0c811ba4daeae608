"""Fixtures of the pages that people read, and of trainers in processes of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.pages import HOSTS, Reader, call
from tests.processes import ROOT, finished

Apart = Callable[..., str]
"""Calls a function by its name, with texts, in a folder; returns what it printed."""

if HOSTS is None:

    @pytest.fixture(scope="session")
    def apart(server) -> Apart:
        """Return what calls a function in another process, which has imported what that needs."""

        def run(name: str, *given: object, folder: Path) -> str:
            started = server.start(call, name, str(folder), *map(str, given), log=folder / "printed.txt")
            assert [0] == finished([started])
            return started.said

        return run

else:

    @pytest.fixture(scope="session")
    def apart() -> Apart:
        """Return what calls a function in another process of the hosts' environment."""

        def run(name: str, *given: object, folder: Path) -> str:
            code = "import sys; from tests.hosts.pages import call; sys.exit(call(*sys.argv[1:]))"
            words = [os.environ["HOST_PYTHON"], "-c", code, name, folder, *map(str, given)]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=900)
            assert not done.returncode, done.stderr[-3000:]
            return done.stdout

        return run


@pytest.fixture(scope="session")
def made(apart, tmp_path_factory) -> Path:
    """A folder with a tiny model and tokenized rows."""
    folder = tmp_path_factory.mktemp("made")
    apart("tests.hosts.law:make", folder, folder=folder)
    return folder


@pytest.fixture
def reader(made, tmp_path):
    given = {"path/to/model": made / "model", "path/to/rows": made / "rows"}
    return lambda page: Reader(page, tmp_path, given, HOSTS or Path(sys.executable).parent)

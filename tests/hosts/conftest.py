"""Fixtures of the pages that people read."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.pages import HOSTS, Reader
from tests.processes import ROOT


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

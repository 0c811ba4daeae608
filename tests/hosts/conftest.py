"""Fixtures of the pages that people read, and of trainers in processes of their own."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.hosts import law
from tests.hosts.pages import HOSTED, Reader, call, own_callbacks
from tests.processes import finished

if HOSTED:  # for the server of processes, which is forked from this one
    for name in ("lightning", "ray.train.torch", "torch.distributed.run", "trl.trainer.dpo_trainer"):
        import_module(name)


@pytest.fixture(scope="session")
def apart(server):
    """Return a function that calls another one in a process and a folder."""

    def run(function: Callable[..., object], *given: object, folder: Path) -> None:
        assert [0] == finished([server.start(call, function, str(folder), *given, log=folder / "printed.txt")])

    return run


@pytest.fixture(autouse=True)
def _own_callbacks():
    with own_callbacks():
        yield


@pytest.fixture(scope="session")
def made(apart, tmp_path_factory) -> Path:
    """A folder with a tiny model and tokenized rows."""
    folder = tmp_path_factory.mktemp("made")
    apart(law.make, str(folder), folder=folder)
    return folder


@pytest.fixture
def reader(server, made, tmp_path):
    given = {"path/to/model": made / "model", "path/to/rows": made / "rows"}
    return lambda page: Reader(server, page, tmp_path, given)

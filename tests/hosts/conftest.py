"""Fixtures of the pages that people read, and of trainers in processes of their own."""

from importlib import import_module
from pathlib import Path

import pytest

from tests.hosts.pages import HOSTED, Reader, call, own_callbacks
from tests.processes import finished

if HOSTED:  # for the server of processes, which is forked from this one
    for name in ("lightning", "ray.train.torch", "torch.distributed.run", "trl.trainer.dpo_trainer"):
        import_module(name)


@pytest.fixture(scope="session")
def apart(server):
    """Return a function that calls another one, by its name, in a process and a folder."""

    def run(name: str, *given: object, folder: Path) -> None:
        started = server.start(call, name, str(folder), *map(str, given), log=folder / "printed.txt")
        assert [0] == finished([started])

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
def reader(server, made, tmp_path):
    given = {"path/to/model": made / "model", "path/to/rows": made / "rows"}
    return lambda page: Reader(server, page, tmp_path, given)

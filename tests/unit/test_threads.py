"""Threads of a command wait asleep, and ranks share the cores, once torch is loaded."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packplan.app.cli import command

ROOT = Path(__file__).parents[2]

WAIT, THREADS = "OMP_WAIT_POLICY", "OMP_NUM_THREADS"


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Leave the environment as it was, whatever a command sets in it."""
    for name in (WAIT, THREADS, "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 1, None), (8, 2, "4"), (8, 3, "2"), (2, 4, "1")])
def test_ranks_times_threads_are_at_most_the_cores(monkeypatch, cores, ranks, threads):
    """And one rank takes what OpenMP gives."""
    monkeypatch.setattr(command, "_num_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    assert 0 == command.run_command(lambda: None, verbose=False)
    assert ("PASSIVE", threads) == (os.environ[WAIT], os.environ.get(THREADS))


def test_what_the_user_says_stays(monkeypatch):
    """The way of waiting, and the number of threads."""
    monkeypatch.setenv(WAIT, "ACTIVE")
    monkeypatch.setenv(THREADS, "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    assert 0 == command.run_command(lambda: None, verbose=False)
    assert ("ACTIVE", "7") == (os.environ[WAIT], os.environ[THREADS])


@pytest.mark.slow
def test_openmp_hears_of_it():
    """The OpenMP of torch reads the environment, and is loaded after it is set."""
    (torch,) = importlib.util.find_spec("torch").submodule_search_locations
    openmp = [*Path(torch).glob("lib/libgomp*"), *Path(torch).with_name("torch.libs").glob("libgomp*")]
    load = f"__import__('ctypes').CDLL({str(openmp[0])!r})" if openmp else "__import__('torch')"
    script = f"from packplan.app.cli.command import run_command; run_command(lambda: {load}, verbose=False)"
    run = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True,
        text=True, check=True, cwd=ROOT,
    )  # fmt: skip

    assert "OMP_WAIT_POLICY = 'PASSIVE'" in run.stderr
    assert "GOMP_SPINCOUNT = '0'" in run.stderr, "passive is also what it says of itself when nobody has said anything"

"""Threads of a command wait asleep, once torch is loaded."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from packplan.app.cli import command
from tests.processes import ROOT


@pytest.mark.parametrize(("said", "policy"), [("", "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_asleep_unless_the_user_says_otherwise(monkeypatch, said, policy):
    monkeypatch.setenv("OMP_WAIT_POLICY", said)
    if not said:
        monkeypatch.delenv("OMP_WAIT_POLICY")

    assert 0 == command.run_command(lambda: None, verbose=False)
    assert policy == os.environ["OMP_WAIT_POLICY"]


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

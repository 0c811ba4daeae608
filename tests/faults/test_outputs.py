"""A full or closed output, an impatient user: a line, a status, and no traceback."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.stored import store_run

pytestmark = pytest.mark.slow

FULL = Path("/dev/full")


def start(*words: str, env: dict[str, str] | None = None, **streams) -> subprocess.Popen:
    """Start a module in a fresh process."""
    return subprocess.Popen(
        [sys.executable, "-m", *words], cwd=ROOT, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "", **(env or {})},
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams),
    )  # fmt: skip


SHOW, HELP, RANK = ["packplan.app.plan", "show"], ["packplan.app", "--help"], ["packplan.app.sft", "--help"]


@pytest.mark.parametrize(
    ("words", "variables", "is_full"),
    [(SHOW, {}, True), (SHOW, {"PYTHONUNBUFFERED": "1"}, True), (RANK, {}, True), (SHOW, {}, False), (HELP, {}, False)],
)
def test_a_full_disk_behind_standard_output_is_named_and_a_reader_may_go(tmp_path, words, variables, is_full):
    """Tables and help, which argparse prints, whether Python keeps them or not."""
    config = [] if "--help" in words else [str(store_run(tmp_path, world_sizes=(1,)))]
    stdout = FULL.open("w") if is_full else subprocess.PIPE
    with start(*words, *config, stdout=stdout, env=variables) as process:
        (process.stdout or stdout).close()
        said = process.stderr.read()

    assert (2 if is_full else 1) == process.returncode
    # What is longer than Python's buffer fails while it is printed: a file might be meant too.
    reason = "No space left on device; free disk space, or write elsewhere\n"
    assert re.fullmatch(f"error: standard output (or a file )?cannot be written: {reason}" if is_full else "", said)


def test_an_error_that_nobody_reads_keeps_its_exit_status(tmp_path):
    """Standard error is a pipe whose reader is gone."""
    with start(*SHOW, str(tmp_path / "missing.yaml")) as process:
        process.stderr.close()
        process.stdout.read()

    assert 2 == process.returncode


INTERRUPT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""
"""Presses Ctrl-C when a module is about to be imported."""


@pytest.mark.parametrize(("words", "module"), [
    (["packplan", "sft"], "packplan.core.errors"), (["packplan.app.sft"], "packplan.app.cli.command"),
    (["packplan.app.check"], "torch"), (["packplan.app.plan", "verify"], "numpy"),
])  # fmt: skip
def test_ctrl_c_in_the_first_second_ends_with_a_line(tmp_path, words, module):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "INTERRUPT_AT": module}
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "data.jsonl").write_text("{}\n")
    run = store_run(tmp_path, world_sizes=(1,), model={"model": str(tmp_path)})
    # Tests that a shell runs in its background have Ctrl-C ignored, and so would what they start.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with start(*words, str(run), env=env, preexec_fn=heed) as process:
        said = process.stderr.read()

    # As a shell sees it, both are 130.
    assert process.returncode in {130, -signal.SIGINT}
    assert "interrupted" == said.partition(":")[0].strip()
    assert 1 == said.count("\n")

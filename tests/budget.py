"""
Runs pytest, and holds the processor time of the whole suite against what `tests/budget.txt` grants.

`python -m tests.budget [ARGUMENTS OF PYTEST]`. Counted is what pytest and all that it starts take,
orphans included. A slower or busier machine is granted more: a fixed piece of work, timed every
minute beside the tests, tells by how much. With `CI` set, more than 1.5 times the budget fails.
"""

import contextlib
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

TOLERATED = 1.5

EVERY_S = 60
"""From one timing of `work` to the next: 1 in 100 of the time of one core."""

YARDSTICK_S = 0.65
"""Processor seconds of `work` where the budget was recorded."""

_PR_SET_CHILD_SUBREAPER = 36

_FAREWELL_S = 30


def work(_: int) -> float:
    """Do a fixed piece of work, of arithmetic and memory; return its processor seconds."""
    start, table = time.process_time(), {}
    for number in range(1_900_000):
        table[number % 5003] = (number * 2_654_435_761) % 2**32
        if number % 3000 == 0:
            sorted(table.values())
    return time.process_time() - start


def orphans() -> list[str]:
    """Wait for processes that tests left behind; return the command lines of those that stay."""
    deadline = time.monotonic() + _FAREWELL_S
    try:
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.1)
    except ChildProcessError:
        return []
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200] for pid in children]


def run_timed(command: list[str]) -> tuple[int, float]:
    """Run a command; return its status, and how many times `YARDSTICK_S` `work` took meanwhile."""
    process, timings = subprocess.Popen(command), []
    while process.poll() is None:
        timings.append(work(0))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EVERY_S)
    return process.returncode, statistics.fmean(timings) / YARDSTICK_S


def main(arguments: list[str]) -> int:
    """Return pytest's exit status, or 1 if the suite took too long."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    status, slower = run_timed([sys.executable, "-m", "pytest", *arguments])
    left, usage = orphans(), resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = usage.ru_utime + usage.ru_stime
    budget = sum(int(line.split()[0]) for line in Path(__file__).with_suffix(".txt").read_text().splitlines())
    used = spent / budget / slower
    print(
        f"processor time: {spent:.0f} s, {used:.2f} of {budget} s (tests/budget.txt) times {slower:.2f} (this machine)"
    )
    if left:
        print(f"processes that outlived the tests: {', '.join(left)}")
    if used > TOLERATED:
        print(f"more than {TOLERATED} times the budget: make tests faster, or grant more by a line of its own")
    return status or int((used > TOLERATED or bool(left)) and "CI" in os.environ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

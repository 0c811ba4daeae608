"""
Runs pytest, and holds the processor time of the whole suite against what `tests/budget.txt` grants.

`python -m tests.budget [ARGUMENTS OF PYTEST]`. Counted is what pytest and all that it starts take,
orphans included. A slower machine is granted more: a fixed piece of work, timed here too, tells by
how much. With `CI` set, more than 1.25 times the budget fails.
"""

import ctypes
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

BUDGET = Path(__file__).with_name("budget.txt")

TOLERATED = 1.25

YARDSTICK_S = 1.9
"""Processor seconds of `work` where the budget was recorded, with every core at work."""

_PR_SET_CHILD_SUBREAPER = 36

_FAREWELL_S = 30


def budget() -> int:
    """Return the processor seconds that the lines of the file grant together."""
    return sum(int(line.split()[0]) for line in BUDGET.read_text(encoding="utf-8").splitlines() if line.strip())


def yardstick() -> float:
    """Return the processor seconds of the fixed work, every core doing it at once."""
    command = [sys.executable, "-c", "from tests.budget import work; print(work())"]
    at_work = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(os.cpu_count() or 1)]
    return statistics.fmean(float(process.communicate()[0]) for process in at_work)


def work() -> float:
    """Do a fixed piece of work, of arithmetic, memory and files; return its processor seconds."""
    start = time.process_time()
    import torch  # noqa: F401  # the cost of importing it is what is measured

    table = {}
    for number in range(1_900_000):
        table[number % 5003] = (number * 2_654_435_761) % 2**32
        if number % 3000 == 0:
            sorted(table.values())
    return time.process_time() - start


def main(arguments: list[str]) -> int:
    """Return pytest's exit status, or 1 if the suite took too long."""
    # Processes that a test leaves behind become this one's children: their time counts, and they
    # are seen.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    speeds = [yardstick()]
    before = _children_s()
    status = subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode
    left = _orphans()
    spent = _children_s() - before
    speeds.append(yardstick())
    slower = sum(speeds) / len(speeds) / YARDSTICK_S
    granted = budget() * slower
    print(
        f"processor time: {spent:.0f} s, {spent / granted:.2f} of the budget ({budget()} s, times {slower:.2f} for "
        f"this machine; tests/budget.txt)"
    )
    if left:
        print(f"processes that outlived the tests: {', '.join(left)}")
    over = spent > TOLERATED * granted
    if over:
        print(f"more than {TOLERATED} times the budget: make tests faster, or grant more by a line of its own")
    return status or int((over or bool(left)) and "CI" in os.environ)


def _children_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _orphans() -> list[str]:
    """Wait for orphaned processes; return the command lines of those that do not end."""
    deadline = time.monotonic() + _FAREWELL_S
    try:
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.1)
    except ChildProcessError:
        return []
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200] for pid in children]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

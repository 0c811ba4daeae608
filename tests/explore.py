"""
Tries random examples of every law until the minutes are over: `python -m tests.explore MINUTES`.

A law that fails ends the search; what reproduces it is printed.
"""

import os
import secrets
import subprocess
import sys
import time


def main(minutes: str) -> int:
    """Return 0 if nothing was found."""
    end = time.monotonic() + 60 * float(minutes)
    rounds = 0
    while rounds == 0 or time.monotonic() < end:
        seed = secrets.randbelow(2**32)
        command = ["-m", "pytest", "-q", "-m", "hypothesis or seeded", "--maxfail=1", f"--hypothesis-seed={seed}"]
        variables = {"HYPOTHESIS_PROFILE": "explore", "EXPLORE_SEED": str(seed)}
        print(f"round {rounds + 1}, seed {seed}", flush=True)
        if status := subprocess.run(
            [sys.executable, *command, "-n", str(os.cpu_count()), "--dist", "loadfile"],
            env={**os.environ, **variables},
            check=False,
        ).returncode:
            words = " ".join(f"{name}={value}" for name, value in variables.items())
            print(f"\nTo reproduce it, with the name of the test that failed:\n{words} {sys.executable} -m pytest "
                  f"--hypothesis-seed={seed} TEST")  # fmt: skip
            return status
        rounds += 1
    print(f"{rounds} rounds found nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""
Tries random examples of every law until the minutes are over: `python -m tests.explore MINUTES`.

A law that fails ends the search; what reproduces it, with its name, is printed before each round.
"""

import os
import secrets
import subprocess
import sys
import time


def main(minutes: str) -> int:
    """Return 0 if nothing was found."""
    end, rounds, status = time.monotonic() + 60 * float(minutes), 0, 0
    while not status and (rounds == 0 or time.monotonic() < end):
        seed, rounds = str(secrets.randbelow(2**32)), rounds + 1
        variables = {"HYPOTHESIS_PROFILE": "explore", "EXPLORE_SEED": seed}
        command = [sys.executable, "-m", "pytest", "-q", f"--hypothesis-seed={seed}"]
        search = ["-m", "hypothesis or seeded", "--maxfail=1", "-n", str(os.cpu_count()), "--dist", "loadfile"]
        print(
            f"round {rounds}:", *(f"{name}={value}" for name, value in variables.items()), *command, "TEST", flush=True
        )
        status = subprocess.run([*command, *search], env={**os.environ, **variables}, check=False).returncode
    print("the last round found this" if status else f"{rounds} rounds found nothing")
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

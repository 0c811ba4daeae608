"""Runs `python -m packplan.app.sft`."""

from packplan.app.cli.command import run_program
from packplan.app.sft import main

if __name__ == "__main__":
    raise SystemExit(run_program(main))

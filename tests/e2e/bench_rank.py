"""Runs one rank of `app.bench work --measured`, and writes its times down."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from app.bench.work import ranks


class Written:
    """Takes what a rank says, and writes it to a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def put(self, said: tuple[int, Any]) -> None:
        """Write a rank's times."""
        rank, times = said
        (self._folder / f"times{rank}.json").write_text(json.dumps(times))


def main(folder: str) -> int:
    """Return the exit status."""
    ranks.run_rank(int(os.environ["RANK"]), folder, ranks.Task(1, 1, 0), Written(folder))
    return 0

"""Benchmarks on less than users run them on: what processes of the server call."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs

from app.bench.__main__ import main
from app.bench.work import ranks

PACKING_LENGTH = 192


class Written:
    """Takes what a rank says, and writes it to a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def put(self, said: tuple[int, Any]) -> None:
        """Write a rank's times."""
        rank, times = said
        (self._folder / f"times{rank}.json").write_text(json.dumps(times))


def rank(folder: str) -> int:
    """Run one rank of `work --measured` on short packs; write its times to a folder."""
    with patch.object(ranks, "PACKING_LENGTH", PACKING_LENGTH):
        ranks.run_rank(int(os.environ["RANK"]), folder, ranks.Task(1, 1, 0), Written(folder))
    return 0


def lengths(*words: str) -> int:
    """Run `lengths` with these words, on photographs of half the width and height."""
    from app.bench.measuring import cost

    *others, photograph = cost.KINDS
    width, height = photograph.size
    smaller = attrs.evolve(photograph, size=(width // 2, height // 2))
    with patch.object(cost, "KINDS", (*others, smaller)):
        return main(["lengths", *words])

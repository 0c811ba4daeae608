"""Benchmarks on less than users run them on: what processes of the server call."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs

from packplan.app.bench.__main__ import main
from packplan.app.bench.work import ranks

PACKING_LENGTH = 192

SIZES = {
    **ranks.SIZES,
    "text_config": {**ranks.SIZES["text_config"], "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1,
                    "num_attention_heads": 1, "num_key_value_heads": 1},
    "vision_config": {**ranks.SIZES["vision_config"], "depth": 2, "hidden_size": 64, "intermediate_size": 192,
                      "out_hidden_size": 64, "fullatt_block_indexes": [1]},
}  # fmt: skip
"""A smaller model, whose images' tokens still cost more than a text's."""

AT_ONCE = 4
"""Samples that are measured at once, so that as many are enough to warm up."""


class Written:
    """Takes what a rank says, and writes it to a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def put(self, said: tuple[int, Any]) -> None:
        """Write a rank's times."""
        rank, times = said
        (self._folder / f"times{rank}.json").write_text(json.dumps(times))


def rank(folder: str) -> int:
    """
    Run one rank of `work --measured` on short packs of a smaller model; write its times to a
    folder.
    """
    with patch.multiple(ranks, PACKING_LENGTH=PACKING_LENGTH, SIZES=SIZES):
        ranks.run_rank(int(os.environ["RANK"]), folder, ranks.Task(1, 1, 0), Written(folder))
    return 0


def lengths(*words: str) -> int:
    """
    Run `lengths` with these words, on photographs of half the width and height, a few at once.
    """
    from packplan.adapters.samples import measurer
    from packplan.app.bench import lengths as command
    from packplan.app.bench.measuring import cost

    *others, photograph = cost.KINDS
    width, height = photograph.size
    smaller = attrs.evolve(photograph, size=(width // 2, height // 2))
    with (
        patch.object(cost, "KINDS", (*others, smaller)),
        patch.object(cost, "WARM_UP", AT_ONCE),
        patch.object(command, "WARM_UP", AT_ONCE),
        patch.object(measurer, "AT_ONCE", AT_ONCE),
    ):
        return main(["lengths", *words])

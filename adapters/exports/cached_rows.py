"""Rows of ms-swift with their lengths, in the folder that its `--cached_dataset` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packplan.adapters.exports.llama_factory import making

EVAL = "val"
"""Folder of the rows of evaluation, below that of the training rows."""


def export_cached_rows(splits: Mapping[str, tuple[Any, Sequence[Sequence[int]]]], folder: Path) -> None:
    """
    Write the rows of training, and in `EVAL` those of evaluation.

    Args:
        splits: Name of each split -> its rows, a `datasets.Dataset`, and the tokens of each
            sequence of each row.
        folder: Folder to make; there is none yet.

    Raises:
        OutputError: It cannot be written.
    """
    with making(folder) as unfinished:
        for name, (rows, lengths) in splits.items():
            rows.add_column("lengths", list(lengths)).save_to_disk(unfinished if name == "train" else unfinished / EVAL)

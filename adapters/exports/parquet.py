"""Packs as Parquet: a plain file of packs, and the packed sequences of Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from packplan.adapters.exports.marks import ExportedPlan
from packplan.adapters.exports.packs import Columns, TextPack, TextPacks, load_pyarrow
from packplan.adapters.files import publishing, writing
from packplan.adapters.loaders.rows import IGNORED_LABEL
from packplan.core.errors import ArgumentError
from packplan.core.lengths import IntArray
from packplan.core.surface import Plan


def export_parquet(rows: Any, plan: Plan, path: str | Path, *, order: Sequence[int] | IntArray | None = None) -> None:
    """
    Write packs to a Parquet file, one row a pack.

    Columns: `pack` (index), `samples` and `lengths` (a value for each sample), `input_ids`,
    `labels` and `position_ids` (a value for each token). Labels are not shifted: the label of a
    token is the token itself, or -100. The first token of each sample is not learned.

    Args:
        rows: Tokenized rows by index, with `input_ids` and perhaps `labels` or masks.
        plan: Plan of the lengths of these rows.
        path: File to write; it must not exist.
        order: Pack indices, such as `schedule.order(0)`; None for the order of the plan.

    Raises:
        ArgumentError: Rows or *order* do not fit the plan, a row has media, *path* exists, or
            pyarrow is not installed.
        StaleError: A row is not as long as planned.
        OutputError: The file cannot be written.
    """
    names = {"pack": "int64", "samples": "[int64]", "lengths": "[int32]"}
    names |= dict.fromkeys(("input_ids", "labels", "position_ids"), "[int32]")
    packs = TextPacks(rows, plan, order=order, target=Path(path))
    _write(packs, names, lambda pack: {name: getattr(pack, name) for name in names})


def export_megatron_bridge(
    rows: Any, plan: Plan, path: str | Path, *, order: Sequence[int] | IntArray | None = None
) -> None:
    """
    Write packs to the Parquet file that Megatron-Bridge reads as packed sequences.

    Columns: `input_ids` (whole samples), `seq_start_id` (start of each sample), `loss_mask` (int8,
    as long as `input_ids`). The reader trains token k to foretell token k + 1 of its sample, so
    the mask is shifted: it is 1 where the next token is learned, and 0 at the end of each sample.
    A sample of n tokens therefore takes n - 1 places of the tool's sequence.

    Args:
        rows: Tokenized rows by index, with `input_ids` and perhaps `labels` or masks.
        plan: Plan of the lengths of these rows.
        path: File to write, named `*.idx.parquet` for every version; it must not exist.
        order: Pack indices, such as `schedule.order(0)`; None for the order of the plan. The tool
            may shuffle them.

    Raises:
        ArgumentError: Rows or *order* do not fit the plan, a row has media, a label is another
            token than the one at its place, a pack has samples of one token only, *path* exists,
            or pyarrow is not installed.
        StaleError: A row is not as long as planned.
        OutputError: The file cannot be written.
    """
    names = {"input_ids": "[int32]", "seq_start_id": "[int32]", "loss_mask": "[int8]"}
    _write(TextPacks(rows, plan, order=order, target=Path(path)), names, _bridge_row)


def _bridge_row(pack: TextPack) -> Columns:
    learned = pack.labels != IGNORED_LABEL
    if np.any(pack.labels[learned] != pack.input_ids[learned]):
        fact = f"pack {pack.pack:,} has labels that are not its tokens, and the format has a mask in their place"
        raise ArgumentError("host", fact, {"pack": pack.pack})
    if pack.lengths.max() == 1:
        fact = f"pack {pack.pack:,} has samples of one token only, of which the format trains none"
        raise ArgumentError("host", fact, {"pack": pack.pack})
    return {
        "input_ids": pack.input_ids,
        "seq_start_id": (np.cumsum(pack.lengths) - pack.lengths).astype(np.int32),
        "loss_mask": np.append(learned[1:], False).astype(np.int8),
    }


def _write(packs: TextPacks, names: Mapping[str, str], columns: Callable[[TextPack], Columns]) -> None:
    """
    Write a file of packs.

    Args:
        packs: Packs to write.
        names: Arrow types by column; lists in brackets.
        columns: Function that returns a pack's row.
    """
    pyarrow = load_pyarrow()
    types = {name: pyarrow.type_for_alias(kind.strip("[]")) for name, kind in names.items()}
    fields = [(name, pyarrow.list_(types[name]) if "[" in kind else types[name]) for name, kind in names.items()]
    schema = pyarrow.schema(fields, ExportedPlan.from_plan(packs.plan).metadata())
    new_writer = pyarrow.parquet.ParquetWriter
    with writing(packs.target), publishing(packs.target) as file, new_writer(file, schema) as writer:
        for table in packs.tables(schema, columns):
            writer.write_table(table, row_group_size=len(table))

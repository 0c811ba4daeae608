"""
Packs as the tokenized folder of LLaMA-Factory.

Its packed rows keep these rules, which its collators rely on: the mask numbers the samples of a row
from 1, and is 0 over padding. Each row ends in padding, since a mask without a 0 may be dropped. A
row's length is a multiple of 8, so that no collator lengthens it past its positions.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from packplan.adapters.exports.marks import INFO, ExportedPlan
from packplan.adapters.exports.packs import Columns, TextPack, TextPacks, load_pyarrow
from packplan.adapters.files import sync_folder, write_bytes, writing
from packplan.adapters.loaders.rows import IGNORED_LABEL
from packplan.core.lengths import IntArray
from packplan.core.surface import Plan

_MULTIPLE = 8
"""Length to whose multiples the tool's collators lengthen rows."""

_DATA = "data-00000-of-00001.arrow"

_STATE: Mapping[str, Any] = MappingProxyType(
    {
        "_data_files": [{"filename": _DATA}],
        "_fingerprint": None,  # `datasets` makes one for each file
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
)
"""State of a data set without transformations, as `datasets` stores it."""


def export_llama_factory(
    rows: Any, plan: Plan, folder: str | Path, *, order: Sequence[int] | IntArray | None = None, pad_token_id: int = 0
) -> None:
    """
    Write packs to a folder that LLaMA-Factory loads as its `tokenized_path`.

    `datasets.load_from_disk` reads it as a `DatasetDict` with `train`, one row a pack, in the
    columns `input_ids`, `attention_mask`, `position_ids` and `labels`. A row has the packing length
    and one more, rounded up to a multiple of 8; a longer sample that is packed alone has its own.
    Train with `neat_packing: true`, and with `disable_shuffling: true` to keep the order.

    Args:
        rows: Tokenized rows by index, with `input_ids` and perhaps `labels` or masks.
        plan: Plan of the lengths of these rows.
        folder: Folder to make; it must not exist.
        order: Pack indices, such as `schedule.order(0)`; None for the order of the plan.
        pad_token_id: Token of the padding, which is neither learned nor attended to.

    Raises:
        ArgumentError: Rows or *order* do not fit the plan, a row has media, *folder* exists, or
            pyarrow is not installed.
        StaleError: A row is not as long as planned.
        OutputError: The folder cannot be written.
    """
    pyarrow = load_pyarrow()
    packs = TextPacks(rows, plan, order=order, target=Path(folder))
    mark = ExportedPlan.from_plan(plan)
    ids = dict.fromkeys(("input_ids", "position_ids", "labels"), pyarrow.list_(pyarrow.int32()))
    schema = pyarrow.schema(ids | {"attention_mask": pyarrow.list_(pyarrow.int32())}, mark.metadata())
    padding = {"input_ids": pad_token_id, "labels": IGNORED_LABEL, "position_ids": 0, "attention_mask": 0}

    def columns(pack: TextPack) -> Columns:
        width = max(pack.input_ids.size, plan.raw.packing_length) // _MULTIPLE * _MULTIPLE + _MULTIPLE
        numbers = np.repeat(np.arange(1, pack.lengths.size + 1, dtype=np.int32), pack.lengths)
        values = {name: getattr(pack, name) for name in ids} | {"attention_mask": numbers}
        return {name: _padded(array, width, padding[name]) for name, array in values.items()}

    with making(packs.target) as unfinished:
        (unfinished / INFO).parent.mkdir()
        with (unfinished / INFO).with_name(_DATA).open("wb") as file:
            with pyarrow.ipc.new_stream(file, schema) as writer:
                for table in packs.tables(schema, columns):
                    writer.write_table(table)
            file.flush()
            os.fsync(file.fileno())
        _write_json(unfinished / INFO, {"description": mark.description()})
        _write_json((unfinished / INFO).with_name("state.json"), _STATE)
        _write_json(unfinished / "dataset_dict.json", {"splits": ["train"]})


def _padded(array: NDArray[np.int32], width: int, value: int) -> NDArray[np.int32]:
    return np.pad(array, (0, width - array.size), constant_values=value)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_bytes(path, json.dumps(dict(content)).encode())


@contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Yield a folder under another name, renamed to *folder* at the end; removed on an error."""
    with writing(folder):
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            yield unfinished
            unfinished.chmod(0o755)
            unfinished.rename(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        sync_folder(folder.parent)

"""
Writes the packs of a plan to plain Parquet, or to the files of Megatron-Bridge or LLaMA-Factory.

`export_cached_rows` writes rows with their lengths for ms-swift.

Packs with images, videos or audio are refused. Packs are written whole, in the order of the plan or
of an epoch, and each file stores the plan's checksum. A file appears only when it is complete.
About `BATCH_TOKENS` tokens of packs are in memory at a time.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packplan.adapters.files import publish_file, sync_folder, wrap_write_errors, write_bytes
from packplan.adapters.loaders.packs import RowsOfPacks, flatten
from packplan.adapters.loaders.rows import require_supervised_rows
from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.batch import IGNORED_LABEL
from packplan.core.errors import ArgumentError
from packplan.core.lengths import IntArray
from packplan.core.surface import Plan

BATCH_TOKENS = 2**22
"""Number of tokens after which a Parquet row group or an Arrow batch is written."""

_MEDIA = re.compile(r"(?:^|_)(?:image|video|audio|pixel)s?(?:_|$)")
"""
Pattern of column names for images, videos or audio.

If a pack has tensors other than token columns, the tensors count as media, whatever their name.
"""

_BY_TOKEN = ("input_ids", "labels", "position_ids")

_INFO = Path("train", "dataset_info.json")
"""File in a `datasets` folder, with the plan's checksum and packing length in its `description`."""

_MULTIPLE = 8
"""LLaMA-Factory's collators pad rows to a multiple of this many tokens."""

_DATA = "data-00000-of-00001.arrow"

EVAL = "val"
"""Name of the folder with the evaluation rows, inside the folder with the training rows."""

Order = Sequence[int] | IntArray | None
"""Pack indices in the order in which packs are written; None for the order of the plan."""

Row = Mapping[str, Any]
"""Values of one row of a file, by column."""


def export_parquet(rows: Any, plan: Plan, path: str | Path, *, order: Order = None) -> None:
    """
    Write packs to a Parquet file, one row for each pack.

    The columns are `pack` (index), `samples` and `lengths` (a value for each sample), `input_ids`,
    `labels` and `position_ids` (a value for each token). Labels are not shifted: each label stands
    at the position of its token. A token with label -100 is not supervised; nor is the first token
    of a sample.

    Args:
        rows: Tokenized rows by index, with `input_ids` and optionally `labels` or masks.
        plan: Plan made from the lengths of these rows.
        path: File to write, which must not exist yet.
        order: Pack indices, such as `schedule.order(0)`; None for the order of the plan.

    Raises:
        ArgumentError: Rows or *order* do not fit the plan, a row has media, no token is
            supervised, or *path* exists.
        StaleError: A row is not as long as planned.
        OutputError: The file cannot be written.
    """
    lists = {"samples": pa.int64(), **dict.fromkeys(("lengths", *_BY_TOKEN), pa.int32())}
    schema = _make_schema(plan, {"pack": pa.int64(), **{name: pa.list_(kind) for name, kind in lists.items()}})
    _write_parquet(_read_packs(rows, plan, order, Path(path)), schema, Path(path))


def export_megatron_bridge(rows: Any, plan: Plan, path: str | Path, *, order: Order = None) -> None:
    """
    Write packs to the Parquet file that Megatron-Bridge reads as packed sequences.

    The columns are `input_ids` (whole samples), `seq_start_id` (start of each sample) and
    `loss_mask` (int8, as long as `input_ids`). Megatron-Bridge trains token k to predict token
    k + 1 of the same sample, so the mask is shifted. The mask is 1 if the next token is supervised,
    and 0 at the end of a sample. So a sample of n tokens takes n - 1 positions of a sequence in
    Megatron-Bridge.

    Args:
        rows: Tokenized rows by index, with `input_ids` and optionally `labels` or masks.
        plan: Plan made from the lengths of these rows.
        path: File to write, which must not exist yet. All versions of Megatron-Bridge read files
            named `*.idx.parquet`.
        order: Pack indices, such as `schedule.order(0)`; None for the order of the plan.
            Megatron-Bridge may shuffle the packs.

    Raises:
        ArgumentError: As in `export_parquet`, or a label differs from the token at its position.
        StaleError: A row is not as long as planned.
        OutputError: The file cannot be written.
    """
    types = {"input_ids": pa.int32(), "seq_start_id": pa.int32(), "loss_mask": pa.int8()}
    schema = _make_schema(plan, {name: pa.list_(kind) for name, kind in types.items()})
    _write_parquet(map(_to_bridge_row, _read_packs(rows, plan, order, Path(path))), schema, Path(path))


def export_llama_factory(
    rows: Any, plan: Plan, folder: str | Path, *, order: Order = None, pad_token_id: int = 0
) -> None:
    """
    Write packs to a folder that LLaMA-Factory loads as its `tokenized_path`.

    `datasets.load_from_disk` reads the folder as a `DatasetDict` with the split `train`, in which
    each row is a pack. The columns are `input_ids`, `attention_mask`, `position_ids` and `labels`.

    Rows follow rules on which LLaMA-Factory's collators rely. The mask numbers the samples of a row
    from 1, and is 0 at padding. Each row ends in padding, since transformers' flash attention
    ignores a mask without a 0. The width of a row is the packing length plus one, rounded up to a
    multiple of 8. A collator that pads rows to such a width therefore adds no position without
    an id. The row of a long sample has the sample's length plus one, rounded up in the same way.

    Train with `neat_packing: true`, and with `disable_shuffling: true` to keep the order.

    Args:
        rows: Tokenized rows by index, with `input_ids` and optionally `labels` or masks.
        plan: Plan made from the lengths of these rows.
        folder: Folder to create, which must not exist yet.
        order: Pack indices, such as `schedule.order(0)`; None for the order of the plan.
        pad_token_id: Id of the padding token, which is neither supervised nor attended to.

    Raises:
        ArgumentError: Rows or *order* do not fit the plan, a row has media, no token is
            supervised, or *folder* exists.
        StaleError: A row is not as long as planned.
        OutputError: The folder cannot be written.
    """
    padding = {"input_ids": pad_token_id, "labels": IGNORED_LABEL, "position_ids": 0, "attention_mask": 0}
    schema = _make_schema(plan, dict.fromkeys(padding, pa.list_(pa.int32())))

    def pad_row(row: Row) -> Row:
        width = max(len(row["input_ids"]), plan.raw.packing_length) // _MULTIPLE * _MULTIPLE + _MULTIPLE
        numbers = np.repeat(np.arange(1, len(row["lengths"]) + 1, dtype=np.int32), row["lengths"])
        values = {**row, "attention_mask": numbers}
        room = {name: (0, width - len(values[name])) for name in padding}
        return {name: np.pad(values[name], room[name], constant_values=pad) for name, pad in padding.items()}

    # The form in which `datasets` stores a data set without transformations. `datasets` computes a
    # fingerprint when it loads the files.
    state: dict[str, Any] = {"_data_files": [{"filename": _DATA}], "_split": "train", "_output_all_columns": False}
    state |= {"_fingerprint": None, "_format_columns": None, "_format_kwargs": {}, "_format_type": None}
    with publish_folder(Path(folder)) as unfinished:
        train = unfinished / _INFO.parent
        train.mkdir()
        with publish_file(train / _DATA) as file, pa.ipc.new_stream(file, schema) as writer:
            for table in _arrow_tables(map(pad_row, _read_packs(rows, plan, order, Path(folder))), schema):
                writer.write_table(table)
        texts = {_INFO: {"description": json.dumps(_plan_metadata(plan))}, _INFO.with_name("state.json"): state}
        for path, content in {**texts, Path("dataset_dict.json"): {"splits": ["train"]}}.items():
            write_bytes(unfinished / path, json.dumps(content).encode())


def export_cached_rows(splits: Mapping[str, tuple[Any, Sequence[Sequence[int]]]], folder: Path) -> None:
    """
    Write rows of ms-swift with their lengths to a folder for ms-swift's `--cached_dataset`.

    Evaluation rows are written to the folder `EVAL` inside *folder*.

    Args:
        splits: Splits by name; `train` is the training split, any other name the evaluation split.
            A split is a pair of a `datasets.Dataset` and the lengths of the sequences in each row.
        folder: Folder to create, which must not exist yet.

    Raises:
        OutputError: The folder cannot be written.
    """
    with publish_folder(folder) as unfinished:
        for name, (rows, lengths) in splits.items():
            rows.add_column("lengths", list(lengths)).save_to_disk(unfinished if name == "train" else unfinished / EVAL)


def _read_packs(rows: Any, plan: Plan, order: Order, target: Path) -> Iterator[Row]:
    """
    Yield each pack as a row with its index, samples, lengths, tokens, labels and position ids.

    Raises:
        ArgumentError: The rows or *order* do not fit the plan, *target* exists, a row has media or
            is not one sample, or no token is supervised.
        StaleError: A row is not as long as planned.
    """
    packs = RowsOfPacks(rows, plan)
    numbers = np.arange(len(plan.packs)) if order is None else np.asarray(order)
    whole = numbers.ndim == 1 and numbers.size > 0 and numbers.dtype.kind in "iu"
    if not whole or numbers.min() < 0 or numbers.max() >= len(plan.packs):
        fact = f"order has to list at least one pack index, each from 0 to {len(plan.packs) - 1:,}"
        raise ArgumentError("host", fact, {"num_packs": len(plan.packs)})
    if target.exists() or target.is_symlink():
        raise ArgumentError("host", f"{target} exists already: give another path, or remove it", {"path": str(target)})
    supervised: dict[int, int] = {}
    for number in progress(numbers.tolist(), desc=f"writing {target.name}", unit=" packs", leave=False, delay=BRIEF_S):
        pack, samples = packs[number], plan.packs[number]
        for sample, row in zip(samples, pack, strict=True):
            _refuse_media(f"row {sample:,}", [name for name in row if _MEDIA.search(name) and _has_value(row[name])])
        flat = flatten(pack)
        _refuse_media(f"the rows of pack {number:,}", flat.keys() - set(_BY_TOKEN))
        values = {name: flat[name][0].numpy().astype(np.int32) for name in _BY_TOKEN}
        lengths = plan.lengths[samples].astype(np.int32)
        starts = np.cumsum(lengths) - lengths
        supervised |= zip(samples, np.add.reduceat(values["labels"] != IGNORED_LABEL, starts, dtype=int), strict=True)
        yield {"pack": number, "samples": samples, "lengths": lengths, **values}
    require_supervised_rows(np.array(list(supervised.values())))


def _plan_metadata(plan: Plan) -> dict[str, Any]:
    """Return the plan's checksum and packing length, under the keys that exported files use."""
    return {"packplan_checksum": plan.checksum, "packplan_packing_length": plan.raw.packing_length}


def _make_schema(plan: Plan, types: Mapping[str, Any]) -> Any:
    return pa.schema(types, {key: str(value) for key, value in _plan_metadata(plan).items()})


def _arrow_tables(packs: Iterable[Row], schema: Any) -> Iterator[Any]:
    """Yield the packs in Arrow tables of about `BATCH_TOKENS` tokens each."""
    batch: list[Row] = []
    num_tokens = 0
    for row in packs:
        batch.append(row)
        num_tokens += len(row["input_ids"])
        if num_tokens >= BATCH_TOKENS:
            yield pa.Table.from_pylist(batch, schema)
            batch, num_tokens = [], 0
    if batch:
        yield pa.Table.from_pylist(batch, schema)


def _write_parquet(packs: Iterable[Row], schema: Any, target: Path) -> None:
    with wrap_write_errors(target), publish_file(target) as file, pq.ParquetWriter(file, schema) as writer:
        for table in _arrow_tables(packs, schema):
            writer.write_table(table, row_group_size=len(table))


def _to_bridge_row(row: Row) -> Row:
    """Convert a pack to a Megatron-Bridge row; ArgumentError if a label differs from its token."""
    supervised, lengths = row["labels"] != IGNORED_LABEL, row["lengths"]
    if np.any(row["labels"][supervised] != row["input_ids"][supervised]):
        reason = "has labels that differ from its tokens, which this format cannot store: use another format"
        raise ArgumentError("host", f"pack {row['pack']:,} {reason}", {"pack": row["pack"]})
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    mask = np.append(supervised[1:], False).astype(np.int8)
    return {"input_ids": row["input_ids"], "seq_start_id": starts, "loss_mask": mask}


def _has_value(value: Any) -> bool:
    """Return whether a column's value is present: neither None nor an empty list or array."""
    return value is not None and not (hasattr(value, "__len__") and len(value) == 0)


def _refuse_media(whose: str, columns: Any) -> None:
    if columns:
        fact = f"{whose} has {', '.join(sorted(columns))}, but this format stores text only: export rows without media"
        raise ArgumentError("host", fact, {"columns": sorted(columns)})


@contextmanager
def publish_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to *folder* at the end or removed on an error."""
    with wrap_write_errors(folder):
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            yield unfinished
            unfinished.chmod(0o755)
            unfinished.rename(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        sync_folder(folder.parent)

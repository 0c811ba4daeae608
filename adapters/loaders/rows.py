"""
Reads, compares and pads the rows of a data set.

A row is one sample: a mapping with `input_ids`, perhaps `labels`, and perhaps the tensors of a
processor (`pixel_values`, `image_grid_thw`, …). Rows of another form need a collator of the user's
own.

Labels of a row are not changed. Without labels, each token is its own label, unless a mask of TRL
excludes it from the loss. `read_row` refuses a row that is padded or not one sample.

In preference data, a sample has a chosen and a rejected answer (a pair), or a single answer (KTO).
For n pairs, TRL's collator makes a batch of 2 n rows, the chosen answers first.

`RowSource` reads each row once before training, a few rows at a time, and returns `RowFacts` with
the digests of all rows. A row that is read again in training has to have the same digest.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from packplan.adapters.files import write_bytes
from packplan.adapters.progress import BRIEF_S, progress
from packplan.core.batch import IGNORED_LABEL
from packplan.core.errors import ArgumentError, Difference, PackplanError, StaleError, counted, verb_for
from packplan.core.lengths import IntArray

log = logging.getLogger(__name__)


TOKENS, LABELS, POSITIONS, ATTENTION = "input_ids", "labels", "position_ids", "attention_mask"

MASKS = ("completion_mask", "assistant_masks", "assistant_mask")
"""Columns in which TRL marks supervised tokens with 1, and all other tokens with 0."""

_PACKED = {"seq_lengths": 1, "seq_lens": 1, "seq_start_id": 1, "cu_seqlens": 2, "cu_seq_lens_q": 2, "cu_seq_lens_k": 2}
"""
Column with lengths or boundaries of a pack's samples -> number of values in a pack of one sample.
"""

_NUMBERED = ("seq_idx", "segment_ids")
"""Columns with the sample number of each token in a pack."""

MEDIA_TYPE_IDS = "mm_token_type_ids"
"""Column of transformers with the type of each token: 0 for text, 1 for images, 2 for videos."""

TYPE_COLUMNS = ("token_type_ids", MEDIA_TYPE_IDS)
"""Columns with the type of each token, such as text or image."""

BY_TOKEN = {TOKENS, LABELS, POSITIONS, ATTENTION, *MASKS, *_PACKED, *_NUMBERED, *TYPE_COLUMNS, "shift_labels"}
"""Columns with a value for each token, or for each sample of a pack. Other columns may be media."""

_VALUED = (ATTENTION, LABELS, *MASKS, *TYPE_COLUMNS)
"""Columns that are optional, but need a value for each token of a row."""

_ROW_MASKS = (ATTENTION, "completion_attention_mask")
"""Names of the attention mask in a batch; the second name is used by KTO in TRL before 1.0."""

_DERIVED = "logps"
"""Part of the names of columns that a reference model computes; digests leave these columns out."""

_BLOCK = 8
"""Number of rows that `RowSource` reads at a time."""

_MOST_VALUES = 1 << 16
"""Maximum number of values of an array that its digest covers, taken at equal distances."""

_MOST_NAMES = 100
"""Maximum number of characters of a row's column names in a message."""

_FACTS = np.dtype([("digest", "V16"), ("num_supervised", "<i8"), ("length", "<i8")])
"""
Type of the facts of a row. Numbers are `UNKNOWN` if only decoding the row's files would give them.
"""

UNKNOWN = -1

FACTS_FILE = "packplan_rows.npy"
"""Name of the file in a checkpoint that stores the facts of all rows."""

Row = Mapping[str, Any]

Collate = Callable[[list[Row]], Mapping[str, Any]]
"""Collator that makes a padded batch of rows."""


@attrs.frozen(eq=False)
class RowSource:
    """Rows by index, with the collator that turns them into samples."""

    rows: Any
    """Rows by index: a list, a `datasets.Dataset`, a torch data set."""

    collate: Collate | None = None
    """Collator that turns rows into padded batches; None if rows are tokenized."""

    of_pairs: bool = False
    """Whether samples are preference data."""

    stored: Any = attrs.field(init=False)
    """
    The rows of a `datasets.Dataset` without decoding of files, if reading a row would decode files;
    else None.
    """

    @stored.default
    def _find_stored(self) -> Any:
        if not hasattr(self.rows, "__len__") or not hasattr(self.rows, "__getitem__"):
            kind = type(self.rows).__name__
            fact = f"a plan needs rows by index, but {kind} yields them one after the other: use a Dataset"
            raise ArgumentError("host", fact, {"rows": kind})
        if not (features := getattr(self.rows, "features", None)):
            return None
        from datasets.features.features import require_decoding  # rows of `datasets` alone need it

        return self.rows.with_format("arrow") if any(map(require_decoding, features.values())) else None

    def read_facts(self, *, decode: bool = True, num_workers: int = 0, rank: int = 0, world_size: int = 1) -> RowFacts:
        """
        Read a rank's share of the rows once, and return their facts.

        Args:
            decode: Whether to decode files if the length of a row is not known otherwise.
            num_workers: Number of processes that read rows; useful if rows are computed when they
                are read.
            rank: This rank, from 0.
            world_size: Number of ranks, each of which reads a share of the rows.

        Raises:
            ArgumentError: A row is padded or is not one sample.
        """
        num = len(self.rows)
        share = range(num)[rank * num // world_size : (rank + 1) * num // world_size]
        blocks = [share[start : start + _BLOCK] for start in range(0, len(share), _BLOCK)]
        collate = partial(self._read_block, decode=decode or self.stored is None)
        # The generator draws nothing of the training's own.
        read: dict[str, Any] = {"dataset": blocks, "batch_size": None, "collate_fn": collate}
        read |= {"num_workers": num_workers, "generator": torch.Generator()}
        facts: list[tuple[bytes, int, int]] = []
        bar: dict[str, Any] = {"unit": " rows", "delay": BRIEF_S, "leave": False, "disable": rank > 0}
        with progress(total=len(share), desc="reading rows", **bar) as shown:
            for block in DataLoader(**read):
                if isinstance(block, PackplanError):
                    raise block
                facts += block
                shown.update(len(block))
        return RowFacts.from_rows(facts)

    def fetch(self, indices: Sequence[int]) -> Iterable[Row]:
        """Return the rows of *indices*, in one read if the data set allows it."""
        several = getattr(self.rows, "__getitems__", None)  # `datasets` is slow row by row
        return map(self.rows.__getitem__, indices) if several is None else several([*indices])

    def digests(self, indices: Sequence[int], rows: Iterable[Row]) -> list[bytes]:
        """
        Return a digest for each row of *indices*, computed from `stored`, or from *rows* if
        `stored` is None.
        """
        if self.stored is not None:
            from datasets.table import embed_table_storage

            rows = embed_table_storage(self.stored[[*indices]]).to_pylist()  # with the bytes of named files
        return [self._digest(row, index) for index, row in zip(indices, rows, strict=True)]

    def _digest(self, row: Row, index: int) -> bytes:
        """
        Return the digest of a row's tokens, labels and media. Without tokens, or in preference
        data, all columns count, except those that a reference model computes.
        """
        digest = blake2b(digest_size=16)
        if not isinstance(row, Mapping) or (TOKENS in row and not self.of_pairs):
            row = read_row(row, index)
            digest.update(np.ascontiguousarray(row[TOKENS]).data)
            digest.update(np.ascontiguousarray(row[LABELS]).data)
            row = _media_tensors(row) if len(row) > len((TOKENS, LABELS)) else {}
        if row := {name: value for name, value in row.items() if _DERIVED not in name}:
            digest.update(json.dumps(row, default=_as_text, sort_keys=True).encode())
        return digest.digest()

    def _read_block(self, indices: range, *, decode: bool) -> list[tuple[bytes, int, int]] | PackplanError:
        """
        Return the facts of some rows, or an error. Errors are returned since worker processes would
        wrap them.
        """
        try:
            if not decode:
                return [(digest, UNKNOWN, UNKNOWN) for digest in self.digests(indices, ())]
            rows = [*self.fetch(indices)]
            counts = [self._count(row, index) for index, row in zip(indices, rows, strict=True)]
            return [(one, *numbers) for one, numbers in zip(self.digests(indices, rows), counts, strict=True)]
        except PackplanError as error:
            return error

    def _count(self, row: Row, index: int) -> tuple[int, int]:
        """Return the number of supervised tokens and the number of all tokens of a collated row."""
        if self.of_pairs:
            (length,) = sample_lengths(self.collate([row]), 1)  # type: ignore[misc]  # TRL's trainers have one
            return length, length
        if self.collate is None or TOKENS in row:
            read = read_row(row, index)
        if self.collate is not None:
            read = read_row(_without_padding(require_collated(self.collate([row]))), index)
        return int((read[LABELS][1:] != IGNORED_LABEL).sum()), read[TOKENS].size


def _as_text(value: Any) -> Any:
    """
    Return a mapping as a dict, and any other value that JSON cannot represent as text. The text is
    a digest of the value's bytes, or the name of its type.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__"):  # a numpy array, or an image
        array = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
        flat = array.detach().flatten()
        value = f"{array.dtype} {array.shape}".encode() + tensor_bytes(flat[:: len(flat) // _MOST_VALUES + 1])
    return blake2b(value, digest_size=16).hexdigest() if isinstance(value, bytes) else type(value).__name__


def sample_lengths(batch: Mapping[str, Any], num_samples: int) -> list[int]:
    """
    Return the number of tokens of each sample of a batch, without padding. A pair of answers counts
    the tokens of its two rows.

    Args:
        batch: Batch that a collator has made.
        num_samples: Number of samples in the batch.

    Raises:
        ArgumentError: The batch has no mask, or neither one nor two rows for each sample.

    >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    >>> sample_lengths({"attention_mask": mask}, 2)
    [5, 4]
    """
    mask = next((batch[name] for name in _ROW_MASKS if name in batch), None)
    if mask is None or len(mask) not in {num_samples, 2 * num_samples}:
        found = "no attention_mask" if mask is None else counted(len(mask), "row")
        fact = f"the collator returns {found} for {counted(num_samples, 'sample')}: one or two rows for each are needed"
        raise ArgumentError("host", fact, {"samples": num_samples})
    lengths: list[int] = mask.sum(1).view(-1, num_samples).sum(0).tolist()
    return lengths


def require_collated(batch: Any) -> Mapping[str, Any]:
    """
    Return the batch of a collator.

    Raises:
        ArgumentError: The batch is not a mapping with `input_ids`, or its ids, mask and labels are
            not tensors of whole numbers of one shape (rows, tokens).
    """
    given: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {}
    for name in (TOKENS, *(name for name in (ATTENTION, LABELS) if given.get(name) is not None)):
        value: Any = given.get(name)
        is_whole = isinstance(value, torch.Tensor) and value.ndim == 2 and not value.is_floating_point()
        if not is_whole or value.shape != given[TOKENS].shape:
            found = f"{value.dtype} of shape {tuple(value.shape)}" if hasattr(value, "dtype") else type(value).__name__
            fact = f"the collator returns a {type(batch).__name__} whose {name} is {found}"
            due = f"whole numbers of shape (rows, tokens), the same for {TOKENS}, {ATTENTION} and {LABELS}"
            raise ArgumentError("host", f"{fact}: return a mapping with tensors of {due}", {"column": name})
    return given


def _without_padding(batch: Mapping[str, Any]) -> Row:
    """Return the only row of a batch, without its padding."""
    mask = batch.get(ATTENTION)
    if mask is None:
        return batch
    kept = mask != 0
    return {
        name: value[kept] if name in BY_TOKEN and getattr(value, "shape", None) == kept.shape else value
        for name, value in batch.items()
    }


def refuse_other_lengths(planned: Mapping[int, int], lengths: Sequence[int]) -> None:
    """
    Raise StaleError if the length of a row differs from its planned length.

    Args:
        planned: Index of each row -> planned number of tokens.
        lengths: Actual number of tokens of each row.

    Raises:
        StaleError: A length differs.
    """
    for (index, due), length in zip(planned.items(), lengths, strict=True):
        if due != length:
            raise _changed_row_error(index, Difference("length", due, length))


def _changed_row_error(index: int, change: Difference) -> StaleError:
    return attrs.evolve(StaleError.for_sample(index, f"row {index}", (change,)), kind="changed_row")


@attrs.frozen(eq=False)
class RowFacts:
    """Digests, numbers of supervised tokens, and lengths of the rows of a data set."""

    rows: NDArray[np.void]
    """Facts of each row; of the type `_FACTS`, shape (num_rows,)."""

    @classmethod
    def from_rows(cls, facts: Iterable[tuple[bytes, int, int]]) -> RowFacts:
        """
        Return the facts of rows from the digest, number of supervised tokens and length of each.
        """
        return cls(np.array([*facts], _FACTS))

    @classmethod
    def load(cls, folder: Path, digest: str) -> RowFacts | None:
        """Return the facts that a checkpoint stores, if their digest is *digest*; else None."""
        try:
            facts = cls(np.load(folder / FACTS_FILE, allow_pickle=False))
        except (OSError, EOFError, ValueError):  # missing, or not written to its end
            return None
        return facts if facts.rows.dtype == _FACTS and facts.digest == digest else None

    def save(self, folder: Path) -> None:
        """Write the facts into a checkpoint's folder; OutputError if they cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(data := BytesIO(), self.rows, allow_pickle=False)
        write_bytes(folder / FACTS_FILE, data.getbuffer())

    @cached_property
    def digest(self) -> str:
        """Digest of the contents of all rows, in their order."""
        return blake2b(self.rows["digest"].tobytes(), digest_size=16).hexdigest()

    @property
    def num_supervised(self) -> IntArray:
        """Number of supervised tokens of each row, or `UNKNOWN`; int64, shape (num_rows,)."""
        return self.rows["num_supervised"]

    @property
    def lengths(self) -> IntArray:
        """Number of tokens of each row, or `UNKNOWN`; int64, shape (num_rows,)."""
        return self.rows["length"]

    def refuse_other_rows(self, indices: Sequence[int], digests: Sequence[bytes]) -> None:
        """Raise StaleError if the digest of a row of *indices* has changed."""
        for index, digest in zip(indices, digests, strict=True):
            if (first := self.rows["digest"][index].tobytes()) != digest:
                raise _changed_row_error(index, Difference("digest", first.hex(), digest.hex()))


def require_supervised_rows(supervised: IntArray) -> None:
    """Warn of samples without supervised tokens; ArgumentError if all samples lack them."""
    unsupervised = int((supervised == 0).sum())
    if unsupervised == supervised.size > 0:
        fact = f"none of {counted(supervised.size, 'sample')} has a supervised token: all labels are {IGNORED_LABEL}"
        raise ArgumentError("host", fact, {"samples": unsupervised})
    if unsupervised:
        total, has = counted(supervised.size, "sample"), verb_for(unsupervised, "has", "have")
        log.warning("%s of %s %s no supervised token", f"{unsupervised:,}", total, has)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values, whatever its type."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


class _ReadRow(dict[str, Any]):
    """Row that `read_row` has returned; another call of `read_row` returns it unchanged."""


def read_row(row: Row, index: int | None = None) -> Row:
    """
    Return a tokenized row with `input_ids`, `labels`, token types, and other columns such as media.

    Ids, labels and token types become int64 arrays of shape (tokens,).

    Args:
        row: Tokenized row.
        index: Index of the row, for messages.

    Raises:
        ArgumentError: The row has no `input_ids`, has padding or several samples, or has values
            that are not whole numbers. The error is also raised if the number of labels, mask
            values or token types differs from the number of tokens.
    """
    if isinstance(row, _ReadRow):
        return row
    name = "a row" if index is None else f"row {index:,}"
    if not isinstance(row, Mapping):
        kind = type(row).__name__
        fact = f"{name} is of type {kind}, but has to be a mapping such as {{'{TOKENS}': [5, 6, 7]}}"
        raise ArgumentError("host", fact, {"row": index})
    if row.get(TOKENS) is None:
        found = f"the columns {', '.join(map(str, row))[:_MOST_NAMES]}" if row else "no column"
        fact = f"{name} has {found}, but no {TOKENS}: tokenize the rows first, or pass a collator that tokenizes them"
        raise ArgumentError("host", fact, {"row": index})
    tokens = _to_integers(row[TOKENS], TOKENS, name)
    columns = {column for column in BY_TOKEN.intersection(row) if row[column] is not None}
    given = {column: _to_integers(row[column], column, name) for column in _VALUED if column in columns}
    for column, values in given.items():
        if values.size != tokens.size:
            fact = f"{name} has {counted(tokens.size, 'token')}, but {counted(values.size, 'value')} of {column}"
            raise ArgumentError("host", fact, {"row": index, "tokens": tokens.size, "values": values.size})
    attention = given.pop(ATTENTION, tokens[:0])
    if attention.size and (hidden := int((attention == 0).sum())):
        fact = f"{name} has padding: {ATTENTION} is 0 at {hidden:,} of its {counted(tokens.size, 'token')}"
        raise ArgumentError("host", f"{fact}: leave padding out of the rows before you plan them", {"row": index})
    several = None if columns <= {TOKENS, LABELS} else _multi_sample_column(row, columns, tokens.size)
    if by := ATTENTION if attention.size and attention.max() > 1 else several:
        fact = f"{name} holds several samples, as its {by} shows: give each sample a row, or they attend to each other"
        raise ArgumentError("host", fact, {"row": index, "column": by})
    labels = given.pop(LABELS, None)
    if labels is None:
        labels = tokens.copy()
        for column in MASKS:
            labels[given.get(column, tokens[:0]) == 0] = IGNORED_LABEL
    types = {column: given[column] for column in TYPE_COLUMNS if column in given}
    kept = {column: row[column] for column in row if column not in BY_TOKEN}
    return _ReadRow({**kept, **types, TOKENS: tokens, LABELS: labels})


def _multi_sample_column(row: Row, columns: Collection[str], num_tokens: int) -> str | None:
    """
    Return the first of *columns* which shows that the row has several samples; None for one sample.
    """
    for column in (*_PACKED, *_NUMBERED):
        if column in columns:
            values = np.asarray(row[column])
            if (values.size > _PACKED[column]) if column in _PACKED else (np.unique(values).size > 1):
                return column
    if POSITIONS not in columns or not num_tokens:
        return None
    places = np.asarray(row[POSITIONS])  # on one axis, or on those of images
    if places.size % num_tokens:
        return POSITIONS
    places = places.reshape(-1, num_tokens)
    restarts = (places[:, 1:] == 0) | (places[:, 1:] < places[:, :-1])
    return POSITIONS if restarts.all(0).any() else None


def _to_integers(values: Any, column: str, name: str) -> NDArray[np.int64]:
    """
    Return a column's values as int64 of shape (tokens,); ArgumentError if they are not whole
    numbers.
    """
    try:
        array = np.asarray(values)
        if array.dtype == np.int64 and array.ndim == 1:  # the most usual
            return array
        whole = array.dtype.kind in "iub" or not array.size
    except (RuntimeError, TypeError, ValueError):  # lists of several lengths, tensors of a GPU
        array, whole = np.empty(0), False
    if not whole or array.shape not in {(array.size,), (1, array.size)}:
        found = f"{array.dtype} and shape {array.shape}" if array.size else type(values).__name__
        fact = f"{name} has {column} of type {found}, but needs whole numbers, one for each token of one sample"
        raise ArgumentError("host", fact, {"column": column})
    return array.reshape(-1).astype(np.int64, copy=False)


def token_type_columns(model: torch.nn.Module) -> tuple[str, ...]:
    """
    Return the columns of token types that are arguments of the model or of one of its modules.
    """
    taken = {name for part in model.modules() for name in inspect.signature(part.forward).parameters}
    return tuple(name for name in TYPE_COLUMNS if name in taken)


def pad_rows(rows: Sequence[Row], *, types: Sequence[str] = (MEDIA_TYPE_IDS,)) -> dict[str, Any]:
    """
    Return a batch of rows that are padded on the right. This function is the default collator.

    Args:
        rows: Tokenized rows; at least one.
        types: Columns of token types that are arguments of the model.

    >>> batch = pad_rows([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
    >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    ([[5, 6, 0], [7, 8, 9]], [[1, 1, 0], [1, 1, 1]])
    """
    rows = [read_row(row) for row in rows]
    lengths = np.array([row[TOKENS].size for row in rows])
    real = np.arange(lengths.max()) < lengths[:, None]
    columns = {TOKENS: 0, LABELS: IGNORED_LABEL}
    columns |= {name: 0 for name in types if any(row.get(name) is not None for row in rows)}
    batch = {name: np.full(real.shape, filler) for name, filler in columns.items()} | {ATTENTION: real.astype(np.int64)}
    for name in columns:
        values = (row.get(name) for row in rows)
        batch[name][real] = np.concatenate(
            [np.zeros(size, np.int64) if one is None else one for one, size in zip(values, lengths, strict=True)]
        )
    return {name: torch.from_numpy(values) for name, values in batch.items()} | join_media(rows)


def count_supervised(labels: torch.Tensor) -> int:
    """
    Return the number of supervised tokens in *labels*, which has the shape (rows, tokens).

    The first token of each row is not counted, since no token predicts it.
    """
    return int((labels[..., 1:] != IGNORED_LABEL).sum())


def join_media(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Return the tensors of images and videos of all rows, joined by name."""
    found: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        for name, value in _media_tensors(row).items():
            found.setdefault(name, []).append(value)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _media_tensors(row: Row) -> dict[str, torch.Tensor]:
    """
    Return the media tensors of a row by name; their first axis counts images, videos or patches.
    """
    return {
        name: torch.as_tensor(value)
        for name, value in row.items()
        if name not in BY_TOKEN and value is not None and _is_tensor_like(value)
    }


def _is_tensor_like(value: Any) -> bool:
    """Return whether a value is an array or tensor of at least one axis, or a list of lists."""
    depth = 0
    while isinstance(value, list | tuple) and value:
        value, depth = value[0], depth + 1
    if isinstance(value, str | bytes | Mapping):
        return False
    return depth > 1 or getattr(value, "ndim", 0) >= 1

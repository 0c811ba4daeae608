"""Data set of a plan's packs, which replaces ms-swift's `PackingDataset`."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, reduce
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from swift.dataset import AddLengthPreprocessor, EncodePreprocessor
from torch.utils.data import Dataset

from packplan.adapters.loaders.packs import PACK, PackOfRows
from packplan.adapters.loaders.rows import UNKNOWN, RowFacts, refuse_other_lengths, tensor_bytes
from packplan.core.batch import IGNORED_LABEL
from packplan.core.errors import DataSetError
from packplan.core.samples.tables import BadRecord
from packplan.core.surface import Plan, plan

ALGORITHMS = {"binpack": "constant_volume", "sequential": "concatenative"}
"""Value of `--packing_strategy` -> name of the packing algorithm."""

Row = dict[str, Any]

_DIGEST, _SUPERVISED = "packplan_digest", "packplan_learned"
"""
Columns that `RowFactsPreprocessor` adds: digest of the encoded row, and number of its supervised
tokens.
"""

_REASON = "packplan_reason"
"""Column with the reason why a row cannot be encoded, which is empty for all other rows."""


class RowFactsPreprocessor(AddLengthPreprocessor):  # type: ignore[misc]  # has no types
    """
    Preprocessor that adds lengths, a digest and the number of supervised tokens to each row. Rows
    that cannot be encoded get the length 0 and the reason, and stay in the data set until
    `take_bad_rows` removes them.
    """

    _strict = True

    def batched_preprocess(self, batched_row: Row, *, strict: bool, **options: Any) -> Row:
        """Preprocess rows; with *strict*, raise the error of the first row that fails."""
        self._strict = strict
        rows: Row = super().batched_preprocess(batched_row, strict=strict, **options)
        return rows

    def preprocess(self, row: Row) -> Row:
        """
        Return the row, not encoded, with its lengths, its digest and its number of supervised
        tokens.
        """
        try:
            encoded, reason = EncodePreprocessor.preprocess(self, row), ""
        except Exception as error:  # whatever ms-swift's templates raise
            if self._strict:
                raise
            encoded, reason = {"lengths": [0]}, f"{type(error).__name__}: {error}"
        digest, supervised = encoded_row_facts(encoded)
        facts = {"lengths": encoded["lengths"], _DIGEST: digest, _SUPERVISED: supervised, _REASON: reason}
        return {**row, **facts}


def take_bad_rows(rows: Any) -> tuple[Any, list[BadRecord]]:
    """
    Return the rows of a data set that ms-swift can encode, or None if there are none, and the other
    rows with their reasons.
    """
    if _REASON not in getattr(rows, "column_names", ()):
        return rows, []
    reasons = rows[_REASON]
    bad = [BadRecord(index, f"row {index + 1:,}", reason, "") for index, reason in enumerate(reasons) if reason]
    kept = [index for index, reason in enumerate(reasons) if not reason]
    rows = rows.remove_columns(_REASON)
    return (rows.select(kept) if bad else rows) if kept else None, bad


def encoded_row_facts(row: Mapping[str, Any]) -> tuple[bytes, int]:
    """
    Return the digest of a row, and its number of supervised tokens.

    A row without labels for its tokens, such as a row that is not encoded, counts as one supervised
    token.
    """
    digest = blake2b(digest_size=16)
    for name, value in sorted(row.items()):
        digest.update(name.encode())
        digest.update(tensor_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode())
    labels = [value for name, value in row.items() if name.endswith("labels") and hasattr(value, "__len__")]
    return digest.digest(), sum(label != IGNORED_LABEL for one in labels for label in one[1:]) if labels else 1


def add_row_facts(rows: Any, lengths: list[int], digests: list[bytes], supervised: list[int]) -> Any:
    """
    Return rows with the columns that `RowFactsPreprocessor` adds, filled with known values.

    Args:
        rows: A `datasets.Dataset`.
        lengths: Number of tokens of each row.
        digests: Digest of 16 bytes for each row. Rows that train differently have different
            digests.
        supervised: Number of supervised tokens of each row.
    """
    facts = {"lengths": lengths, _DIGEST: digests, _SUPERVISED: supervised}
    return reduce(lambda found, name: found.add_column(name, facts[name]), facts, rows)


class PlannedPacks(Dataset[PackOfRows]):
    """
    Packs of an ms-swift data set: item k has the encoded rows of pack k.

    Every process plans by itself, and gets the same packs, since equal lengths give equal packs. A
    row whose length differs from the plan, or that cannot be encoded, raises an error: no other row
    replaces it.
    """

    def __init__(
        self,
        template: Any,
        dataset: Any,
        num_proc: int = 1,  # noqa: ARG002  # ms-swift passes it
        *,
        packing_length: int | None = None,
        packing_strategy: str = "binpack",
        **_: Any,
    ) -> None:
        """
        Plan the packs.

        Args:
            template: Template of ms-swift, which encodes rows.
            dataset: Rows with a column `lengths`: the number of tokens of a sample, or a list with
                a number for each answer of a pair.
            num_proc: Number of processes, which ms-swift passes; not used.
            packing_length: Maximum number of tokens of a pack; None takes the template's
                `max_length`.
            packing_strategy: Value of `--packing_strategy`.
        """
        template.packing = template.padding_free = True
        self._encode: Callable[[Row], Row] | None = None
        if hasattr(dataset, "encode_func"):  # rows that are encoded when they are served
            self._encode, dataset = template.encode, dataset.dataset
        self._rows, self._facts = dataset, None
        if _DIGEST in getattr(dataset, "column_names", ()):
            self._facts = dataset.select_columns([_DIGEST, _SUPERVISED])
            self._rows = dataset.remove_columns([_DIGEST, _SUPERVISED])
        lengths = [count_tokens(length) for length in dataset["lengths"]]
        self.plan: Plan = plan(lengths, packing_length or template.max_length, algorithm=ALGORITHMS[packing_strategy])
        starts = self.plan.packs.offsets[:-1]
        tokens = np.add.reduceat(self.plan.lengths[self.plan.packs.indices], starts)
        self.packed_length: list[int] = tokens.tolist()

    @cached_property
    def facts(self) -> RowFacts:
        """
        Digest and number of supervised tokens of each row.

        For a data set that ms-swift has cached with lengths, the facts describe the stored rows.
        """
        kept = self._facts
        own = map(encoded_row_facts, self._rows) if kept is None else zip(kept[_DIGEST], kept[_SUPERVISED], strict=True)
        return RowFacts.from_rows((digest, supervised, UNKNOWN) for digest, supervised in own)

    def __len__(self) -> int:
        return len(self.plan.packs)

    def __getitem__(self, item: int) -> PackOfRows:
        """
        Return the encoded rows of a pack.

        Raises:
            StaleError: The length of a row differs from its planned length.
            DataSetError: A row cannot be encoded any more.
        """
        return PackOfRows([self._encode_row(index) for index in self.plan.packs[item]], item)

    def _encode_row(self, index: int) -> Row:
        row: Row = self._rows[index]
        if self._encode is not None:
            try:
                row = self._encode(row, return_length=True)  # type: ignore[call-arg]  # of ms-swift's template
            except Exception as error:
                message = f"row {index:,} of the data set was measured, but cannot be encoded now: {error}"
                raise DataSetError(message) from error
        refuse_other_lengths({index: int(self.plan.lengths[index])}, [count_tokens(row["lengths"])])
        return row


def count_tokens(lengths: int | Sequence[int]) -> int:
    """Return the number of tokens of a row, from its length or the lengths of its sequences."""
    return lengths if isinstance(lengths, int) else sum(lengths)


class PackCollator:
    """Wrapper of ms-swift's collator that adds the pack indices of a batch under the key `PACK`."""

    def __init__(self, collate: Callable[[list[Any]], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, packs: list[PackOfRows]) -> dict[str, Any]:
        """Return the model's inputs for a batch of packs, and the pack indices under `PACK`."""
        indices = [rows.pack for rows in packs]
        return {**self._collate(list(packs)), PACK: indices}

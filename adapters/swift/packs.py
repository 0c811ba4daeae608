"""The data set of a plan's packs, in the place of ms-swift's `PackingDataset`."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from swift.dataset import AddLengthPreprocessor, EncodePreprocessor
from torch.utils.data import Dataset

from packplan.adapters.loaders.rows import IGNORED_LABEL, PACK, PackOfRows, RowFacts, refuse_other_length, tensor_bytes
from packplan.core.errors import DataSetError
from packplan.core.surface import Plan, plan

ALGORITHMS = {"binpack": "constant_volume", "sequential": "concatenative"}
"""`--packing_strategy` -> name of the algorithm of a plan."""

Row = dict[str, Any]


_DIGEST, _LEARNED = "packplan_digest", "packplan_learned"
"""Columns of the facts of each row, where ms-swift encodes the rows to measure them."""


class AddFacts(AddLengthPreprocessor):  # type: ignore[misc]  # has no types
    """Step of ms-swift that measures rows, and here also notes the facts of each."""

    def preprocess(self, row: Row) -> Row:
        """Return a row with its lengths and facts."""
        encoded = EncodePreprocessor.preprocess(self, row)
        digest, learned = facts_of(encoded)
        return {**row, "lengths": encoded["lengths"], _DIGEST: digest, _LEARNED: learned}


def facts_of(row: Mapping[str, Any]) -> tuple[bytes, int]:
    """
    Return digest and learned tokens of a row.

    A row that is not encoded, or has no labels by token, counts as one that teaches a token.
    """
    digest = blake2b(digest_size=16)
    for name, value in sorted(row.items()):
        digest.update(name.encode())
        digest.update(tensor_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode())
    labels = [value for name, value in row.items() if name.endswith("labels") and hasattr(value, "__len__")]
    return digest.digest(), sum(label != IGNORED_LABEL for one in labels for label in one[1:]) if labels else 1


class PlannedPacks(Dataset[PackOfRows]):
    """
    Packs of all samples of a data set of ms-swift: item k has the encoded rows of pack k.

    Every process plans by itself, since equal lengths give equal packs. A row that is not as long
    as it was planned, or that cannot be encoded, is an error: none is replaced by another one.
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
            dataset: Rows with their `lengths`: of a sample, or of each half of a pair.
            num_proc: Not used.
            packing_length: Tokens of a pack; None takes the template's `max_length`.
            packing_strategy: `--packing_strategy`.
        """
        template.packing = template.padding_free = True
        self._encode: Callable[[Row], Row] | None = None
        if hasattr(dataset, "encode_func"):  # rows that are encoded when they are served
            self._encode, dataset = template.encode, dataset.dataset
        self._rows, self._facts = dataset, None
        if _DIGEST in getattr(dataset, "column_names", ()):
            self._facts = dataset.select_columns([_DIGEST, _LEARNED])
            self._rows = dataset.remove_columns([_DIGEST, _LEARNED])
        lengths = [sum_of(length) for length in dataset["lengths"]]
        self.plan: Plan = plan(lengths, packing_length or template.max_length, algorithm=ALGORITHMS[packing_strategy])
        self.packed_idx: list[list[int]] = self.plan.packs.tolist()
        starts = self.plan.packs.offsets[:-1]
        tokens = np.add.reduceat(self.plan.lengths[self.plan.packs.indices], starts)
        self.packed_length: list[int] = tokens.tolist()

    @cached_property
    def facts(self) -> RowFacts:
        """Identity of the rows, encoded unless they were measured elsewhere; what they teach."""
        if self._facts is None:
            return RowFacts.join(map(facts_of, self._rows))
        return RowFacts.join(zip(self._facts[_DIGEST], self._facts[_LEARNED], strict=True))

    def __len__(self) -> int:
        return len(self.packed_idx)

    def __getitem__(self, item: int) -> PackOfRows:
        """Return the rows of a pack; an error names a row that is not the planned one."""
        return PackOfRows([self._row(index) for index in self.packed_idx[item]], item)

    def _row(self, index: int) -> Row:
        row: Row = self._rows[index]
        if self._encode is not None:
            try:
                row = self._encode(row, return_length=True)  # type: ignore[call-arg]  # of ms-swift's template
            except Exception as error:
                message = f"row {index:,} of the data set was measured, but cannot be encoded now: {error}"
                raise DataSetError(message) from error
        refuse_other_length(index, int(self.plan.lengths[index]), sum_of(row["lengths"]))
        return row


def sum_of(length: int | Sequence[int]) -> int:
    """Return the tokens of a row: those of a sample, or of all halves of a pair."""
    return length if isinstance(length, int) else sum(length)


class PackCollator:
    """Collator of ms-swift that also gives the indices of a batch's packs, as `PACK`."""

    def __init__(self, collate: Callable[[list[Any]], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, packs: list[PackOfRows]) -> dict[str, Any]:
        """Return the inputs of the model for a batch of packs."""
        indices = [rows.pack for rows in packs]
        return {**self._collate(list(packs)), PACK: indices}

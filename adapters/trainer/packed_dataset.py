"""Map-style data set whose items are packs."""

from __future__ import annotations

from typing import Any, Protocol

import attrs
from torch.utils.data import Dataset

from packplan.core.errors import PackplanError
from packplan.core.packs import Packs
from packplan.core.samples import Table

Sample = dict[str, Any]


@attrs.frozen
class EncodedPack:
    """Pack of encoded samples, ready to be collated."""

    position: int
    """Index in the raw plan."""

    samples: list[Sample]


class Samples(Protocol):
    """Source of encoded samples that compares them with the plan."""

    def fetch(self, index: int, planned: Table, /) -> Sample:
        """Return sample *index*, encoded; StaleError if it is not the one that was planned."""


class PackedDataset(Dataset[EncodedPack | PackplanError]):
    """
    Packs of encoded samples: `len` is the number of packs, and item k is pack k of the raw plan.

    An error is returned, not raised. Raised in a loader's worker process, it would lose its type
    and fields. The loader raises it.
    """

    def __init__(self, samples: Samples, packs: Packs, planned: Table, *, grouped: bool = True) -> None:
        """
        Serve *packs*.

        Args:
            samples: Source of the samples.
            packs: Sample indices of each item.
            planned: Measurements of all records, which each fetched one is compared with.
            grouped: Packs are collated as packs; if not, every pack has one sample, and batches are
                padded.
        """
        self.samples, self.packs, self.planned, self.grouped = samples, packs, planned, grouped

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, position: int) -> EncodedPack | PackplanError:
        """Return the encoded samples of one pack, or an error."""
        try:
            return EncodedPack(position, [self.samples.fetch(index, self.planned) for index in self.packs[position]])
        except PackplanError as error:
            return error

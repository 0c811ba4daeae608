"""A map-style data set whose items are packs, and the loader that serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from swift.dataloader import DataLoaderShard
from torch.utils.data import Dataset

from core.errors import PackplanError
from core.packs import Packs
from core.samples import Table

Sample = dict[str, Any]

Item = list[Sample] | Sample | PackplanError


class Samples(Protocol):
    """Encodes samples, and compares them with the plan."""

    def fetch(self, index: int, planned: Table, /) -> Sample:
        """Return sample *index*, encoded; ContractError if it is not the one that was planned."""


class PackedDataset(Dataset[Item]):
    """
    Packs of encoded samples: `len` is the number of packs, item k is pack k.

    An error is returned, not raised: raised in a loader's worker process it would lose its type and its fields.
    The loader raises it.
    """

    def __init__(self, samples: Samples, packs: Packs, planned: Table, *, grouped: bool = True) -> None:
        """
        Serve *packs*.

        Args:
            samples: Where samples come from.

            packs: Sample indices of each item.

            planned: Measurements of all samples, which each fetched one is compared with.

            grouped: Items are lists of samples; if not, every pack has one sample, and that is the item.
        """
        self.samples, self.packs, self.planned, self.grouped = samples, packs, planned, grouped

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, position: int) -> Item:
        """Return the encoded samples of one pack, or what went wrong."""
        try:
            pack = [self.samples.fetch(index, self.planned) for index in self.packs[position]]
        except PackplanError as error:
            return error
        return pack if self.grouped else pack[0]


def passing_errors(collate: Callable[[list[Any]], dict[str, Any]]) -> Callable[[list[Item]], Any]:
    """Return *collate*, made to hand on the first error among its items."""

    def collated(items: list[Item]) -> Any:
        failed = next((item for item in items if isinstance(item, PackplanError)), None)
        return failed if failed is not None else collate(items)

    return collated


class PackLoader(DataLoaderShard):
    """ms-swift's sharded loader, which raises the errors that a data set returns."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            if isinstance(batch, PackplanError):
                raise batch
            yield batch

"""Stream of training samples: the records of a data set, in an order of each epoch."""

from collections.abc import Iterator, Sequence

from packplan.adapters.samples.encoder import SwiftEncoder
from packplan.adapters.trainer.packed_dataset import Sample
from packplan.core.stream import Item, Order


class RecordStream:
    """Encoded records of a data set, in an order of each epoch."""

    def __init__(self, samples: SwiftEncoder, order: Order) -> None:
        self._encoded, self._order, self._indices = samples, order, order(0)

    def __len__(self) -> int:
        """Return the number of samples of the epoch."""
        return len(self._indices)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of *epoch* from now on."""
        self._indices = self._order(epoch)

    def items(self, places: Sequence[int]) -> Iterator[tuple[int, Sequence[Item]]]:
        """Yield the records of some places, one by one."""
        for place in places:
            yield 1, (Item(place),)

    def name(self, item: Item) -> str:
        """Return the place of an item's record."""
        return str(self._encoded.records.where(int(self._indices[item.place])))

    def encode(self, item: Item) -> Sample:
        """Return an encoded item."""
        return self._encoded.encode(int(self._indices[item.place]))

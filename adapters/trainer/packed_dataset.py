"""Map-style data set whose items are packs."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch.utils.data import Dataset

from packplan.adapters.loaders.rows import PackOfRows
from packplan.core.errors import PackplanError
from packplan.core.packs import Packs
from packplan.core.samples import Table

Sample = dict[str, Any]


class Samples(Protocol):
    """Source of encoded samples that compares them with the plan."""

    def fetch(self, index: int, planned: Table, /) -> Sample:
        """Return sample *index*, encoded; StaleError if it is not the one that was planned."""


class PackedDataset(Dataset[PackOfRows | PackplanError]):
    """
    Packs of encoded samples: `len` is the number of packs, and item k is pack k of the raw plan.

    An error is returned, not raised. Raised in a loader's worker process, it would lose its type
    and fields. The loader raises it.
    """

    def __init__(
        self, samples: Samples, packs: Packs, planned: Table, *, grouped: bool = True, num_packs: int | None = None
    ) -> None:
        """
        Serve *packs*.

        Args:
            samples: Source of the samples.
            packs: Sample indices of each item; none where each epoch has a plan of its own, whose
                packs are asked for by index and samples.
            planned: Measurements of all records, which each fetched one is compared with.
            grouped: Packs are collated as packs; if not, every pack has one sample, and batches are
                padded.
            num_packs: Length of the data set; None takes the number of *packs*.
        """
        self.samples, self.packs, self.planned, self.grouped = samples, packs, planned, grouped
        self._num_packs = len(packs) if num_packs is None else num_packs

    def __len__(self) -> int:
        return self._num_packs

    def __getitem__(self, pack: int | tuple[int, Sequence[int]]) -> PackOfRows | PackplanError:
        """
        Return the encoded samples of one pack, or an error.

        Args:
            pack: Index of the pack; with its samples, where the epochs have plans of their own: the
                processes of a loader do not know these.
        """
        return self.encoded(pack, self.packs[pack]) if isinstance(pack, int) else self.encoded(*pack)

    def encoded(self, position: int, samples: Sequence[int]) -> PackOfRows | PackplanError:
        """
        Return the encoded samples of a pack, or an error.

        Args:
            position: Index of the pack in its raw plan.
            samples: Samples of the pack.
        """
        try:
            return PackOfRows([self.samples.fetch(index, self.planned) for index in samples], position)
        except PackplanError as error:
            return error

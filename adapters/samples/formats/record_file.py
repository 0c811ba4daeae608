"""Records of one file, whatever its format, and the digests by which they are known again."""

import logging
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.adapters.progress import BRIEF_S, progress
from packplan.adapters.samples.formats.kept import KeptFacts, audited
from packplan.core.samples import DIGEST_BYTES, Where, digest_of

log = logging.getLogger(__name__)


@attrs.frozen
class Named:
    """How a file is spoken of: under the name that the user gave it, wherever its text is."""

    name: str

    folder: str
    """Where relative media of its records start."""

    copy: str | None = None
    """The copy that is read in the file's place; None if the file itself is read."""


class RecordFile:
    """
    Records of one file; a format says where they are, and how they are read.

    Attributes:
        named: Name and folder of the file.
        facts: Facts beside the places of records, as JSON has them.
    """

    unit = "row"

    named: Named
    facts: dict[str, Any]

    _kept: KeptFacts
    _digests: NDArray[np.uint8] | None = None

    def __len__(self) -> int:
        """Return the number of records."""
        raise NotImplementedError

    def __getitem__(self, row: int) -> Any:
        """Return a record's JSON value; RecordError naming where it stands if there is none."""
        raise NotImplementedError

    def _digest(self, row: int) -> bytes:
        """Return the digest of a record, which is read for it."""
        raise NotImplementedError

    def where(self, row: int) -> Where:
        """Return the place of a record."""
        return Where(self.named.name, row + 1, self.unit)

    @property
    def num_with_media_tags(self) -> int:
        """Number of records that say <video> or <audio> without such media."""
        return int(self.facts["num_with_media_tags"])

    @property
    def changed(self) -> bool:
        """Whether the file, which is no copy, is not on disk as it was when it was opened."""
        return self.named.copy is None and self._kept.changed()

    @property
    def knows_digests(self) -> bool:
        """Whether no record has to be read for its digest."""
        return self._digests is not None

    def digests(self, start: int, stop: int) -> bytes:
        """Return the digests of the records from *start* to before *stop*, one behind the other."""
        if self._digests is not None:
            return self._digests[start:stop].tobytes()
        return b"".join(map(self._digest, range(start, stop)))

    def digest_of(self, _: int, value: Any) -> bytes:
        """Return the digest of a record that was read, by its JSON value where that decides it."""
        return digest_of(value)

    def _restore(self, facts: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bool:
        """Take what an earlier start found, if some records are still those; return whether."""
        self.facts, self._digests = facts, arrays["digests"].reshape(-1, DIGEST_BYTES)
        compared = audited(len(self) if self.named.copy is None else 0)
        if len(self._digests) == len(self) and all(map(self._is_kept, compared)):
            return True
        log.warning("%s is another file than its size and times say: it is read again", self.named.name)
        self._kept.discard()
        self._digests = None
        return False

    def _is_kept(self, row: int) -> bool:
        """Return whether a record is the one whose digest is kept."""
        return self._digests is not None and self._digest(row) == self._digests[row].tobytes()

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that are kept beside the digests."""
        return {}

    def keep(self, digests: NDArray[np.uint8]) -> None:
        """Keep the digests of all records for later starts; shape (num_records, DIGEST_BYTES)."""
        if self._kept.save(self.facts, {**self._arrays(), "digests": digests.reshape(-1)}):
            self._digests = digests

    def kept_fault(self) -> str | None:
        """Return the difference of all of the file from the kept facts; None if there is none."""
        rows = range(len(self) if self.knows_digests else 0)
        for row in progress(rows, desc=f"comparing {self.named.name}", leave=False, delay=BRIEF_S):
            if not self._is_kept(row):
                place = f"{self.unit} {self.where(row).number:,}"
                delete = self.named.copy or "that"
                return f"{place} is another one than {self._kept.where} says: delete {delete}, and build again"
        return None

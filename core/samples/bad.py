"""A record that cannot become a sample."""

from __future__ import annotations

import attrs


@attrs.frozen
class BadRecord:
    """Why a record is no sample, kept with its row, which is flagged."""

    index: int
    """Index of the record in the data, from 0."""

    where: str
    """File of the record, and its line or row there, as `core.samples.Where` prints it."""

    reason: str
    """Reason why it cannot become a sample."""

    sha256: str
    """Digest of its content: a record that changed since is measured again."""

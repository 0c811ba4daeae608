"""A record that is left out of the samples, since it cannot become one."""

from __future__ import annotations

import attrs


@attrs.frozen
class BadRecord:
    """What a store keeps of a record that was left out, so that every start leaves it out."""

    number: int
    """Position among all records of the data, from 0."""

    where: str
    """Place of the record, as `core.samples.Place` prints it."""

    reason: str
    """Why it cannot become a sample."""

    sha256: str
    """Digest of its content: a record that was fixed is no longer left out."""

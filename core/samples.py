"""What is measured of each sample, kept with the plan, and compared when the sample is fetched."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from core.errors import Difference


@attrs.frozen
class Measurement:
    """One sample, as its template encodes it."""

    length: int
    """Tokens that the forward pass consumes, image tokens included."""

    supervised: int
    """Tokens that the loss counts: labels other than the ignored one, the first position aside."""

    images: int

    patches: int
    """Vision patches of all images together, before merging."""

    cut: bool = False
    """Whether the template truncated it."""

    def differences(self, fetched: Measurement) -> tuple[Difference, ...]:
        """Return in what the fetched sample differs from this, the planned one."""
        pairs = zip(attrs.astuple(self), attrs.astuple(fetched), COLUMNS, strict=True)
        return tuple(Difference(name, planned, found) for planned, found, name in pairs if planned != found)


COLUMNS = tuple(field.name for field in attrs.fields(Measurement))
"""The columns of a table of measurements, in order."""

Table = NDArray[np.int32]
"""Measurements of many samples: int32 of shape (num_samples, len(COLUMNS))."""


def to_row(measurement: Measurement) -> tuple[int, ...]:
    """Return the measurement as a row of a table."""
    return tuple(map(int, attrs.astuple(measurement)))


def from_row(table: Table, index: int) -> Measurement:
    """Return sample *index* of a table."""
    length, supervised, images, patches, cut = table[index].tolist()
    return Measurement(length, supervised, images, patches, bool(cut))


def column(table: Table, name: str) -> NDArray[np.int32]:
    """Return one column of a table; shape (num_samples,)."""
    return table[:, COLUMNS.index(name)]

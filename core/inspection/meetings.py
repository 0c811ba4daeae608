"""Meetings: how often a pair of samples shares a pack in two plans."""

from __future__ import annotations

import attrs
import numpy as np

from packplan.core.lengths import IntArray
from packplan.core.packs import Packs


@attrs.frozen
class Meetings:
    """
    Pairs of samples that share a pack in two plans.

    Samples that only one plan has are left out. One that occurs more than once in a plan counts
    once, in its first pack.
    """

    pairs: int
    """Pairs that share a pack in the first plan."""

    pairs_again: int
    """Pairs that share a pack in both plans."""

    expected: float
    """
    Expected number of pairs in both, if the second plan grouped the same samples at random into
    packs of its sizes.
    """


def meetings(first: Packs, second: Packs) -> Meetings:
    """
    Count the pairs of samples that share a pack in both plans.

    >>> meetings(Packs.from_lists([[0, 1, 2], [3]]), Packs.from_lists([[0, 1], [2, 3]]))
    Meetings(pairs=3, pairs_again=1, expected=1.0)
    """
    num_records = 1 + int(max(packs.indices.max(initial=-1) for packs in (first, second)))
    packs_of = np.stack([_first_owners(packs, num_records) for packs in (first, second)])
    one, other = packs_of[:, (packs_of >= 0).all(axis=0)]
    pairs, pairs_of_second = _num_pairs(one), _num_pairs(other)
    possible = one.size * (one.size - 1) // 2
    return Meetings(
        pairs=pairs,
        pairs_again=_num_pairs(one * len(second) + other),
        expected=pairs * pairs_of_second / possible if possible else 0.0,
    )


def _first_owners(packs: Packs, num_records: int) -> IntArray:
    """Return the first pack of each record, -1 for none; shape (num_records,)."""
    owners = np.full(num_records, -1, dtype=np.int64)
    # Assigned back to front: the first of several packs is written last, and stays.
    owners[packs.indices[::-1]] = np.repeat(np.arange(len(packs)), packs.sizes())[::-1]
    return owners


def _num_pairs(labels: IntArray) -> int:
    """Return the number of pairs of equal labels."""
    counts = np.unique(labels, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())

"""Metrics of packs: utilisation, waste, balance, efficiency, and the gap to the lower bound."""

from __future__ import annotations

from fractions import Fraction
from math import exp, lgamma, sqrt

import attrs
import numpy as np

from packplan.core.bounds import effort_for_bound, lower_bound
from packplan.core.errors import ArgumentError
from packplan.core.lengths import Lengths, as_lengths, as_whole_number
from packplan.core.packs import AnyPacks, as_packs


@attrs.frozen
class PackingMetrics:
    """Exact sums over packs, and their utilisation, balance, efficiency and gap."""

    num_packs: int

    num_tokens: int

    lower_bound: int
    """Lower bound on the number of packs: no packing has fewer."""

    packs_by_tokens: int
    """Number of packs if all packs were full: `ceil(tokens / capacity)`."""

    sum_of_fills: Fraction
    """Sum of `load / capacity` over all packs."""

    sum_of_squared_fills: Fraction
    """Sum of `(load / capacity)**2` over all packs."""

    @property
    def utilisation(self) -> float:
        """Mean fill: tokens divided by the capacity of all packs."""
        return float(self.sum_of_fills / self.num_packs)

    @property
    def waste_ratio(self) -> float:
        """Share of the capacity of all packs that no token fills: `1 - utilisation`."""
        return float(1 - self.sum_of_fills / self.num_packs)

    @property
    def balance(self) -> float:
        """
        `1 - stdev(load / capacity) / utilisation` over all packs; 1 if all packs are equally full.
        """
        mean = self.sum_of_fills / self.num_packs
        return 1 - sqrt(self.sum_of_squared_fills / self.num_packs - mean**2) / float(mean)

    @property
    def efficiency(self) -> float:
        """`packs_by_tokens` divided by the number of packs; 1 is ideal."""
        return self.packs_by_tokens / self.num_packs

    @property
    def gap(self) -> float:
        """
        Number of packs above the lower bound, divided by the bound; 0 proves that no packing of the
        same samples has fewer packs.
        """
        return (self.num_packs - self.lower_bound) / self.lower_bound

    def __add__(self, other: PackingMetrics) -> PackingMetrics:
        """Return the combined metrics of two separately packed sets of samples."""
        return PackingMetrics(*(a + b for a, b in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


def packing_metrics(lengths: Lengths, packs: AnyPacks, *, capacity: int, bound: int | None = None) -> PackingMetrics:
    """
    Return the metrics of packs, with a lower bound on their number.

    Args:
        lengths: Number of tokens of each sample, >= 1.
        packs: Packs to measure, or a plan that contains packs; at least one pack.
        capacity: Maximum number of tokens in a pack, >= 1.
        bound: Lower bound on the number of packs. None searches for a bound, which takes about as
            long as packing. A sample over the capacity counts as a pack by itself, and a sample in
            several packs is searched once.

    Raises:
        ArgumentError: There is no pack, a pack has a sample without a length, or a pack of several
            samples exceeds the capacity.

    >>> packing_metrics([60, 20, 50], [[0, 1], [2]], capacity=80).efficiency
    1.0
    """
    capacity = as_whole_number("capacity", capacity)
    array = as_lengths(lengths)
    packs = as_packs(packs)
    if not len(packs):
        raise ArgumentError("argument", "there is no pack to measure")
    if int(packs.indices.max()) >= array.size:
        message = f"sample {int(packs.indices.max())} is in a pack, but there are {array.size} lengths"
        raise ArgumentError("argument", message)
    loads = packs.loads(array)
    if (over := (loads > capacity) & (packs.sizes() > 1)).any():
        first = int(over.argmax())
        message = f"pack {first} has several samples and {loads[first]:,} tokens, but the capacity is {capacity:,}"
        raise ArgumentError("argument", message)
    if bound is None:
        packed = array[np.flatnonzero(np.bincount(packs.indices))]
        fitting = packed[packed <= capacity]
        effort = effort_for_bound(packed.size)
        found = lower_bound(fitting, capacity=capacity, known=len(packs), effort=effort)
        bound = packed.size - fitting.size + found
    different, times = np.unique(loads, return_counts=True)
    counted = list(zip(different.tolist(), times.tolist(), strict=True))
    num_tokens = int(loads.sum())
    return PackingMetrics(
        num_packs=loads.size,
        num_tokens=num_tokens,
        lower_bound=as_whole_number("bound", bound),
        packs_by_tokens=-(-num_tokens // capacity),
        sum_of_fills=Fraction(num_tokens, capacity),
        sum_of_squared_fills=Fraction(sum(load**2 * times for load, times in counted), capacity**2),
    )


def padded_positions(lengths: Lengths, *, batch_size: int) -> float:
    """
    Return the expected number of token positions, padding included, in randomly drawn padded
    batches.

    The longest of b samples out of n is among the k shortest with probability C(k, b) / C(n, b).
    The mean over all possible draws is therefore exact if *batch_size* divides the number of
    samples. Otherwise, the samples of a smaller last batch count as if they were padded in a full
    batch.

    Args:
        lengths: Number of tokens of each sample, >= 1; at least one.
        batch_size: Number of samples in a batch, >= 1. Each sample is padded to the longest sample
            of its batch.

    >>> round(padded_positions([1, 1, 4, 4], batch_size=2), 9)
    14.0
    """
    different, times = np.unique(as_lengths(lengths), return_counts=True)
    total = int(times.sum())
    drawn = min(as_whole_number("batch_size", batch_size), total)
    longest, below = 0.0, 0.0
    for length, up_to in zip(different.tolist(), np.cumsum(times).tolist(), strict=True):
        until = _binomial_quotient(up_to, total, drawn)
        longest += length * (until - below)
        below = until
    return total * longest


def _binomial_quotient(part: int, total: int, drawn: int) -> float:
    """
    Return C(part, drawn) / C(total, drawn), by logarithms since both binomials are too large for
    floats.
    """
    if part < drawn:
        return 0.0
    if part == total:
        return 1.0
    return exp(lgamma(part + 1) - lgamma(part - drawn + 1) - lgamma(total + 1) + lgamma(total - drawn + 1))

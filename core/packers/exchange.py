"""
Exchanges of samples between packs, so that packs fit the capacity or have equal work.

A part of a pack is a single sample, or up to four of its samples drawn at random. All parts of all
packs are sorted by tokens. In each round, every part is compared with the part a random number of
places further on. The two parts have about the same number of tokens, so that packs usually stay
within the capacity when the parts are swapped. The most useful exchanges of a round are made
together, at most one for each pack.

Random numbers come from one stream, all arithmetic uses integers, and the search is limited by
rounds instead of time. The packs are therefore the same on every machine.
"""

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray
from packplan.core.packs import join_ranges

_SAMPLE_ROUNDS = {True: 60, False: 6}
"""
Maximum number of rounds that exchange single samples: True for levelling work, False for making
packs fit.
"""

_CYCLES = (20, 60)
"""
Smallest and largest limit on how often parts are drawn. To level work, the limit follows from
`_DRAWS`, because packs of many samples need few draws. To make packs fit, the largest limit is
used.
"""

_DRAWS = 150
"""
The maximum number of draws to level work is this number, divided by the mean number of samples in a
pack. The quotient is limited to the range of `_CYCLES`.
"""

_ROUNDS_OF_A_CYCLE = (4, 16)
"""
Minimum and maximum number of rounds with the parts of one draw. Once a pack has changed, its drawn
parts are no longer valid.
"""

_PARTS, _SAMPLES_OF_A_PART = 4, 4
"""
Number of parts drawn from each pack, and maximum number of samples in a part. A part may be empty.
"""

_PLACES = 11
"""Two compared parts are at most two to the power of this number places apart."""

_TOLERANCE, _GAIN = 1000, 4000
"""
Divisors of the mean work. A pack is level if its work differs from the mean by at most a thousandth
of the mean. An exchange has to gain more than one 4,000th of the mean.
"""

_IDLE_ROUNDS, _IDLE_ROUNDS_OF_A_CYCLE, _IDLE_CYCLES, _SLOW = 30, 6, 12, 1000
"""
Limits that end parts of the search. The first two are the maximum numbers of consecutive rounds
without an exchange, of single samples and of the same parts. The third is the maximum number of
consecutive draws without a gain. The last number defines a gain: the draw reduces the excess by
more than a thousandth.
"""

_FEW, _MANY = 500, 8
"""
Divisors of the number of packs. A search that need not reach all packs ends when at most one pack
in 500 must change. Parts are drawn again when more than one pack in 8 has changed, but not before
four rounds (`_ROUNDS_OF_A_CYCLE`).
"""


@attrs.frozen(eq=False)
class _Parts:
    """
    Parts of packs, sorted by tokens; the samples of a part move together. Arrays have shape
    (num_parts,).
    """

    packs: IntArray
    tokens: IntArray
    works: IntArray

    first: IntArray
    """Start of each part in a list of samples, in which the samples of a part are neighbours."""

    stop: IntArray


@attrs.define(eq=False)
class ExchangeSearch:
    """Packs, and a search that changes them in place by swapping samples between pairs of packs."""

    tokens: IntArray
    """Number of tokens of each sample; shape (num_samples,)."""

    works: IntArray
    """Work of each sample, as integers; shape (num_samples,)."""

    labels: IntArray
    """Pack of each sample, updated by each exchange; shape (num_samples,)."""

    num: int
    """Number of packs."""

    capacity: int
    """Maximum number of tokens in a pack."""

    loads: IntArray = attrs.field(init=False)
    sums: IntArray = attrs.field(init=False)
    """Tokens (`loads`) and work (`sums`) of each pack; shape (num,)."""
    _mean: int = attrs.field(init=False)
    _stream: np.random.PCG64 = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.loads, self.sums = (np.zeros(self.num, dtype=np.int64) for _ in range(2))
        np.add.at(self.loads, self.labels, self.tokens)
        np.add.at(self.sums, self.labels, self.works)
        self._mean = int(self.sums.sum()) // self.num
        self._stream = np.random.PCG64(self.tokens.size)

    def exchange_until_fitting(self, *, nearly: bool = False) -> bool:
        """
        Exchange samples until no pack exceeds the capacity; return whether that succeeded.

        Args:
            nearly: Whether to stop when at most one pack in 500 exceeds the capacity.
        """
        self._exchange(level=False, few=self.num // _FEW if nearly else 0)
        return bool(self.loads.max() <= self.capacity)

    def level(self) -> None:
        """
        Exchange samples until nearly all packs are level, or until exchanges hardly help any more.

        All packs have to be within the capacity before the call.
        """
        self._exchange(level=True, few=self.num // _FEW)

    def _exchange(self, *, level: bool, few: int) -> None:
        """
        Exchange single samples, then parts, until at most *few* packs must change or a limit is
        reached.
        """
        singles = _stable_argsort(self.tokens)
        idle = 0
        for _ in range(_SAMPLE_ROUNDS[level]):
            if idle == _IDLE_ROUNDS or not self._must_change(level=level).any():
                break
            idle = 0 if self._exchange_samples(singles, level=level) else idle + 1
        least, most = _CYCLES
        cycles = max(least, min(most, _DRAWS * self.num // self.tokens.size)) if level else most
        idle = 0
        for _ in range(cycles):
            if idle == _IDLE_CYCLES or self._must_change(level=level).sum() <= few:
                break
            before = self._excess(level=level)
            self._draw_and_exchange(level=level)
            idle = 0 if self._excess(level=level) < before - before // _SLOW else idle + 1

    def _draw_and_exchange(self, *, level: bool) -> None:
        """Draw parts, and exchange parts as long as that helps."""
        order, parts = self._draw_parts()
        touched = np.zeros(self.num, dtype=bool)
        least, most = _ROUNDS_OF_A_CYCLE
        idle = 0
        for number in range(most):
            idle = 0 if self._exchange_parts(order, parts, touched, level=level) else idle + 1
            if idle == _IDLE_ROUNDS_OF_A_CYCLE or (number + 1 >= least and touched.sum() > self.num // _MANY):
                break

    def _excess(self, *, level: bool) -> int:
        """
        Return the excess of all packs. If *level*, the excess is the sum of the deviations from the
        mean work. If not, it is the sum of the tokens above the capacity.
        """
        excess = np.abs(self.sums - self._mean) if level else np.maximum(self.loads - self.capacity, 0)
        return int(excess.sum())

    def _must_change(self, *, level: bool) -> NDArray[np.bool_]:
        """
        Return whether each pack must change; shape (num,). If *level*, packs with work that is not
        near the mean must change. If not, packs that exceed the capacity must change.
        """
        if level:
            return np.abs(self.sums - self._mean) > self._mean // _TOLERANCE
        return self.loads > self.capacity

    def _exchange_samples(self, singles: IntArray, *, level: bool) -> bool:
        """Exchange single samples; return whether any were exchanged."""
        parts = _Parts(self.labels[singles], self.tokens[singles], self.works[singles], singles, singles + 1)
        return self._exchange_parts(np.arange(singles.size), parts, np.zeros(self.num, dtype=bool), level=level)

    def _exchange_parts(self, order: IntArray, parts: _Parts, touched: NDArray[np.bool_], *, level: bool) -> bool:
        """Exchange parts, which are ranges of *order*; return whether any were exchanged."""
        low, high = self._choose_exchanges(parts, touched, level=level)
        if not low.size:
            return False
        self._update_totals(parts, low, high)
        for moved, to in ((low, parts.packs[high]), (high, parts.packs[low])):
            sizes = (parts.stop - parts.first)[moved]
            self.labels[order[join_ranges(sizes, starts=parts.first[moved])]] = np.repeat(to, sizes)
            touched[to] = True
        return True

    def _update_totals(self, parts: _Parts, low: IntArray, high: IntArray) -> None:
        """Update the tokens and the work of packs after parts *low* and *high* were exchanged."""
        more, harder = parts.tokens[high] - parts.tokens[low], parts.works[high] - parts.works[low]
        to, of = parts.packs[low], parts.packs[high]
        self.loads[to] += more
        self.loads[of] -= more
        self.sums[to] += harder
        self.sums[of] -= harder

    def _choose_exchanges(self, parts: _Parts, touched: NDArray[np.bool_], *, level: bool) -> tuple[IntArray, IntArray]:
        """
        Return pairs of parts to exchange, at most one pair for each pack. The second part of a pair
        has at least as many tokens as the first.
        """
        low, high = self._draw_candidates(parts, touched, level=level)
        if not low.size:
            return low, high
        to, of = parts.packs[low], parts.packs[high]
        more = parts.tokens[high] - parts.tokens[low]
        if level:
            gap = self.sums[of] - self.sums[to]
            gain = np.abs(gap) - np.abs(gap - 2 * (parts.works[high] - parts.works[low]))
            useful = (gain > self._mean // _GAIN) & (self.loads[to] + more <= self.capacity)
        else:
            over = np.maximum(self.loads - self.capacity, 0)
            left = np.maximum(self.loads[to] + more - self.capacity, 0)
            left += np.maximum(self.loads[of] - more - self.capacity, 0)
            gain = over[to] + over[of] - left
            useful = gain > 0
        (helps,) = (useful & (to != of)).nonzero()
        if not helps.size:  # as in most rounds over few packs
            return low[:0], high[:0]
        helps = helps[np.argsort(-gain[helps], kind="stable")]
        to, of, number = to[helps], of[helps], np.arange(helps.size)
        # The first exchange in this order that involves a pack is its most useful one.
        first = np.full(self.num, helps.size)
        np.minimum.at(first, to, number)
        np.minimum.at(first, of, number)
        made = helps[(first[to] == number) & (first[of] == number)]
        return low[made], high[made]

    def _draw_candidates(self, parts: _Parts, touched: NDArray[np.bool_], *, level: bool) -> tuple[IntArray, IntArray]:
        """
        Draw pairs of parts. Neither pack of a pair has changed since the parts were drawn, and at
        least one of the two packs must change.
        """
        scale, places = self._stream.random_raw(2).tolist()
        away = 1 + places % min(2 ** (scale % (_PLACES + 1)), max(1, parts.tokens.size - 1))
        unsettled = (self._must_change(level=level) & ~touched)[parts.packs]
        (low,) = (unsettled[:-away] | unsettled[away:]).nonzero()
        if touched.any():
            low = low[~(touched[parts.packs[low]] | touched[parts.packs[low + away]])]
        return low, low + away

    def _draw_parts(self) -> tuple[IntArray, _Parts]:
        """Draw parts; return the samples sorted by pack, and the parts as ranges of that list."""
        num = self.tokens.size
        shuffled = np.argsort(self._draw_keys(num), kind="stable")
        order = shuffled[_stable_argsort(self.labels[shuffled])]
        counts = np.bincount(self.labels, minlength=self.num)
        starts = np.cumsum(counts) - counts
        shape = self.num, _PARTS
        sizes = (self._draw_keys(self.num * _PARTS) % (_SAMPLES_OF_A_PART + 1)).astype(np.int64).reshape(shape)
        sizes = np.minimum(sizes, counts[:, None])
        # Scaling a number below 2**16 to the number of possible starts draws one of them.
        free = counts[:, None] - sizes + 1
        first = starts[:, None] + (self._draw_keys(self.num * _PARTS).astype(np.int64).reshape(shape) * free >> 16)
        first = np.concatenate([np.arange(num), first.ravel()])
        stop = first + np.concatenate([np.ones(num, dtype=np.int64), sizes.ravel()])
        packs = np.concatenate([self.labels[order], np.repeat(np.arange(self.num), _PARTS)])
        before = [np.concatenate([[0], np.cumsum(values[order])]) for values in (self.tokens, self.works)]
        tokens, works = (sums[stop] - sums[first] for sums in before)
        by = _stable_argsort(tokens)
        return order, _Parts(packs[by], tokens[by], works[by], first[by], stop[by])

    def _draw_keys(self, num: int) -> NDArray[np.uint16]:
        """Draw *num* numbers below 2**16, because short keys are sorted fastest."""
        return self._stream.random_raw(-(-num // 4)).view(np.uint16)[:num]


def _stable_argsort(keys: IntArray) -> IntArray:
    """Return a stable argsort of non-negative numbers, by radix sort if all are below 2**16."""
    small = keys.size and int(keys.max()) < 1 << 16
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")

"""
Other ways to even work, implemented again from what their authors say.

OmniBal's iterative sampling and filtering is of Yao et al., "OmniBal: Towards Fast Instruction-
Tuning for Vision-Language Models via Omniverse Computation Balance" (ICML 2025, arXiv 2407.20761),
held against the code that its authors published (github.com/ModelTC/OmniBal, revision 088616c),
with the constants of their examples: samples in a drawn order form groups as long as neither tokens
nor images pass their limits; groups that reach a limit stay, and the samples of the others are
drawn again. The limit of images is searched, for the least sum of the language and the vision
distance ratio; that of tokens, which they search beside it, is the hard one here. Images are
counted in patches, whose limit few groups meet exactly: it counts as reached from the same share on
as that of tokens. A sample above a limit is a group by itself; theirs leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from packplan.app.bench.work.mixes import Samples
from packplan.core.lengths import IntArray
from packplan.core.packs import Packs
from packplan.core.shuffling import shuffled

ITERATIONS, FULL_ENOUGH = 50, 0.97
"""
Rounds of sampling and filtering, and the share of a limit that a group has to reach to stay: 3,968
of 4,096 tokens.
"""

LIMITS = (0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""
Limits of patches that are tried, over the patches of a pack whose tokens are of the mean mix.
"""

RANKS = 8
"""Ranks that the distance ratios are taken over in the search."""


def largest_differences(works: IntArray, ranks: int) -> IntArray:
    """
    Return a step's packs assigned by Karmarkar and Karp's differencing, as many to each rank, in an
    order of which every so-many-th is a rank's.

    Args:
        works: Work of each pack, a multiple of *ranks*.

        ranks: How many share the step.

    >>> works = np.array([8, 7, 6, 5])
    >>> works[largest_differences(works, 2)].reshape(2, 2).sum(axis=0).tolist()
    [13, 13]
    """
    falling = np.argsort(-works, kind="stable").reshape(-1, ranks)
    states = [(int(works[row[-1]] - works[row[0]]), number, row[None, :]) for number, row in enumerate(falling)]
    heapify(states)
    number = len(states)
    while len(states) > 1:
        (_, _, one), (_, _, other) = heappop(states), heappop(states)
        # The ranks that have most of the one take those that have least of the other.
        most = np.argsort(-works[one].sum(axis=0), kind="stable")
        least = np.argsort(works[other].sum(axis=0), kind="stable")
        both = np.concatenate([one[:, most], other[:, least]])
        sums = works[both].sum(axis=0)
        heappush(states, (int(sums.min() - sums.max()), number, both))
        number += 1
    order: IntArray = states[0][2].ravel()
    return order


def sampling_and_filtering(samples: Samples, *, capacity: int, seed: int) -> Packs:
    """
    Return packs by iterative sampling and filtering, under the limit of patches that is best.

    Args:
        samples: What is packed, each shorter than *capacity*.

        capacity: Tokens a pack may hold.

        seed: Of the orders that samples are drawn in.
    """
    mean = capacity * int(samples.patches.sum()) / int(samples.tokens.sum())
    found = [_packed(samples, capacity, limit * mean, seed) for limit in (LIMITS if mean else (1.0,))]
    return min(found, key=lambda packs: _distances(packs, samples, seed))


def _distances(packs: Packs, samples: Samples, seed: int) -> float:
    """Return the sum of the two distance ratios of packs in a drawn order."""
    whole = len(packs) // RANKS * RANKS
    order = shuffled(len(packs), seed=seed)[:whole]
    tokens, patches = (packs.loads(of)[order].reshape(-1, RANKS) for of in (samples.tokens, samples.patches))
    return distance(tokens) + distance(patches)


def distance(ranks: IntArray) -> float:
    """
    Return how far the mean rank is below the highest, as a share of that; a mean over steps.

    >>> distance(np.array([[4, 2], [3, 3]]))
    0.125
    """
    highest = ranks.max(axis=1, initial=0)
    has_any = highest > 0
    if not has_any.any():
        return 0.0
    return float((1 - ranks.mean(axis=1)[has_any] / highest[has_any]).mean())


def _packed(samples: Samples, capacity: int, most_patches: float, seed: int) -> Packs:
    """
    Return the groups under both limits.

    Args:
        samples: What is packed.

        capacity: Tokens a pack may hold.

        most_patches: Patches a pack may hold, but for a sample alone that has more.

        seed: Of the orders that samples are drawn in.
    """
    left = np.arange(samples.tokens.size)
    kept: list[list[int]] = []
    for iteration in range(ITERATIONS):
        left = left[shuffled(left.size, seed=(seed, iteration))]
        again: list[list[int]] = []
        last = iteration == ITERATIONS - 1
        for members, tokens, patches in _groups(left.tolist(), samples, capacity, most_patches):
            full = tokens >= FULL_ENOUGH * capacity or (most_patches and patches >= FULL_ENOUGH * most_patches)
            (kept if last or full else again).append(members)
        left = np.array([index for members in again for index in members], dtype=np.int64)
        if not left.size:
            break
    return Packs.from_lists(kept)


def _groups(
    order: list[int], samples: Samples, capacity: int, most_patches: float
) -> Iterator[tuple[list[int], int, int]]:
    """Yield neighbours that stay within both limits, with their tokens and patches."""
    tokens, patches = samples.tokens.tolist(), samples.patches.tolist()
    members: list[int] = []
    held = seen = 0
    for index in order:
        if members and (held + tokens[index] > capacity or seen + patches[index] > most_patches):
            yield members, held, seen
            members, held, seen = [], 0, 0
        members.append(index)
        held, seen = held + tokens[index], seen + patches[index]
    if members:
        yield members, held, seen

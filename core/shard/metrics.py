"""
Metrics of a sharded RL batch: use of the budget, padding and imbalance, by global batch and pooled.
"""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.metrics import PackingMetrics, aggregate, metrics_of_loads
from packplan.core.shard.sharding import Sharding


@attrs.frozen(eq=False)
class ShardMetrics:
    """Metrics of the microbatches of one global batch, or of several together."""

    packing: PackingMetrics
    """Fill of the microbatches of all workers. The bound is that of the tokens alone."""

    num_filler: int
    """Sequences of weight 0."""

    computed_tokens: int
    """Positions of the microbatches, padding and filler included."""

    padded_tokens: int
    """Positions if every sequence were padded to the longest of its global batch."""

    works: NDArray[np.float64]
    """
    Work of each worker in each microbatch, as in `Sharding.works`; shape (num_shards, microbatches
    of a worker).
    """

    global_batches: tuple[NDArray[np.float64], ...]
    """`works` as an array for each global batch."""

    @property
    def useful_share(self) -> float:
        """Tokens of sequences over positions computed."""
        return self.packing.num_tokens / self.computed_tokens

    @property
    def computed_share(self) -> float:
        """
        Positions computed, over those with every sequence padded to the longest of its global
        batch.
        """
        return self.computed_tokens / self.padded_tokens

    @property
    def imbalances(self) -> tuple[float, ...]:
        """Work of the busiest worker over the mean, for each microbatch; 1 is even."""
        return tuple((self.works.max(axis=0) / self.works.mean(axis=0)).tolist())

    @property
    def work_imbalance(self) -> float:
        """
        Work of the busiest worker over the mean, over whole global batches; 1 is even. It applies
        if workers wait at the end of a global batch.
        """
        busiest = sum(float(works.sum(axis=1).max()) for works in self.global_batches)
        return busiest / (float(self.works.sum()) / len(self.works))

    @property
    def microbatch_imbalance(self) -> float:
        """
        Work of the busiest worker of each microbatch over the mean, summed over microbatches; 1 is
        even. It applies if workers wait in each microbatch.
        """
        return float(self.works.max(axis=0).sum() / self.works.mean(axis=0).sum())

    def logs(self) -> Mapping[str, float]:
        """Return the metrics by their names in a log."""
        return {
            "utilisation": self.packing.utilisation,
            "waste_ratio": self.packing.waste_ratio,
            "balance": self.packing.balance,
            "efficiency": self.packing.efficiency,
            "useful_share": self.useful_share,
            "computed_share": self.computed_share,
            "work_imbalance": self.work_imbalance,
            "microbatch_imbalance": self.microbatch_imbalance,
            "microbatches": float(self.works.shape[1]),
            "filler": float(self.num_filler),
            "computed_tokens": float(self.computed_tokens),
        }


def batch_metrics(sharding: Sharding) -> tuple[ShardMetrics, ...]:
    """
    Return the metrics of each global batch.

    >>> from packplan.core.shard import shard_packed
    >>> sharding = shard_packed([3, 5, 4, 4], shards=2, batch_size=2, max_tokens_per_microbatch=5)
    >>> [(batch.packing.utilisation, batch.work_imbalance) for batch in batch_metrics(sharding)]
    [(0.8, 1.4705882352941178), (0.8, 1.0)]
    """
    slots = sharding.slots
    real = np.add.reduceat(sharding.lengths[slots.indices] * sharding.weights, slots.offsets[:-1])
    sequences = np.add.reduceat(sharding.weights, slots.offsets[:-1])
    filler = slots.sizes() - sequences
    longest = np.maximum.reduceat(sharding.lengths[slots.indices], slots.offsets[:-1])
    measured = []
    for end, num in zip(np.cumsum(sharding.num_microbatches).tolist(), sharding.num_microbatches, strict=True):
        loads, held, fillers, widest, positions, works = (
            sharding.by_worker(values)[:, end - num : end]
            for values in (real, sequences, filler, longest, sharding.positions, sharding.works)
        )
        bound = -(-int(loads.sum()) // sharding.capacity)
        measured.append(
            ShardMetrics(
                packing=metrics_of_loads(loads.ravel(), capacity=sharding.capacity, bound=bound),
                num_filler=int(fillers.sum()),
                computed_tokens=int(positions.sum()),
                padded_tokens=int(held.sum()) * int(widest.max()),
                works=works,
                global_batches=(works,),
            )
        )
    return tuple(measured)


def pooled(global_batches: Sequence[ShardMetrics]) -> ShardMetrics:
    """
    Return the metrics of several global batches of equal numbers of workers together; at least one.
    """
    return ShardMetrics(
        packing=aggregate(batch.packing for batch in global_batches),
        num_filler=sum(batch.num_filler for batch in global_batches),
        computed_tokens=sum(batch.computed_tokens for batch in global_batches),
        padded_tokens=sum(batch.padded_tokens for batch in global_batches),
        works=np.concatenate([batch.works for batch in global_batches], axis=1),
        global_batches=tuple(works for batch in global_batches for works in batch.global_batches),
    )

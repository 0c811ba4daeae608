"""
Statistics of a schedule: fill, tokens, balance of work, and coverage of the samples.

All numbers are computed from the plan and the schedule, for all ranks. Nothing is measured or
gathered from ranks. The numbers still hold for the run, because each sample that is read and each
batch are compared with the plan and the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.core.lengths import IntArray, squares
from packplan.core.packs import Packs
from packplan.core.plan import RawPlan
from packplan.core.schedule.schedule import EpochSchedule
from packplan.core.work.model import SampleWorks


@attrs.frozen(eq=False)
class PackStats:
    """Samples, tokens and work of each pack in a raw plan; arrays of shape (num_packs,)."""

    packs: Packs
    samples: IntArray
    tokens: IntArray
    work: NDArray[np.float64]
    """FLOPs of each pack if `works` are given, else its sum of squared sample lengths."""

    num_long: IntArray
    """Number of long samples in each pack, 0 or 1."""

    packing_length: int
    """Maximum number of tokens in a pack of several samples."""

    all_samples: int
    """Number of samples in the data set, including samples that are in no pack."""

    skipped_samples: int
    """Number of long samples that are skipped, so that they are in no pack."""

    packed: bool = True
    """
    Whether samples share packs. If false, a pack is one sample, padded to the longest sample of its
    batch.
    """

    works: SampleWorks | None = None
    """Work of each sample; None uses squared lengths."""

    media_flops: NDArray[np.float64] | None = None
    """FLOPs of the images and videos of each pack; None without `works`."""

    @classmethod
    def from_plan(
        cls, plan: RawPlan, lengths: IntArray, *, packed: bool = True, works: SampleWorks | None = None
    ) -> PackStats:
        """
        Return the statistics of the packs of a plan.

        Args:
            plan: The raw plan.
            lengths: Number of tokens of each record; int64, shape (num_records,).
            packed: Whether samples share packs. If false, each sample is padded to the longest
                sample of its batch.
            works: Work of each sample; None uses squared lengths.
        """
        is_long = np.zeros(lengths.size, dtype=np.int64)
        is_long[list(plan.single_long)] = 1
        packs = plan.packs
        stats = cls(
            packs=packs,
            samples=packs.sizes(),
            tokens=packs.loads(lengths),
            work=packs.sums(squares(lengths)) if works is None else np.zeros(0),
            num_long=packs.loads(is_long),
            packing_length=plan.packing_length,
            all_samples=plan.num_samples,
            skipped_samples=len(plan.skipped_long),
            packed=packed,
        )
        return stats if works is None else stats.with_works(works)

    def with_works(self, works: SampleWorks) -> PackStats:
        """Return these statistics with the work of packs computed from *works*."""
        packs = self.packs
        media_flops = np.add.reduceat(works.media_flops[packs.indices], packs.offsets[:-1])
        return attrs.evolve(self, work=packs.sums(works.flops), works=works, media_flops=media_flops)

    def padded_work(self, packs: IntArray, widths: IntArray) -> NDArray[np.float64]:
        """
        Return the work of packs of one sample each, padded to *widths*; same shape as *packs*.
        """
        if self.works is None or self.media_flops is None:
            return squares(widths)
        return self.works.model.row_flops(widths) + self.media_flops[packs]


@attrs.frozen(eq=False)
class EpochStats:
    """Statistics of one epoch. Step 0 is the first step that this run trains in the epoch."""

    pack_stats: PackStats
    world_size: int
    batch_size: int

    packs_per_step: int
    """
    Number of packs in an optimizer step over all ranks; a shared pack counts once for each of its
    ranks. The last step of the epoch may have fewer.
    """

    order: IntArray
    """Packs of the epoch that this run trains, in the order of training; shape (num_consumed,)."""

    is_first: IntArray
    """
    1 if a pack of `order` is trained for the first time in the epoch, else 0; same shape as
    `order`.
    """

    degrees: IntArray
    """
    Number of ranks that share each pack of `order`, which lists a shared pack once for each of its
    ranks; same shape as `order`.
    """

    earlier_packs: IntArray
    """Distinct packs of the epoch that were trained before this run."""

    @classmethod
    def from_schedule(cls, pack_stats: PackStats, schedule: EpochSchedule, epoch: int) -> EpochStats:
        """
        Compute the statistics of *epoch*.

        Args:
            pack_stats: Statistics of each pack.
            schedule: Schedule of the run.
            epoch: Number of the epoch, from 0.
        """
        before = schedule.consumed_packs(epoch)
        order = schedule.trained_packs(epoch, schedule.num_remaining_steps(epoch))
        _, places = np.unique(np.concatenate([before, order]), return_index=True)
        first = np.zeros(before.size + order.size, dtype=np.int64)
        first[places] = 1
        return cls(
            pack_stats=pack_stats,
            world_size=schedule.world_size,
            batch_size=schedule.batch_size,
            packs_per_step=schedule.world_size * schedule.batch_size * schedule.gradient_accumulation_steps,
            order=order,
            is_first=first[before.size :],
            degrees=schedule.pack_degrees(epoch)[order],
            earlier_packs=np.unique(before),
        )

    def num_positions(self, start: int, stop: int) -> int:
        """
        Return the number of token positions that all ranks compute in steps *start* to *stop* - 1.

        Positions of padding are included.
        """
        packs, _, degrees = self._packs(start, stop)
        return int(self._widths(self._by_rank(packs), self._by_rank(degrees)).sum())

    def num_tokens(self, start: int, stop: int) -> int:
        """
        Return the number of tokens in steps *start* to *stop* - 1. A pack counts only once in an
        epoch.
        """
        packs, first, _ = self._packs(start, stop)
        return int((self.pack_stats.tokens[packs] * first).sum())

    def step_works(self, start: int, stop: int) -> NDArray[np.float64]:
        """
        Return the work of each rank in steps *start* to *stop* - 1; shape (num_steps, world_size).
        """
        return _sum_rows(self._pack_works(start, stop), self.packs_per_step // self.world_size)

    def microbatch_imbalance(self, start: int, stop: int) -> float:
        """
        Return the imbalance of work if ranks wait for each other in each microbatch.

        The work of the busiest rank is summed over the microbatches of steps *start* to *stop* - 1.
        This sum is divided by the sum of the ranks' mean work over the same microbatches.
        """
        batches = _sum_rows(self._pack_works(start, stop), self.batch_size)
        return float(batches.max(axis=1).sum() / batches.mean(axis=1).sum())

    def batch_works(self) -> NDArray[np.float64]:
        """Return each rank's work in each microbatch; shape (num_microbatches, world_size)."""
        return _sum_rows(self._pack_works(0, -(-self.order.size // self.packs_per_step)), self.batch_size)

    def _pack_works(self, start: int, stop: int) -> NDArray[np.float64]:
        """
        Return the work of the packs in steps *start* to *stop* - 1; shape (num_rows, world_size).
        """
        packs, _, degrees = self._packs(start, stop)
        rows, ranks, stats = self._by_rank(packs), self._by_rank(degrees), self.pack_stats
        return stats.work[rows] / ranks if stats.packed else stats.padded_work(rows, self._widths(rows, ranks))

    def statistics(self, start: int, stop: int) -> Mapping[str, float]:
        """
        Return statistics of steps *start* to *stop* - 1, at least one step.

        `fill` and `samples_per_pack` exist only with packing. The two imbalances exist only with
        several ranks.

        - `fill`: Mean fill of the packs, relative to the room of the ranks that share a pack. A
          pack with more tokens than room counts as full.
        - `samples_per_pack`: Mean number of samples in a pack.
        - `long_share`: Share of long samples among the samples of these steps.
        - `work`: Mean total work of a step over all ranks.
        - `work_imbalance`: Work of the busiest rank divided by the mean work of all ranks, averaged
          over steps.
        - `microbatch_imbalance`: Result of the method of the same name.
        - `coverage`: Share of the data set's samples that the epoch has trained before step *stop*.
        """
        pack_stats, (packs, _, degrees) = self.pack_stats, self._packs(start, stop)
        works, count = self.step_works(start, stop), 1 / degrees  # a shared pack counts once, not on each rank
        samples = float((pack_stats.samples[packs] * count).sum())
        fills = self._fills(packs, degrees)
        found = {
            **({"fill": float(fills.mean())} if fills.size else {}),
            **({"samples_per_pack": samples / float(count.sum())} if pack_stats.packed else {}),
            "long_share": float((pack_stats.num_long[packs] * count).sum()) / samples,
            "work": float(works.sum(axis=1).mean()),
        }
        if self.world_size > 1:
            found["work_imbalance"] = float((works.max(axis=1) / works.mean(axis=1)).mean())
            found["microbatch_imbalance"] = self.microbatch_imbalance(start, stop)
        return found | {"coverage": self._coverage(stop)}

    def epoch_statistics(self, stop: int) -> Mapping[str, float]:
        """
        Return statistics of the distinct packs that the epoch trains before step *stop*.

        Packs that were trained before this run are included. There has to be at least one pack.
        """
        pack_stats, packs = self.pack_stats, self._distinct_packs(stop)
        fills = self._fills(packs)
        spread = {"mean": fills.mean(), "min": fills.min(), "p5": np.percentile(fills, 5)} if fills.size else {}
        num_long = int(pack_stats.num_long[packs].sum())
        return {
            **{f"epoch_fill_{name}": float(value) for name, value in spread.items()},
            "epoch_long_share": num_long / int(pack_stats.samples[packs].sum()),
            "epoch_long_samples": num_long,
            "epoch_long_pack_share": num_long / packs.size,
            "epoch_skipped_share": pack_stats.skipped_samples / pack_stats.all_samples,
            "epoch_skipped_samples": pack_stats.skipped_samples,
            "epoch_coverage": self._coverage(stop),
        }

    def _packs(self, start: int, stop: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the parts of `order`, `is_first` and `degrees` for steps *start* to *stop* - 1."""
        chosen = slice(start * self.packs_per_step, stop * self.packs_per_step)
        return self.order[chosen], self.is_first[chosen], self.degrees[chosen]

    def _by_rank(self, packs: IntArray) -> IntArray:
        """Reshape packs to rows with one pack for each rank; shape (num_rows, world_size)."""
        return packs.reshape(-1, self.world_size)

    def _widths(self, rows: IntArray, degrees: IntArray) -> IntArray:
        """
        Return the number of positions that a rank computes for each pack of *rows*, padding
        included; same shape as *rows*.
        """
        tokens = -(-self.pack_stats.tokens[rows] // degrees)
        if self.pack_stats.packed:
            return tokens
        batches = np.arange(0, len(rows), self.batch_size)
        widest = np.maximum.reduceat(tokens, batches, axis=0)
        return np.repeat(widest, np.diff([*batches, len(rows)]), axis=0)

    def _fills(self, packs: IntArray, degrees: IntArray | int = 1) -> NDArray[np.float64]:
        """
        Return the fill of each pack, relative to the room of its ranks; empty without packing.
        """
        if not self.pack_stats.packed:
            return np.zeros(0)
        room = self.pack_stats.packing_length * degrees
        return np.divide(np.minimum(self.pack_stats.tokens[packs], room), room)

    def _distinct_packs(self, stop: int) -> IntArray:
        """Return the distinct packs of the epoch that were trained before step *stop*."""
        packs, first, _ = self._packs(0, stop)
        return np.concatenate([self.earlier_packs, packs[first > 0]])

    def _coverage(self, stop: int) -> float:
        return int(self.pack_stats.samples[self._distinct_packs(stop)].sum()) / self.pack_stats.all_samples


def _sum_rows(works: NDArray[np.float64], num_rows: int) -> NDArray[np.float64]:
    """Sum every *num_rows* neighbouring rows. The last sum may be over fewer rows."""
    return np.add.reduceat(works, np.arange(0, len(works), num_rows), axis=0)

"""
Equal work in every step: how long steps take by the packs and by who computes them.

The samples are a made mix of texts and images, or real chat lengths; work is in FLOPs of a 7B
model, of whose vision tower images take their part. A step takes as long as its busiest rank. Ways
are compared with random steps of packs of best fit: `sorted` takes packs of neighbouring work into
one step, which biases it; so does `grouped`, within windows of steps; `karmarkar-karp` assigns each
random step's packs by largest differences; `sampling and filtering` makes packs as OmniBal (ICML
2025) does: groups in a drawn order under limits of tokens and patches, of which those that are full
enough stay, and the others are drawn again. With one pack of each rank, `floor` is what whole
samples of more than a pack's mean work leave uneven in random steps, whichever packs they are in.
Seconds are of processor time.

With --families the work of each architecture that transformers knows is held against torch's
counter.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import attrs
import numpy as np
from numpy.typing import NDArray

from packplan.app.bench.measure import Measured, NotMeasured, measure
from packplan.app.bench.table import aligned
from packplan.app.bench.work.families import ROWS, counted_families
from packplan.app.bench.work.mixes import ASIDE, DATA, PATCHES_OF_A_TOKEN, Aside, Samples
from packplan.app.bench.work.others import distance, largest_differences, sampling_and_filtering
from packplan.app.bench.work.ranks import Task, falls, measured_rounds
from packplan.app.cli.command import positive_number, positive_numbers
from packplan.core.lengths import IntArray
from packplan.core.packers import pack
from packplan.core.packs import Packs
from packplan.core.shuffling import shuffled
from packplan.core.work import assign_steps, expected_imbalance, floor_of, group_steps, in_units

LIMIT_S = 600.0

REASON = 100
"""Characters of a reason in a table."""

WINDOW = 16
"""Steps of a window whose packs are grouped by work."""


@attrs.frozen
class Row:
    """One way on one number of ranks; times are over those of ranks that are all busy."""

    data: str
    packing_length: int
    way: str
    ranks: int
    accumulation: int
    packs: int

    planning_s: float | None
    """Processor time to plan its packs, in a process of their own; None if that took too long."""

    planning_bytes: int | None
    """Memory that planning took beyond the samples."""

    mean_step: float
    """The busiest rank's work over the mean rank's, of a mean step."""

    worst_step: float

    floor: float | None
    """The least that random steps of any packs could reach; None with several packs of a rank."""

    saved: float | None
    """
    Share of a run's time that is saved against random steps of packs of best fit; None where ways
    leave out packs of other samples.
    """

    step_spread: float
    """Standard deviation of the work of steps, over its mean."""

    image_spread: float
    """Standard deviation of the share of tokens that are of images in a step."""

    pad_ratio: float
    """
    Share of positions that were padding if the packs that ranks compute at the same time were
    padded to the longest; a rank's own microbatch is one pack, which has none.
    """

    vision_distance: float
    """Patches that the mean rank has fewer than the one with most, over the latter's; a mean."""

    language_distance: float
    """The same of tokens."""

    breaches: int
    """Packs above the packing length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--data", nargs="+", choices=list(DATA), default=["vision", "chat"], metavar="NAME",
        help=f"of {', '.join(DATA)} (default: vision chat)",
    )  # fmt: skip
    parser.add_argument("--samples", type=positive_number, default=100_000, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--packing-lengths", type=positive_numbers, default=[8192], metavar="N,N", help="tokens of a pack (8192)"
    )
    parser.add_argument(
        "--ranks", type=positive_numbers, default=[8, 64, 512], metavar="N,N", help="(default: 8,64,512)"
    )
    parser.add_argument(
        "--accumulation", type=positive_numbers, default=[1, 4, 8], metavar="N,N", help="packs of a rank in a step"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY",
        help=f"beside random: {'; '.join(list(WAYS)[1:])} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--aside", choices=list(ASIDE), default="long",
        help="packs left out of all steps: none; samples of the packing length or more, which are packs by "
        "themselves (long); or all packs of one sample (alone) (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--measured", type=positive_number, default=0, metavar="ROUNDS",
        help="instead: two real ranks on unequal images, so many rounds; seconds as packs come and by work",
    )  # fmt: skip
    parser.add_argument(
        "--families",
        nargs="*",
        metavar="NAME",
        help="instead: the work that config.json gives, over what torch counts, of small copies of these families",
    )
    parser.add_argument(
        "--steps", type=positive_number, default=4, metavar="N", help="of a measured round (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of samples and steps (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure, then print."""
    if options.measured:
        _print_measured(options)
        return
    if options.families is not None:
        _print_families(options)
        return
    rows = [
        row
        for name in options.data
        for packing_length in options.packing_lengths
        for row in _compared(name, packing_length, options)
    ]
    if options.json:
        print(json.dumps({"rows": [attrs.asdict(row) for row in rows]}, indent=1))
        return
    head = ("data", "packs of", "way", "ranks", "packs of a rank", "packs", "s", "MB", "mean step", "worst", "floor",
            "saved", "steps differ", "images", "pad", "vision", "language", "over")  # fmt: skip
    print("\n".join(aligned([head, *map(_cells, rows)], left={0, 2})))


def _print_families(options: argparse.Namespace) -> None:
    """Print each family's verdict, and how many have which."""
    found = counted_families(options.families)
    if options.json:
        print(json.dumps({"families": [attrs.asdict(one) for one in found]}, indent=1))
        return
    head = ("family", "verdict", *(f"over torch's, {num} tokens" for num in ROWS), "")
    cells = [
        (one.family, one.verdict, *([f"{ratio:.4f}" for ratio in one.ratios] or ["-"] * len(ROWS)), one.reason[:REASON])
        for one in found
    ]
    print("\n".join(aligned([head, *cells], left={0, 1, 4})))
    verdicts = Counter(one.verdict for one in found)
    print(", ".join(f"{number} of {len(found)} {verdict}" for verdict, number in verdicts.most_common()))


def _print_measured(options: argparse.Namespace) -> None:
    """Print what two real ranks take."""
    rounds = measured_rounds(Task(options.steps, options.measured, options.seed))
    fall = falls(rounds)
    if options.json:
        print(json.dumps({**attrs.asdict(fall), "rounds": [[attrs.asdict(step) for step in one] for one in rounds]}))
        return
    head = ("two ranks, as packs come over by work", "predicted", "quickest steps", "median round", "least", "most")
    cells = [
        (name, *(f"{value:.3f}" for value in (fall.predicted, of.quickest, of.median, of.least, of.most)))
        for name, of in (("seconds", fall.seconds), ("processor time of the busier rank", fall.cpu))
    ]
    print("\n".join(aligned([head, *cells], left={0})))


def _cells(row: Row) -> tuple[str, ...]:
    seconds = "-" if row.planning_s is None else f"{row.planning_s:.2f}"
    memory = "-" if row.planning_bytes is None else f"{row.planning_bytes / 1e6:.0f}"
    floor = "-" if row.floor is None else f"{row.floor:.4f}"
    saved = "-" if row.saved is None else f"{row.saved:.2%}"
    return (
        row.data, f"{row.packing_length:,}", row.way, f"{row.ranks:,}", f"{row.accumulation}", f"{row.packs:,}",
        seconds, memory, f"{row.mean_step:.4f}", f"{row.worst_step:.4f}", floor, saved, f"{row.step_spread:.2%}",
        f"{row.image_spread:.4f}", f"{row.pad_ratio:.2%}", f"{row.vision_distance:.2%}",
        f"{row.language_distance:.2%}", f"{row.breaches}",
    )  # fmt: skip


Order = Callable[[IntArray, int, int], IntArray]
"""Works of packs in a random order, ranks, packs of a rank -> positions, step by step."""


def _as_they_come(works: IntArray, _ranks: int, _accumulation: int) -> IntArray:
    return np.arange(works.size)


def _sorted(works: IntArray, _ranks: int, _accumulation: int) -> IntArray:
    return np.argsort(works, kind="stable")


def _by_work(works: IntArray, ranks: int, accumulation: int) -> IntArray:
    return assign_steps(works, world_size=ranks, accumulation=accumulation, meeting="step")


def _grouped(works: IntArray, ranks: int, accumulation: int) -> IntArray:
    return group_steps(works, packs_per_step=ranks * accumulation, steps=WINDOW, seed=(0,))


def _by_differences(works: IntArray, ranks: int, accumulation: int) -> IntArray:
    order = np.arange(works.size)
    per_step = ranks * accumulation
    for start in range(0, works.size, per_step):
        order[start : start + per_step] = start + largest_differences(works[start : start + per_step], ranks)
    return order


WAYS: Mapping[str, tuple[str, Order]] = {
    "random": ("best fit", _as_they_come),
    "sorted": ("best fit", _sorted),
    "karmarkar-karp": ("best fit", _by_differences),
    "sampling and filtering": ("sampling", _as_they_come),
    "ours: by work": ("best fit", _by_work),
    "ours: grouped": ("best fit", _grouped),
    "ours: balanced": ("balanced", _as_they_come),
    "ours: balanced, grouped": ("balanced", _grouped),
    "ours: balanced, by work": ("balanced", _by_work),
}
"""What packs are planned by, and what orders them."""


def _compared(name: str, packing_length: int, options: argparse.Namespace) -> Iterator[Row]:
    """Yield every way on every number of ranks, on one data set."""
    drawn = DATA[name](options.samples, seed=options.seed)
    samples = drawn.below(packing_length)
    planners: dict[str, Callable[[], Packs]] = {
        "best fit": partial(pack, samples.tokens, capacity=packing_length, algorithm="best_fit_decreasing"),
        "sampling": partial(sampling_and_filtering, samples, capacity=packing_length, seed=options.seed),
        "balanced": partial(pack, samples.tokens, capacity=packing_length, algorithm="balanced", works=samples.works),
    }
    aside = Aside(options.aside, drawn, packing_length)
    ways = {way: WAYS[way] for way in WAYS if way == "random" or way in options.ways}
    needed = {planner for planner, _ in ways.values()}
    planned = {name: (aside.trained(call()), _cost(call)) for name, call in planners.items() if name in needed}
    for ranks in options.ranks:
        for accumulation in options.accumulation:
            plain: float | None = None
            for way, (planner, order) in ways.items():
                packs, cost = planned[planner]
                steps = _Steps.of(
                    packs, aside.samples, order, ranks=ranks, accumulation=accumulation, seed=options.seed
                )
                if steps is None:
                    continue
                plain = plain or steps.seconds
                yield Row(
                    data=name, packing_length=packing_length, way=way, ranks=ranks, accumulation=accumulation,
                    packs=len(packs), breaches=aside.breaches(packs),
                    floor=_floor(packs, aside.samples, ranks) if accumulation == 1 else None,
                    planning_s=cost.cpu_s if isinstance(cost, Measured) else None,
                    planning_bytes=cost.peak_bytes if isinstance(cost, Measured) else None,
                    saved=None if options.aside == "alone" else 1 - steps.seconds / plain, **steps.figures(),
                )  # fmt: skip


def _floor(packs: Packs, samples: Samples, ranks: int) -> float:
    works = floor_of(samples.works[packs.indices], num_packs=len(packs))
    return expected_imbalance(works, world_size=ranks)


def _cost(call: Callable[[], Packs]) -> Measured | NotMeasured:
    return measure(lambda: call, lambda _: None, repeat=1, limit_s=LIMIT_S)


@attrs.frozen(eq=False)
class _Steps:
    """An epoch's whole steps; arrays of shape (steps, packs of a rank, ranks)."""

    works: NDArray[np.float64]
    tokens: IntArray
    patches: IntArray

    num_packs: int
    """Packs of the epoch, those beyond the last whole step included."""

    @classmethod
    def of(
        cls, packs: Packs, samples: Samples, order: Order, *, ranks: int, accumulation: int, seed: int
    ) -> _Steps | None:
        """
        Return the steps of packs in an order; None if there is not one whole step.

        Args:
            packs: Of the samples.

            samples: What they hold.

            order: How the packs of random steps are ordered again.

            ranks: That share a step.

            accumulation: Packs of a rank in one step.

            seed: Of the random order.
        """
        works = packs.sums(samples.works)
        per_step = ranks * accumulation
        num_steps = len(packs) // per_step
        if not num_steps:
            return None
        drawn = shuffled(len(packs), seed=seed)[: num_steps * per_step]
        chosen = drawn[order(in_units(works[drawn]), ranks, accumulation)].reshape(num_steps, accumulation, ranks)
        tokens, patches = (packs.loads(values)[chosen] for values in (samples.tokens, samples.patches))
        return cls(works[chosen], tokens, patches, len(packs))

    @property
    def _ranks(self) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = self.works.sum(axis=1)
        return sums

    @property
    def seconds(self) -> float:
        """Time of the epoch, in work of one rank; a part of a step counts as that part."""
        steps = self.num_packs / (self.works.shape[1] * self.works.shape[2])
        seconds: float = float(self._ranks.max(axis=1).mean()) * steps
        return seconds

    def figures(self) -> dict[str, float]:
        """Return what a row says of the steps."""
        ratios = self._ranks.max(axis=1) / self._ranks.mean(axis=1)
        longest = self.tokens.max(axis=2).sum() * self.tokens.shape[2]
        shown = self.patches.sum(axis=(1, 2)) / PATCHES_OF_A_TOKEN
        return {
            "mean_step": float(self._ranks.max(axis=1).sum() / self._ranks.mean(axis=1).sum()),
            "worst_step": float(ratios.max()),
            "step_spread": float(self.works.sum(axis=(1, 2)).std() / self.works.sum(axis=(1, 2)).mean()),
            "image_spread": float((shown / self.tokens.sum(axis=(1, 2))).std()),
            "pad_ratio": 1 - float(self.tokens.sum() / longest),
            "vision_distance": distance(self.patches.sum(axis=1)),
            "language_distance": distance(self.tokens.sum(axis=1)),
        }

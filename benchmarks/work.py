"""
Count how evenly the work of a step is spread over ranks, for several ways to make packs and to
assign packs to ranks.

Work is counted in FLOPs of a 7B model, with a vision tower if samples have images. A step takes as
long as its busiest rank. Every way is compared with the way `random`: packs of best fit, in random
order. Some samples have more work than a pack has on average. If each rank has one pack in a step,
"floor" is the unevenness that these samples cause in any plan. Seconds are processor time.

With --families, the work that is computed from config.json is compared with torch's FLOP counter,
for a small copy of each model family in transformers.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from benchmarks.child import measure
from benchmarks.distributions import DISTRIBUTIONS, PATCHES_OF_A_TOKEN, Samples, documents, made_mix, texts
from benchmarks.options import add_names, add_number
from benchmarks.table import Columns, show
from packplan.app.cli.command import parse_number, parse_positives
from packplan.core.errors import ModelError
from packplan.core.lengths import IntArray
from packplan.core.packers import pack
from packplan.core.packs import Packs, concatenate
from packplan.core.shuffling import seeded_permutation
from packplan.core.work.assignment import level_steps, to_units
from packplan.core.work.model import WorkModel
from packplan.core.work.text import DELTA_CHUNK
from packplan.core.work.vision import FLOPs, VisionWork

LIMIT_S = 600

FAMILY_ROWS, NEAR = (60, 480), 0.02
"""Numbers of tokens in the computed rows, and the largest relative difference of `near`."""

DATA: Mapping[str, Callable[..., Samples]] = {
    "vision": made_mix,
    "documents": documents,
    **{name: partial(texts, name) for name in ("chat", *DISTRIBUTIONS)},
}
"""Name of the data -> function that returns samples."""

ASIDE = ("none", "long", "alone")

Order = Callable[[IntArray, int, int], IntArray]
"""
Function that orders packs: works in random order, number of ranks, packs of a rank in a step ->
positions of packs, step by step.
"""


def position_flops(work: WorkModel, positions: Any, pairs: Any) -> FLOPs:
    """
    Return the forward FLOPs of text from its numbers of positions and of pairs of tokens.

    In every attention layer, all pairs count, since eager attention computes all pairs.

    Args:
        work: Work of the model.
        positions: Number of positions, padding included, or an array of the result's shape.
        pairs: Number of pairs of tokens, or an array of the result's shape.
    """
    per_pair = work.per_pair + sum(layers.per_pair for layers in work.local)
    positions = np.asarray(positions, dtype=np.float64)
    found: FLOPs = positions * work.per_position + np.multiply(pairs, per_pair, dtype=np.float64)
    found += work.per_chunk * np.ceil(positions / DELTA_CHUNK)
    return found


def image_flops(vision: VisionWork | None, grids: Iterable[Sequence[int]]) -> FLOPs:
    """
    Return the forward FLOPs of each image, from its grid; windows at its edges may be smaller.

    Args:
        vision: Vision tower; None without images.
        grids: Frames, rows and columns of patches of each image.
    """
    if vision is None:
        return np.zeros(0)
    frames, rows, columns = np.array(list(grids), dtype=np.float64).reshape(-1, 3).T
    side = max(vision.window, 1)
    in_windows = [whole // side * side**2 + (whole % side) ** 2 for whole in (rows, columns)]
    patches = rows * columns
    found: FLOPs = frames * (
        vision.per_patch * patches
        + vision.per_image_pair * patches**2
        + vision.per_window_pair * in_windows[0] * in_windows[1]
    )
    return found


def expected_imbalance(works: NDArray[Any], *, world_size: int) -> float:
    """
    Return the expected work of the heaviest of *world_size* random packs, over a pack's mean work.

    Args:
        works: Work of each pack, >= 0; at least one.
        world_size: Number of packs drawn, >= 1; all packs are drawn if there are fewer.

    >>> expected_imbalance(np.array([1, 2, 3]), world_size=2)
    1.3333333333333333
    """
    rising = np.sort(np.asarray(works, dtype=np.float64))
    if not rising[-1]:
        return 1.0
    drawn = min(world_size, rising.size)
    below = np.arange(drawn, rising.size, dtype=np.float64)
    # Probability that a pack is the heaviest of a draw, over that of the next heavier pack.
    ratios = (below - drawn + 1) / below
    chances = drawn / rising.size * np.concatenate([np.cumprod(ratios[::-1])[::-1], [1.0]])
    return float((chances * rising[drawn - 1 :]).sum() / rising.mean())


def floor_of(works: NDArray[Any], *, num_packs: int) -> NDArray[np.float64]:
    """
    Return the most even works that packs of whole samples could have; float64, shape (num_packs,).

    A pack has at least the work of each of its samples, so samples above the mean work of a pack
    make packs uneven. The capacity of packs is ignored.

    Args:
        works: Work of each sample, >= 0; at least one.
        num_packs: Number of packs, from 1 to the number of samples.

    >>> floor_of(np.array([8, 1, 2, 3]), num_packs=3).tolist()
    [8.0, 3.0, 3.0]
    """
    array = np.asarray(works, dtype=np.float64)
    total = float(array.sum())
    heavy = np.sort(array[array > total / num_packs])[::-1]
    left = total - np.concatenate([[0.0], np.cumsum(heavy)])[: heavy.size]
    # Once a sample is below the mean of the rest, so are all after it.
    alone = int((np.cumprod(heavy * (num_packs - np.arange(heavy.size)) > left)).sum())
    alone = min(alone, num_packs - 1)
    level = (total - float(heavy[:alone].sum())) / (num_packs - alone)
    return np.concatenate([heavy[:alone], np.full(num_packs - alone, level)])


def _as_drawn(works: IntArray, _ranks: int, _accumulation: int) -> IntArray:
    return np.arange(works.size)


def _sorted(works: IntArray, _ranks: int, _accumulation: int) -> IntArray:
    return np.argsort(works, kind="stable")


def _by_work(works: IntArray, ranks: int, accumulation: int) -> IntArray:
    return level_steps(works, world_size=ranks, accumulation=accumulation, sync_at="step")


WAYS: Mapping[str, tuple[str, Order]] = {
    "random": ("best_fit_decreasing", _as_drawn),
    "sorted": ("best_fit_decreasing", _sorted),
    "by work": ("best_fit_decreasing", _by_work),
    "balanced": ("balanced", _as_drawn),
    "balanced, by work": ("balanced", _by_work),
}
"""Way -> packing algorithm, and order of the packs."""


@attrs.frozen
class WorkRow:
    """Figures of one way on one number of ranks."""

    data: str
    packing_length: int
    way: str
    ranks: int
    accumulation: int
    packs: int
    planning_s: float
    """Processor time of packing, in a process of its own."""

    planning_bytes: int
    """Peak memory of packing in bytes, without the samples."""

    mean_step: float
    """Work of the busiest rank, divided by the mean work of all ranks, both summed over steps."""

    worst_step: float
    floor: float | None
    """Smallest *mean_step* of any plan in random order; None for several packs of a rank."""

    saved: float | None
    """Share of a run's time saved, compared with `random`; None with `--aside alone`."""

    step_spread: float
    """Standard deviation of the work of steps, divided by the mean work of a step."""

    image_spread: float
    """Standard deviation, over steps, of the share of tokens that belong to images."""


COLUMNS: Columns = {
    "data": lambda row: row.data,
    "pack": lambda row: f"{row.packing_length:,}",
    "way": lambda row: row.way,
    "ranks": lambda row: f"{row.ranks:,}",
    "packs of a rank": lambda row: str(row.accumulation),
    "packs": lambda row: f"{row.packs:,}",
    "planning s": lambda row: f"{row.planning_s:.2f}",
    "planning MB": lambda row: f"{row.planning_bytes / 1e6:.0f}",
    "busiest over mean": lambda row: f"{row.mean_step:.4f}",
    "worst step": lambda row: f"{row.worst_step:.4f}",
    "floor": lambda row: "" if row.floor is None else f"{row.floor:.4f}",
    "saved": lambda row: "" if row.saved is None else f"{row.saved:.2%}",
    "steps differ": lambda row: f"{row.step_spread:.2%}",
    "images differ": lambda row: f"{row.image_spread:.4f}",
}


@attrs.frozen
class FamilyRow:
    """Work of a model family from its config.json, compared with torch's FLOP counter."""

    family: str
    verdict: str
    """`near`, `off`, `not known` (from config.json) or `not counted` (by torch)."""

    ratios: tuple[float, ...]
    """FLOPs from config.json over torch's for each of `FAMILY_ROWS`; empty if one is unknown."""

    reason: str


FAMILY_COLUMNS: Columns = {
    "family": lambda row: row.family,
    "verdict": lambda row: row.verdict,
    "over torch's": lambda row: ", ".join(f"{ratio:.4f}" for ratio in row.ratios),
    "reason": lambda row: row.reason[:100],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_names(parser, "--data", DATA, ("vision", "chat"))
    add_number(parser, "--samples", 100_000, "samples of each data set")
    for name, default, about in (
        ("--packing-lengths", [8192], "tokens of a pack"),
        ("--ranks", [8, 64, 512], "data-parallel learners"),
        ("--accumulation", [1, 4, 8], "packs of a rank in a step"),
    ):
        shown = ",".join(map(str, default))
        help_ = f"{about} (default: {shown})"
        parser.add_argument(name, type=parse_positives, default=default, metavar="N,N", help=help_)
    add_names(parser, "--ways", WAYS, WAYS, "; random is always measured")
    parser.add_argument(
        "--aside", choices=ASIDE, default="long",
        help="packs that are left out of steps: none; samples of the packing length or more; all packs of one sample "
        "(default: long)",
    )  # fmt: skip
    parser.add_argument("--seed", type=parse_number, default=0, help="seed of samples and steps (default: 0)")
    parser.add_argument("--families", nargs="*", metavar="NAME", help="compare the work of these families, or of all")


def run(options: argparse.Namespace) -> None:
    """Measure, then print the results."""
    if options.families is not None:
        _show_families(options)
        return
    rows = [
        row for name in options.data for length in options.packing_lengths for row in _rows_of(name, length, options)
    ]
    show(rows, COLUMNS, left={"data", "way"}, as_json=options.json)


def _rows_of(name: str, packing_length: int, options: argparse.Namespace) -> Iterator[WorkRow]:
    drawn = DATA[name](options.samples, seed=options.seed)
    is_long = drawn.tokens >= packing_length
    # The long samples come last, so that the others' indices do not depend on them.
    samples, num_short = drawn.take(np.argsort(is_long, kind="stable")), int((~is_long).sum())
    works = samples.works
    ways = [way for way in WAYS if way == "random" or way in options.ways]
    planned: dict[str, tuple[Packs, dict[str, Any]]] = {}
    for algorithm in dict.fromkeys(WAYS[way][0] for way in ways):
        lengths = samples.tokens[:num_short]
        call = partial(pack, lengths, capacity=packing_length, algorithm=algorithm)
        if algorithm == "balanced":
            call = partial(call, works=works[:num_short])
        planned[algorithm] = (_set_aside(call(), samples, num_short, options.aside), _cost(call))
    for ranks, accumulation in product(options.ranks, options.accumulation):
        plain: float | None = None
        for way in ways:
            packs, costs = planned[WAYS[way][0]]
            if len(packs) < ranks * accumulation:
                continue
            of_packs = packs.sums(works)
            chosen = _chosen(of_packs, way, ranks, accumulation, options.seed)
            figures = _figures(packs, samples, of_packs, chosen)
            seconds = figures.pop("busiest") * len(packs) / (ranks * accumulation)
            plain = plain or seconds
            floor = expected_imbalance(floor_of(works[packs.indices], num_packs=len(packs)), world_size=ranks)
            yield WorkRow(
                data=name, packing_length=packing_length, way=way, ranks=ranks, accumulation=accumulation,
                packs=len(packs), **costs, **figures, floor=floor if accumulation == 1 else None,
                saved=None if options.aside == "alone" else 1 - seconds / plain,
            )  # fmt: skip


def _cost(call: Callable[[], Packs]) -> dict[str, Any]:
    cost = measure(lambda: call, lambda _: None, repeat=1, limit_s=LIMIT_S)
    return {"planning_s": cost.cpu_s, "planning_bytes": cost.peak_bytes}


def _set_aside(packs: Packs, samples: Samples, num_short: int, aside: str) -> Packs:
    if aside == "alone":
        return packs.take(np.flatnonzero(packs.sizes() > 1))
    long = range(num_short, samples.tokens.size) if aside == "none" else ()
    return concatenate([packs, Packs.from_lists([[index] for index in long])])


def _chosen(works: NDArray[np.float64], way: str, ranks: int, accumulation: int, seed: int) -> IntArray:
    """Return the packs of an epoch's whole steps; shape (steps, packs of a rank, ranks)."""
    per_step = ranks * accumulation
    drawn = seeded_permutation(works.size, seed=seed)[: works.size // per_step * per_step]
    chosen: IntArray = drawn[WAYS[way][1](to_units(works[drawn]), ranks, accumulation)]
    return chosen.reshape(-1, accumulation, ranks)


def _figures(packs: Packs, samples: Samples, works: NDArray[np.float64], chosen: IntArray) -> dict[str, Any]:
    """
    Return the figures of the steps in *chosen*; *works* are those of the packs. `busiest` is the
    busiest rank's work in a step, averaged over steps.
    """
    tokens, patches = (packs.loads(all_of)[chosen] for all_of in (samples.tokens, samples.patches))
    of_ranks, of_steps = works[chosen].sum(axis=1), works[chosen].sum(axis=(1, 2))
    busiest, mean = of_ranks.max(axis=1), of_ranks.mean(axis=1)
    images = patches.sum(axis=(1, 2)) / PATCHES_OF_A_TOKEN / tokens.sum(axis=(1, 2))
    return {
        "busiest": float(busiest.mean()),
        "mean_step": float(busiest.sum() / mean.sum()),
        "worst_step": float((busiest / mean).max()),
        "step_spread": float(of_steps.std() / of_steps.mean()),
        "image_spread": float(images.std()),
    }


def _show_families(options: argparse.Namespace) -> None:
    from tools.families import family_names

    rows = [_family(name) for name in options.families or family_names()]
    verdicts = Counter(row.verdict for row in rows)
    notes = [", ".join(f"{number} of {len(rows)} {verdict}" for verdict, number in verdicts.most_common())]
    packages = ("torch", "transformers")
    show(rows, FAMILY_COLUMNS, left=set(FAMILY_COLUMNS), as_json=options.json, notes=notes, packages=packages)


def _family(family: str) -> FamilyRow:
    """Build a family's small copy, and compare its work with torch's FLOP counter."""
    from packplan.adapters.probe.small_model import SmallModels, hiding_warnings
    from tools.families import default_config

    try:
        with hiding_warnings():
            model = SmallModels(default_config(family)).build(attention="eager")
        # The kernels that compute experts together are not counted.
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")
        work = WorkModel.from_config(json.loads(json.dumps(model.config.to_dict(), default=str)))
        ratios = tuple(float(position_flops(work, num, num**2)) / _counted_by_torch(model, num) for num in FAMILY_ROWS)
    except Exception as error:  # noqa: BLE001  # whatever the code of a family raises
        is_unknown = isinstance(error, ModelError) and error.kind == "work"
        verdict = "not known" if is_unknown else "not counted"
        return FamilyRow(family, verdict, (), " ".join(str(error).split()))
    return FamilyRow(family, "near" if all(abs(ratio - 1) <= NEAR for ratio in ratios) else "off", ratios, "")


def _counted_by_torch(model: Any, num_tokens: int) -> int:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.full((1, num_tokens), 5), use_cache=False)
    operations: int = counter.get_total_flops()
    return max(1, operations)

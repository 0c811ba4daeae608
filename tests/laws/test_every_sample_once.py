"""Every sample once: the law of all that packs, plans, draws or shards samples."""

from collections import Counter
from collections.abc import Iterable
from itertools import chain

import attrs
import numpy as np
import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st

import packplan as pp
from packplan.core.epochs import epoch_selection, plan_epoch
from packplan.core.errors import ArgumentError
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.packers.drawing import redraw
from packplan.core.plan import RawPlan, build_raw_plan
from packplan.core.stream import ReaderState
from tests.laws.test_epochs import recipes
from tests.laws.test_shard import MODES, batches, cut
from tests.laws.test_streams import expected, places_in, steps_of, streams
from tests.strategies import packable, raw_lengths


@attrs.frozen
class Built:
    """Packs of samples, and what the law allows of them."""

    lengths: Iterable[int]
    limit: int
    packs: list[list[int]]
    left_out: Iterable[int] = ()
    chosen: Iterable[int] | None = None
    """Samples that were to be packed; all if None."""

    loads: list[int] | None = None
    """Tokens of each pack that is in no canonical order; the sums of lengths in order if None."""


@st.composite
def packs(draw, algorithm: str, *, draws: bool = False, works: bool = False, parts: int = 1) -> Built:
    """Packs of an algorithm: its own, drawn again, by given works, or split into a multiple."""
    lengths, capacity = draw(packable())
    options = {"capacity": capacity, "algorithm": algorithm, "seed": draw(st.integers(0, 2**64 - 1))}
    if works:
        weights = st.sampled_from([0, 1, 2, 1e9])
        options["works"] = draw(st.lists(weights, min_size=len(lengths), max_size=len(lengths)))
    if draws:
        found = redraw(np.array(lengths, np.int64), **options, epoch=draw(st.integers(0, 1000)))
    else:
        assume(-(-len(pack(lengths, **options)) // parts) * parts <= len(lengths))
        found = pack(lengths, **options, bin_count_multiple=parts)
    return Built(lengths, capacity, found.tolist())


def built(lengths, plan: RawPlan, chosen=None) -> Built:
    """Return a plan as the law reads it."""
    dropped = plan.dropped_packs.indices.tolist()
    return Built(lengths, plan.packing_length, plan.packs.tolist(), [*dropped, *plan.skipped_long], chosen)


@st.composite
def plans(draw) -> Built:
    """Raw plans of any policy."""
    lengths, limit = draw(raw_lengths())
    names = ("packing", "drop_last", "allow_single_long", "replanned")
    options = {name: draw(st.booleans()) for name in names} | {"min_fill_ratio": draw(st.sampled_from(["0", "0.65"]))}
    try:
        return built(lengths, build_raw_plan(lengths, packing_length=limit, **options))
    except ArgumentError:  # no pack is left
        return Built(lengths, limit, [], range(len(lengths)))


@st.composite
def epochs(draw) -> Built:
    """An epoch of a recipe, with mixes or without."""
    recipe, policy, samples = draw(recipes())
    epoch = draw(st.integers(0, 3))
    chosen = epoch_selection(recipe, policy, samples, epoch).tolist()
    return built(samples.lengths, plan_epoch(recipe, policy, samples, epoch).raw, chosen)


@st.composite
def streamed(draw) -> Built:
    """All packs of one reader of a stream, in the order of training."""
    lengths, options = draw(streams())
    found = places_in(held for held, _ in steps_of(ReaderState(), [*range(len(lengths))], lengths, options))
    long = [index for index, n in enumerate(lengths) if n >= options.packing_length and not options.allow_single_long]
    dropped = chain.from_iterable(expected(lengths, options)[1])
    loads = [sum(lengths[index] for index in one) for one in found]
    return Built(lengths, options.packing_length, found, [*long, *dropped], loads=loads)


@st.composite
def sharded(draw, mode: str) -> Built:
    """Microbatches of all workers, without the filler."""
    case = draw(batches(modes=(mode,)))
    sharding = cut(case)
    counting = iter(sharding.weights)
    found = [[index for index in slot if next(counting)] for slot in sharding.slots]
    return Built(case["lengths"], case["budget"], found, loads=sharding.positions.tolist())


BUILDERS = {
    **{name: packs(name) for name in ALGORITHMS},
    **{f"{name}, drawn": packs(name, draws=True) for name, one in ALGORITHMS.items() if not one.keeps_order},
    "works": packs("balanced", works=True), "a multiple": packs("constant_volume", parts=3), "plan": plans(),
    "library": raw_lengths().map(lambda case: built(case[0], pp.plan(*case).raw)), "epoch": epochs(),
    "stream": streamed(), **{f"{mode} shards": sharded(mode) for mode in MODES},
}  # fmt: skip
"""Name of a builder -> strategy of its packs. A new packer stands in `ALGORITHMS` alone."""


@pytest.mark.parametrize("builder", BUILDERS)
@given(data=st.data())
def test_every_sample_is_in_one_pack_or_left_out(builder, data):
    """Also by name; no pack is empty or too full, but for one sample that is alone; in order."""
    found = data.draw(BUILDERS[builder])
    lengths = list(found.lengths)
    loads = found.loads or [sum(lengths[index] for index in one) for one in found.packs]
    event(f"left out: {bool(found.left_out)}, too long: {max(loads, default=0) > found.limit}")

    wanted = range(len(lengths)) if found.chosen is None else found.chosen
    assert Counter(wanted) == Counter([*chain.from_iterable(found.packs), *found.left_out])
    assert all(load <= found.limit or len(one) == 1 for one, load in zip(found.packs, loads, strict=True))
    if found.loads is None:
        assert all(found.packs)
        assert sorted(map(sorted, found.packs)) == found.packs or found.chosen is not None
    if builder == "library":
        assert not found.left_out

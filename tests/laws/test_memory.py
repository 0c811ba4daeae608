"""Laws of the memory of a step: amounts, peaks, parts of ranks, the longest length that fits."""

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.memory import (
    KINDS,
    SHARDINGS,
    StepTrace,
    candidate_packs,
    estimated_activations,
    longest_fitting,
    optimizer_bytes,
    parse_bytes,
    peak_of_full,
    rank_parts,
    with_margin,
    written_bytes,
)

POWERS = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}


@given(st.integers(1, 10**6), st.sampled_from(sorted(POWERS)), st.sampled_from(["", " "]))
def test_an_amount_has_a_power_of_1024_bytes_a_unit(number, unit, space):
    """`iB` counts in powers of 1,024; `B` and a bare prefix count in powers of 1,000."""
    assert number * 1024 ** POWERS[unit] == parse_bytes(f"{number}{space}{unit}")
    if POWERS[unit]:
        assert number * 1000 ** POWERS[unit] == parse_bytes(f"{number}{unit[0]}B") == parse_bytes(f"{number}{unit[0]}")


@pytest.mark.parametrize("text", ["", "80", "GiB", "-1GB", "0GB", "80 GBs", "1.5B", "1e3GB", "80gib", "٨GB1", "8 0GB"])
def test_an_amount_that_is_none_is_refused(text):
    """Anything but a positive number and a unit is refused, with the text."""
    with pytest.raises(ValueError, match="is no amount of memory"):
        parse_bytes(text)


def test_amounts_are_written_in_the_largest_unit():
    """An amount is written with two digits in B, KiB, MiB or GiB."""
    assert ["1.00 B", "1.00 KiB", "1.00 MiB", "2,048.00 GiB"] == [
        written_bytes(1), written_bytes(1024), written_bytes(2**20), written_bytes(2**41)
    ]  # fmt: skip


@st.composite
def traces(draw):
    """Draw a trace of a few blocks, of any kind."""
    blocks = draw(
        st.lists(
            st.tuples(
                st.integers(0, 20), st.integers(1, 10), st.integers(0, 99), st.sampled_from([-1, 0, 1]), st.booleans()
            ),
            min_size=1, max_size=12,
        )
    )  # fmt: skip
    births, lives, sizes, kinds, logits = (np.array(column) for column in zip(*blocks, strict=True))
    forward_end, optimizer, update, buckets = (draw(st.integers(0, 25)) for _ in range(4))
    return StepTrace(births, births + lives, sizes, kinds, logits, forward_end, optimizer, update, buckets)


@given(traces(), st.booleans())
def test_the_peak_is_the_largest_sum_of_blocks_at_one_time(trace, fused_loss):
    """The peak is that of the passes with the optimizer and buckets, or that of the update."""
    kept = ~(trace.logits & fused_loss)

    def held(time):
        return int(trace.sizes[kept & (trace.births <= time) & (trace.deaths > time)].sum())

    # Logits that are left out may be what was alive last.
    last = int(trace.deaths.max()) - 1
    passes = max(map(held, range(last + 1)))
    expected = trace.optimizer + trace.buckets + max(passes, held(last) + trace.update)

    peak = trace.peak(fused_loss=fused_loss)

    assert expected == peak.total
    assert peak.total == sum(getattr(peak, kind) for kind in KINDS)


def test_kinds_follow_from_what_blocks_are_for_and_when_they_live():
    """What the forward pass leaves for the backward pass is an activation; the rest is not."""
    trace = StepTrace(
        births=np.array([0, 1, 1, 6]), deaths=np.array([9, 9, 3, 9]), sizes=np.array([1, 20, 300, 4000]),
        kinds=np.array([0, -1, -1, 1]), logits=np.zeros(4, dtype=bool), forward_end=5, optimizer=50000, update=0,
        buckets=600000,
    )  # fmt: skip

    assert (1, 4000, 50000, 20, 600000) == attrs.astuple(trace.peak())


@pytest.mark.parametrize(
    ("sharding", "parts"),
    [("ddp", (100, 40, 80, 40)), ("fsdp2", (25, 10, 20, 0)), ("zero2", (100, 10, 20, 0)), ("zero3", (25, 10, 20, 0))],
)
def test_ranks_share_what_their_sharding_says(sharding, parts):
    """DDP shares nothing, ZeRO-2 gradients and optimizer, FSDP 2 and ZeRO-3 weights too."""
    assert parts == attrs.astuple(rank_parts(100, 40, 80, sharding=sharding, world_size=4))


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.sampled_from(SHARDINGS), st.integers(1, 64))
def test_parts_of_all_ranks_hold_everything(weights, optimizer, sharding, world_size):
    """Together ranks hold all weights, gradients and states; one rank holds no less than any."""
    trained = max(1, weights // 3)
    parts = rank_parts(weights, trained, optimizer, sharding=sharding, world_size=world_size)
    alone = rank_parts(weights, trained, optimizer, sharding=sharding, world_size=1)

    for part, whole in zip(attrs.astuple(parts)[:3], (weights, trained, optimizer), strict=True):
        assert part in {whole, -(-whole // world_size)}
    assert (weights, trained, optimizer, 0) == attrs.astuple(alone)
    assert (trained if sharding == "ddp" and world_size > 1 else 0) == parts.buckets
    assert parts.total == sum(attrs.astuple(parts))


def test_zero_keeps_a_copy_in_float32_of_half_weights():
    """A bfloat16 weight under ZeRO has 12 bytes of optimizer: a copy, and two states in float32."""
    assert 12 * 100 // 4 == rank_parts(200, 200, 400, sharding="zero2", world_size=4, itemsize=2).optimizer


@pytest.mark.parametrize(
    ("name", "bytes_each"), [("adamw_torch_fused", 8), ("adamw_8bit", 2), ("sgd", 0), ("lion_32", 4)]
)
def test_the_states_of_an_optimizer_follow_from_its_name(name, bytes_each):
    """Names that are not known count as Adam's; states of half weights are half as large."""
    assert 10 * bytes_each == optimizer_bytes(name, num_trained=10, itemsize=4)
    assert 10 * (bytes_each if "8bit" in name else bytes_each / 2) == optimizer_bytes(name, num_trained=10, itemsize=2)


def test_estimates_grow_with_tokens_and_shrink_with_checkpointing():
    """The estimate is linear in tokens and in supervised tokens, of flat and nested sizes alike."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 5, "vocab_size": 100}
    options = {"itemsize": 2, "checkpointing": False}
    one = estimated_activations(sizes, tokens=1, supervised=0, patches=0, **options)
    seen = {"text_config": sizes, "vision_config": {"embed_dim": 8, "depth": 5}}

    assert 7 * one + 3 * 1200 == estimated_activations(
        {"text_config": sizes}, tokens=7, supervised=3, patches=9, **options
    )
    assert 16 * one == estimated_activations(seen, tokens=7, supervised=0, patches=9, **options)
    assert one > estimated_activations(sizes, tokens=1, supervised=0, patches=0, itemsize=2, checkpointing=True)


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 99), st.integers(0, 9)), min_size=1, max_size=9))
def test_candidates_have_the_most_bytes(packs):
    """The first has the most; where packs have images, there is a second one."""
    tokens, supervised, patches = (np.array(column) for column in zip(*packs, strict=True))

    found = candidate_packs(tokens, supervised, patches, per_token=2.0, per_supervised=5.0, per_patch=3.0)

    weights = 2 * tokens + 5 * supervised + 3 * patches
    assert sorted(weights)[::-1][: len(found)] == weights[list(found)].tolist()
    assert len(set(found)) == len(found) == (min(2, len(packs)) if patches.any() else 1)


@given(
    shape=st.tuples(st.integers(0, 10**6), st.integers(1, 500), st.integers(0, 500), st.integers(1, 40_000)),
    start=st.integers(1, 8192),
    limit=st.integers(1, 10**8),
    most=st.sampled_from([100, 4096, 131_072]),
)
def test_the_length_that_is_found_fits_and_its_peak_is_its_own(shape, start, limit, most):
    """Whatever the memory's shape, a returned length was tried itself, and fits with the margin."""
    tried = {}

    def peak_at(tokens):
        fixed, slope, jump, bend = shape
        tried[tokens] = fixed + slope * tokens + jump * max(0, tokens - bend)
        return tried[tokens]

    found = longest_fitting(peak_at, start=start, limit=limit, most=most)

    assert len(tried) <= 4
    if found.tokens:
        assert tried[found.tokens] == found.peak
        assert with_margin(found.peak) <= limit + 1
        assert found.tokens <= most
        assert found.limited == (found.tokens == most)
    else:
        assert all(with_margin(peak) > limit or tokens > most for tokens, peak in tried.items())


@given(st.integers(1, 500), st.integers(64, 4096), st.integers(10, 1000))
def test_where_memory_is_a_line_the_longest_length_is_exact(slope, start, times):
    """On a line the first guess is right: 128 tokens more would not fit, and its error is 0."""
    limit = int(1.1 * slope * 64 * times)

    found = longest_fitting(lambda tokens: slope * tokens, start=start, limit=limit, most=10**6)

    assert found.tokens in {64 * times, 64 * (times - 1), 64 * times - 128, start, 2 * start}
    assert found.tokens >= 64 * (times - 2)
    assert abs(found.error) < 1e-9


@given(st.integers(1, 500), st.integers(0, 10**6), st.sets(st.integers(64, 4096), min_size=2), st.integers(1, 10**5))
def test_a_line_has_the_peak_of_every_length(slope, held, traced, tokens):
    """Where memory is a line, any two lengths foretell all others, and one foretells none."""
    known = {one: held + slope * one for one in traced}

    assert held + slope * tokens == peak_of_full(known, tokens)
    (length, *_) = traced
    assert (known[length], None) == (
        peak_of_full({length: known[length]}, length), peak_of_full({length: known[length]}, length + 1)
    )  # fmt: skip


def test_a_line_that_misleads_leaves_the_longest_of_those_that_fit():
    """After two lengths that do not fit, no further one is traced."""
    found = longest_fitting(
        lambda tokens: tokens + 100 * max(0, tokens - 3000), start=1000, limit=11_000, most=131_072
    )  # fmt: skip

    assert 2000 == found.tokens == found.peak
    assert found.error < -0.9

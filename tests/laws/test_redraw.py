"""Redrawn packs have the quality of the algorithm's own."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from benchmarks.distributions import DISTRIBUTIONS, trace
from packplan.core.checksum import plan_checksum
from packplan.core.packers import ALGORITHMS, pack
from packplan.core.packers.drawing import redraw
from packplan.core.plan import build_raw_plan
from packplan.core.policy import PlanPolicy
from packplan.core.work.model import WorkModel
from tests.strategies import packable, raw_lengths

MORE = 200
"""Packs for each further one that a draw may have."""

DRAWING = [name for name, one in ALGORITHMS.items() if not one.keeps_order]

seeds, epochs = st.integers(0, 2**64 - 1), st.integers(0, 1000)


def redrawn(lengths, capacity, algorithm="constant_volume", seed=0, epoch=0):
    return redraw(np.array(lengths, dtype=np.int64), capacity=capacity, algorithm=algorithm, seed=seed, epoch=epoch)


def chat(num_samples):
    """Return lengths of real chats below 4,096 tokens."""
    recorded = trace("chat")
    return np.random.default_rng(1).choice(recorded[recorded < 4096], num_samples).astype(np.int64)


@pytest.mark.parametrize("algorithm", DRAWING)
@given(case=packable(), seed=seeds, epoch=epochs)
def test_a_draw_has_each_sample_once_within_the_capacity_in_as_few_packs(algorithm, case, seed, epoch):
    """At most one pack in 200 more than the algorithm's own, in canonical order."""
    lengths, capacity = case

    found = redrawn(lengths, capacity, algorithm, seed, epoch)
    own = pack(lengths, capacity=capacity, algorithm=algorithm, seed=seed)

    event(f"other packs: {found != own}")
    assert sorted(found.indices.tolist()) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= capacity for members in found)
    assert found.tolist() == sorted(sorted(members) for members in found)
    assert len(found) <= len(own) + len(own) // MORE


def test_packs_of_a_searching_algorithm_are_kept_where_its_first_stage_needs_more():
    """Best fit needs 5 % more packs of these, so samples of equal length change places."""
    lengths = DISTRIBUTIONS["detcap-8192"].lengths(400, seed=0)
    own = pack(lengths, capacity=8192, algorithm="certified")
    assert len(pack(lengths, capacity=8192, algorithm="best_fit_decreasing")) > len(own) + len(own) // MORE

    found = redrawn(lengths, 8192, "certified")

    assert own != found
    assert sorted(sorted(lengths[p].tolist()) for p in own) == sorted(sorted(lengths[p].tolist()) for p in found)


GOLDEN = {
    "auto": "d75f02dccbfc",
    "constant_volume": "54636f670373",
    "best_fit_decreasing": "d75f02dccbfc",
    "first_fit_decreasing": "fbcfa2fed051",
    "modified_first_fit_decreasing": "d739e6522d88",
    "first_fit_shuffle": "5ff7510091c6",
    "balanced": "9f79fb74d1b5",
    "certified": "d75f02dccbfc",
}


@pytest.mark.parametrize("algorithm", DRAWING)
def test_golden_draws(algorithm):
    found = redrawn(chat(3000), 4096, algorithm, seed=3, epoch=2)

    assert (282, GOLDEN[algorithm]) == (len(found), plan_checksum(found)[:12]), "see test_packers"


@given(length=st.integers(1, 50), num=st.integers(0, 30), epoch=epochs)
def test_one_packing_stays_one(length, num, epoch):
    """If each pack is a sample, or one pack has all, every draw is the algorithm's own packing."""
    lengths = [length] * num
    for capacity in (length, length * max(num, 1)):
        assert pack(lengths, capacity=capacity) == redrawn(lengths, capacity, epoch=epoch)


def test_works_are_refused_where_they_change_nothing():
    with pytest.raises(ValueError, match="works do not change the packs of constant_volume"):
        redraw(np.array([3, 4]), capacity=9, algorithm="constant_volume", seed=0, epoch=0, works=[1, 2])


def test_balanced_draws_level_the_works_that_are_given():
    """Over several groups of packs, the works are as even as in the algorithm's own packing."""
    lengths = chat(4000)
    works = WorkModel(per_position=5, per_pair=3).sample_flops(lengths)

    def unevenness(packs):
        sums = packs.sums(works)
        return sums.std() / sums.mean()

    with patch.multiple("packplan.core.packers.balanced", _GROUP_SAMPLES=1000, _GROUP_PACKS=100):
        own = pack(lengths, capacity=4096, algorithm="balanced", works=works)
        found = redraw(lengths, capacity=4096, algorithm="balanced", seed=0, epoch=1, works=works)

    assert len(own) == len(found)
    assert own != found
    assert unevenness(found) < 1.5 * unevenness(own)


@given(case=raw_lengths(), epoch=epochs, seed=seeds)
def test_an_epoch_changes_a_plan_only_if_it_is_replanned(case, epoch, seed):
    """The packs of a replanned one are drawn before the fill filter."""
    lengths, packing_length = case
    policy = PlanPolicy(packing_length=packing_length, seed=seed)
    short = [n for n in lengths if n < packing_length]

    plan = build_raw_plan(lengths, policy, epoch=epoch)
    drawn = build_raw_plan(lengths, policy, epoch=epoch, replanned=True)

    assert build_raw_plan(lengths, policy) == plan
    assert len(redrawn(short, packing_length, seed=seed, epoch=epoch)) == len(drawn.packs) - len(plan.single_long)
    assert plan.single_long == drawn.single_long


def test_a_plan_that_keeps_the_order_cannot_be_replanned():
    """All its epochs would pack alike."""
    with pytest.raises(ValueError, match="concatenative keeps the order of the data"):
        PlanPolicy(packing_length=8, algorithm="concatenative", replanned=True)

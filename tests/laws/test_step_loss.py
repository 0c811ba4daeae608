"""Laws of the weights of samples in a step's loss, and of the reasons for other weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.equality import StepSample, likely_reason, sample_weights

RANKS, BATCHES = 2, 3


@st.composite
def steps(draw):
    """Samples of two ranks with three batches each, whose numbers of tokens are all different."""
    lengths = draw(st.lists(st.integers(3, 400), min_size=9, max_size=12, unique=True))
    samples = []
    for number, tokens in enumerate(lengths):
        rank, batch = number % RANKS, number // RANKS % BATCHES
        learned = tokens - 2
        samples.append(StepSample(tokens, learned, learned + 1, RANKS * batch + rank, rank, batch))
    return samples


def numbers(samples):
    """Return sums of four numbers for each sample that no two sets of weights add up alike."""
    draw = np.random.default_rng(3)
    return draw.normal(size=(len(samples), 4)) * [[one.learned] for one in samples]


@given(steps(), st.sampled_from(["tokens", "samples", "packs"]))
def test_equal_losses_have_that_loss_as_their_mean(samples, mean):
    """Whatever the mean: weights of tokens add up to 1."""
    weights = sample_weights(samples, mean=mean)

    assert 1 == pytest.approx(sum(weight * one.learned for weight, one in zip(weights, samples, strict=True)))


@given(steps())
def test_samples_that_learn_nothing_weigh_nothing_in_a_mean_of_means(samples):
    """And change no other sample's weight."""
    silent = StepSample(7, 0, 0, pack=99, rank=0, batch=0)

    for mean in ("samples", "packs"):
        assert [*sample_weights(samples, mean=mean), 0] == sample_weights([*samples, silent], mean=mean).tolist()


def test_a_mean_may_be_a_function():
    """From the learned tokens and the pack of each sample to its weight."""
    samples = [StepSample(4, 3, 3, pack=5), StepSample(2, 1, 1, pack=6)]

    assert [8.0, 7.0] == sample_weights(samples, mean=lambda learned, packs: [3 + packs[0], learned[1] + 6]).tolist()


def by_group(samples, group):
    """Return the weights of a mean of means, by a loop."""
    groups = sorted({group(one) for one in samples})
    learned = {each: sum(one.learned for one in samples if group(one) == each) for each in groups}
    return np.array([1 / len(groups) / learned[group(one)] for one in samples])


MISTAKES = {
    "token mean divided by the ranks (2) once too often": lambda due, _: due / 2,
    "token mean not divided by the ranks (2)": lambda due, _: due * 2,
    "token mean divided by the accumulated batches (3) once too often": lambda due, _: due / 3,
    "token mean not divided by the accumulated batches (3)": lambda due, _: due * 3,
    "divided by the ranks (2) and by the accumulated batches (3) once": lambda due, _: due / 6,
    "token mean divided by the ranks (2) twice too often": lambda due, _: due / 4,
    "mean of the batches": lambda _, samples: by_group(samples, lambda one: (one.rank, one.batch)),
    "mean of the ranks": lambda _, samples: by_group(samples, lambda one: one.rank),
    "mean of the samples": lambda _, samples: by_group(samples, lambda one: one.tokens),
    "sum over the tokens": lambda due, _: due * 0 + 1,
    "counts ignored labels": lambda due, samples: due * 0 + 1 / sum(one.tokens for one in samples),
    "counts the first token": lambda due, samples: due * 0 + 1 / sum(one.labelled for one in samples),
    "mean of the batches, though they learn different numbers of tokens, and not divided by the accumulated": (
        lambda _, samples: 3 * by_group(samples, lambda one: (one.rank, one.batch))
    ),
}


@pytest.mark.parametrize(("words", "weigh"), MISTAKES.items(), ids=MISTAKES)
@given(samples=steps())
def test_each_mistake_is_named_by_its_numbers(words, weigh, samples):
    """Not another one that gives other numbers."""
    sums = numbers(samples)
    found = weigh(sample_weights(samples, mean="tokens"), samples) @ sums

    assert words in likely_reason(samples, sums, found, sharing=1, tolerance=1e-9)


@given(steps())
def test_other_numbers_have_no_reason(samples):
    """Nothing is guessed."""
    assert "" == likely_reason(samples, numbers(samples), np.array([1e9, 1, 1, 1]), sharing=1, tolerance=1e-9)


def test_ranks_that_share_rows_are_a_reason_of_their_own():
    """Where four ranks share rows by twos."""
    samples = [StepSample(9, 8, 8, pack=0, rank=0), StepSample(5, 4, 4, pack=1, rank=2)]
    sums = np.array([[6.0], [1.0]])
    found = 2 * sample_weights(samples, mean="tokens") @ sums

    assert "as the token mean not divided by the ranks that share a row (2)" == likely_reason(
        samples, sums, found, sharing=2, tolerance=1e-9
    )


def test_what_is_one_is_no_reason():
    """One rank of data divides by its batches, or by the ranks that share its rows."""
    samples = [StepSample(9, 8, 8, pack=0, batch=0), StepSample(5, 4, 4, pack=1, batch=1)]
    sums = numbers(samples)
    weights = sample_weights(samples, mean="tokens")

    by_batches = likely_reason(samples, sums, 2 * weights @ sums, sharing=1, tolerance=1e-9)
    by_ranks = likely_reason(samples, sums, weights / 4 @ sums, sharing=4, tolerance=1e-9)

    assert "as the token mean not divided by the accumulated batches (2)" == by_batches
    assert "as the token mean divided by the ranks (4) once too often" == by_ranks

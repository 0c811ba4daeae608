"""Which packs are compared, and what the comparison's verdict is."""

import math

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.equality import (
    CHECKS,
    EQUALITY_LIMITS,
    Deviation,
    judge,
    loss_difference,
    pack_kind,
    packs_to_compare,
    rounding_limit,
)
from packplan.core.packs import Packs
from packplan.core.samples.tables import COLUMNS

Media = tuple[int, int]
"""Images and videos of a sample."""

MEDIA = st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 1, 2]))


def table_of(media: list[Media]) -> np.ndarray:
    """Return measurements of samples with so many images and videos each."""
    table = np.ones((len(media), len(COLUMNS)), dtype=np.int32)
    for place, name in enumerate(("images", "videos")):
        table[:, COLUMNS.index(name)] = [held[place] for held in media]
    return table


def kind_of(pack: list[Media]) -> tuple[str, bool]:
    """Return what a pack holds, a video counting as an image, and whether it has a video."""
    return pack_kind([sum(held) for held in pack]), any(videos for _, videos in pack)


@given(st.lists(st.lists(MEDIA, min_size=1, max_size=5), min_size=1, max_size=20), st.integers(1, 9))
def test_packs_of_every_kind_are_looked_at(held, count):
    """Of each kind, with and without videos, the pack of the most samples is chosen."""
    ends = np.cumsum([len(pack) for pack in held])
    packs = Packs.from_lists([list(range(end - len(pack), end)) for pack, end in zip(held, ends, strict=True)])
    several = [position for position, pack in enumerate(held) if len(pack) > 1]
    kinds = {kind_of(held[position]) for position in several}
    event(f"kinds: {len(kinds)}, with videos: {any(shows for _, shows in kinds)}")

    chosen = packs_to_compare(packs, table_of([media for pack in held for media in pack]), count=count)

    assert sorted(set(chosen)) == chosen
    assert set(chosen) <= set(several)
    assert min(count, len(several)) >= len(chosen) >= min(count, len(kinds))
    if count >= len(kinds):
        assert kinds == {kind_of(held[position]) for position in chosen}
        for one in kinds:
            most = max(len(held[position]) for position in several if kind_of(held[position]) == one)
            assert most == max(len(held[position]) for position in chosen if kind_of(held[position]) == one)


@pytest.mark.parametrize("precision", EQUALITY_LIMITS)
@given(values=st.lists(st.floats(0, 10), min_size=1, max_size=8))
def test_the_worst_finding_decides(precision, values):
    """Each check has its worst; what is not a number never passes."""
    for check in CHECKS:
        findings = [Deviation(check, value, pack=number) for number, value in enumerate(values)]

        (verdict,) = judge(findings, precision=precision, limit=1e-3)

        assert max(values) == verdict.worst.value == values[verdict.worst.pack]
        assert verdict.passed == (max(values) <= verdict.limit)
        (spoilt,) = judge([*findings, Deviation(check, math.nan, pack=99)], precision=precision, limit=1e-3)
        assert not spoilt.passed
        assert 99 == spoilt.worst.pack


@given(st.floats(0, 50), st.floats(0, 50), st.floats(0, 1e4))
def test_a_loss_is_compared_with_itself_or_with_the_logits_it_comes_from(found, expected, terms):
    """The scale is at least a tenth of the terms, so that cancellation is no fault."""
    terms = max(terms, expected)

    value = loss_difference(found, expected, term_size=terms)

    assert (0 == value) == (found == expected)
    if found != expected:
        assert value == (pytest.approx(abs(found - expected) / max(expected, terms / 10)) if terms else math.inf)


def test_rounding_of_deep_models_excuses_logits_and_gradients_alone():
    """Not what has to be exact, nor losses, which are means."""
    limits = {check: judge([Deviation(check, 0.0, 0)], precision="bfloat16", limit=0.5)[0].limit for check in CHECKS}

    assert {"positions": 0, "labels": 0, "isolation": 0, "logits": 0.5, "gradients": 0.5} == {
        check: limit for check, limit in limits.items() if "loss" not in check
    }
    assert 0 < limits["sample loss"] == limits["step loss"] < EQUALITY_LIMITS["bfloat16"]


@given(st.sampled_from([7, 10, 23]), st.integers(1, 200))
def test_the_limit_of_rounding_grows_with_the_step_and_slowly_with_depth(bits, layers):
    """At twice the depth by a fifth at most; and no type's limit is near what a fault gives."""
    limit = rounding_limit(2.0**-bits, layers=layers)

    assert limit < rounding_limit(2.0**-bits, layers=2 * layers) <= 1.25 * limit
    assert rounding_limit(2.0 ** -(bits + 1), layers=layers) < limit < 0.1

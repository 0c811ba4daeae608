"""The heaviest packs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.plan import build_raw_plan
from packplan.core.schedule import PackStats, heaviest_packs
from packplan.core.work import SampleWorks, VisionWork, WorkModel

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def stats_of(lengths: list[int], images: list[int] | None = None) -> PackStats:
    plan = build_raw_plan(lengths, packing_length=32, drop_last=False)
    vision = VisionWork(per_patch=1000, per_image_pair=1, per_window_pair=0, window=0)
    model = WorkModel(per_position=1, per_pair=1, vision=vision)
    number = np.zeros(len(lengths), dtype=np.int64) if images is None else np.array(images)
    works = SampleWorks.from_lengths(model, lengths, images=np.minimum(number, 1), patches=number)
    return PackStats.from_plan(plan, np.array(lengths), works=works)


@given(LENGTHS, st.data())
def test_no_pack_has_more_of_anything_than_the_heaviest(lengths, data):
    """Tokens, those with a loss, work and work in images are each the most in one batch."""
    images, supervised = (
        data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths))) for _ in range(2)
    )
    stats = stats_of(lengths, images)
    batches = heaviest_packs(stats, np.array(supervised))

    for weight in (stats.tokens, stats.packs.loads(np.array(supervised)), stats.work, stats.images):
        assert max(weight) == max(weight[pack] for (pack,) in batches)
    assert len(batches) == len(set(batches))


@given(LENGTHS, st.integers(1, 4))
def test_a_batch_has_the_longest_packs(lengths, size):
    """As many as there are; without images, none is sought for them."""
    stats = stats_of(lengths)
    first, *others = heaviest_packs(stats, np.array(lengths), size=size)

    assert sorted(stats.tokens)[::-1][:size] == [stats.tokens[pack] for pack in first]
    assert len(others) <= 1

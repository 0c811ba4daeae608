"""Work of images and videos counts where sequences are cut into microbatches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.errors import ArgumentError
from packplan.core.shard import shard_dynamic, shard_packed, shard_plain

CUTS = {
    "packed": {"max_tokens_per_microbatch": 60},
    "dynamic": {"max_tokens_per_microbatch": 60},
    "plain": {"micro_batch_size": 3, "allow_uneven": True},
}


def cut(mode, lengths, media_work, **options):
    """Shard a batch in a mode."""
    function = {"packed": shard_packed, "dynamic": shard_dynamic, "plain": shard_plain}[mode]
    return function(lengths, batch_size=len(lengths), media_work=media_work, **CUTS[mode], **options)


@given(
    st.sampled_from(list(CUTS)),
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 10_000)), min_size=1, max_size=40),
    st.integers(1, 4),
)
def test_a_microbatch_has_the_work_of_its_media(mode, sequences, shards):
    """Beside that of its rows, and filler is computed again."""
    lengths, media_work = zip(*sequences, strict=True)

    sharding = cut(mode, lengths, media_work, shards=shards)

    for slots, width, work in zip(sharding.slots, sharding.widths, sharding.works, strict=True):
        rows = [lengths[slot] if mode == "packed" else width for slot in slots]
        assert sum(row**2 for row in rows) + sum(media_work[slot] for slot in slots) == work


def test_workers_share_media_equally():
    """Of texts of one length, those with images go to different workers."""
    media_work = [9000, 9000, 0, 0, 9000, 9000, 0, 0]

    sharding = cut("packed", [20] * 8, media_work, shards=4, meeting="step")

    assert 1 == len(set(sharding.by_worker(sharding.works).sum(axis=1)))


def test_work_that_is_not_one_number_for_each_sequence_is_refused():
    """Too few, negative, or none."""
    for wrong in ([1.0], [1.0, -1.0], [1.0, np.nan]):
        with pytest.raises(ArgumentError, match="media"):
            cut("packed", [3, 4], wrong, shards=1)

"""Videos of many samples together."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.samples import COLUMNS, MEDIA_COLUMNS, video_totals

VIDEO = st.tuples(st.integers(2, 768), st.integers(4, 2**20), st.integers(0, 7_200_000), st.booleans())
"""Frames that are sampled, patches, milliseconds, and whether it was decoded."""


@given(st.lists(st.lists(VIDEO, max_size=3), max_size=8), st.integers(0, 4))
def test_totals_are_the_sums_of_all_videos(samples, images):
    """Images add nothing."""
    table = np.zeros((len(samples), len(COLUMNS)), dtype=np.int32)
    for row, held in zip(table, samples, strict=True):
        row[[COLUMNS.index(name) for name in ("images", "patches", "videos", "frames", "video_patches")]] = (
            images, 64 * images, len(held), sum(one[0] for one in held), sum(one[1] for one in held),
        )  # fmt: skip
    videos = [one for held in samples for one in held]
    media = np.zeros((len(videos) + images, len(MEDIA_COLUMNS)), dtype=np.int64)
    for row, (_, _, milliseconds, decoded) in zip(media, videos, strict=False):
        row[[MEDIA_COLUMNS.index(name) for name in ("milliseconds", "decoded")]] = milliseconds, decoded

    totals = video_totals(table, media)

    assert (len(videos), sum(one[0] for one in videos)) == (totals.videos, totals.frames)
    assert (sum(one[1] for one in videos), sum(one[3] for one in videos)) == (totals.patches, totals.decoded)
    assert sum(one[2] for one in videos) / 1000 == totals.seconds


def test_many_patches_do_not_overflow():
    """A sum is wider than what is stored of a sample."""
    table = np.full((4, len(COLUMNS)), 2**31 - 1, dtype=np.int32)

    assert 4 * (2**31 - 1) == video_totals(table, np.zeros((0, len(MEDIA_COLUMNS)), dtype=np.int64)).patches

"""A plan in numbers: the same as counting by hand."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.align import align_plan
from packplan.core.errors import ArgumentError
from packplan.core.inspection import summarise, summarise_schedule, summarise_sources
from packplan.core.metrics import padded_positions
from packplan.core.plan import build_raw_plan
from packplan.core.samples.tables import COLUMNS, MEDIA_COLUMNS, DataFile, video_totals
from packplan.core.schedule import EpochSchedule
from tests.strategies import raw_lengths


@st.composite
def plans(draw):
    """Plans of every policy, and their lengths."""
    lengths, packing_length = draw(raw_lengths())
    options = {"allow_single_long": draw(st.booleans()), "min_fill_ratio": draw(st.sampled_from(["0", "0.65", "0.9"]))}
    try:
        return build_raw_plan(lengths, packing_length=packing_length, **options), lengths
    except ArgumentError:
        return build_raw_plan(lengths, packing_length=packing_length, drop_last=False), lengths


@given(plans())
def test_a_summary_counts_what_the_packs_hold(of):
    """Planned, dropped and skipped samples are all samples; fill is counted by pack."""
    plan, lengths = of
    summary = summarise(plan, lengths, supervised=[length // 2 for length in lengths])
    packs = plan.packs.tolist()
    filled = [min(1, sum(lengths[i] for i in pack) / plan.packing_length) for pack in packs]

    assert len(lengths) == summary.planned_samples + summary.dropped_samples + summary.skipped_samples
    assert sum(lengths) == summary.planned_tokens + summary.dropped_tokens + summary.skipped_tokens
    assert sum(map(len, packs)) == summary.planned_samples
    assert sum(lengths[i] for pack in packs for i in pack) == summary.planned_tokens
    assert sum(lengths[i] // 2 for pack in packs for i in pack) == summary.supervised_tokens
    assert summarise(plan, lengths).supervised_tokens is None
    assert summary.token_coverage == summary.planned_tokens / sum(lengths)
    assert summary.fill_mean == pytest.approx(sum(filled) / len(filled))
    assert summary.fill_worst == pytest.approx(min(filled))
    assert summary.fill_worst <= summary.fill_p5 <= 1
    assert sum(fill >= summary.fill_p5 for fill in filled) >= 0.95 * len(filled)
    assert summary.gap >= 0
    loads = [sum(lengths[i] for i in pack) for pack in packs]
    over = [load for load in loads if Fraction(load, plan.packing_length) > Fraction(11, 10)]
    assert (max(loads), len(over)) == (summary.longest_pack, summary.oversized_packs)
    assert summary.gap * plan.lower_bound == pytest.approx(len(packs) + len(plan.dropped_packs) - plan.lower_bound)
    event(f"dropped: {summary.dropped_packs > 0}, skipped: {summary.skipped_samples > 0}")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 8))
def test_padding_is_the_mean_over_all_batches(lengths, batch_size):
    """Each set of so many samples is as likely as another."""
    drawn = min(batch_size, len(lengths))
    longest = [max(batch) for batch in combinations(lengths, drawn)]

    assert padded_positions(lengths, batch_size=batch_size) == pytest.approx(len(lengths) * np.mean(longest))


@given(plans(), st.data())
def test_sources_divide_a_plan_between_them(of, data):
    """Each source has the counts of its own samples, and a pack counts for each source."""
    plan, lengths = of
    of_record = data.draw(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=3 * len(lengths)))
    while sum(not bad for _, bad in of_record) < len(lengths):
        of_record.append(("c", False))
    good = [number for number, (_, bad) in enumerate(of_record) if not bad][: len(lengths)]
    of_record = of_record[: good[-1] + 1]
    files = [DataFile(f"{number}.jsonl", name, "text", 1) for number, (name, _) in enumerate(of_record)]
    table = np.zeros((len(of_record), len(COLUMNS)), np.int32)
    held = [n % 3 for n in lengths]
    for name, values in {
        "length": lengths,
        "supervised": [n // 2 for n in lengths],
        "images": [1] * len(lengths),
        "videos": held,
        "frames": [4 * n for n in held],
        "video_patches": [96 * n for n in held],
    }.items():
        table[good, COLUMNS.index(name)] = values
    table[:, COLUMNS.index("bad")] = [bad for _, bad in of_record]
    media = [milliseconds for n, videos in zip(lengths, held, strict=True) for milliseconds in (0, *[7 * n] * videos)]
    images = np.zeros((len(media), len(MEDIA_COLUMNS)), np.int64)
    images[:, MEDIA_COLUMNS.index("milliseconds")] = media

    sources = summarise_sources(plan.with_indices(np.array(good)), table, files, media=images)

    assert list(dict.fromkeys(name for name, _ in of_record)) == [one.name for one in sources]
    dropped, skipped = {i for pack in plan.dropped_packs for i in pack}, set(plan.skipped_long)
    for one in sources:
        own = {index for index, number in enumerate(good) if of_record[number][0] == one.name}
        parts = {"num": own, "planned": own - dropped - skipped, "dropped": own & dropped, "skipped": own & skipped}
        for part, held_by in parts.items():
            assert len(held_by) == getattr(one, f"{part}_samples")
            assert sum(lengths[i] for i in held_by) == getattr(one, f"{part}_tokens")
        assert (sum(lengths[i] // 2 for i in own), len(own)) == (one.supervised_tokens, one.images)
        assert max((lengths[i] for i in own), default=0) == one.longest_sample
        videos = sum(held[i] for i in own)
        assert (videos, 4 * videos, 96 * videos) == (one.videos, one.frames, one.video_patches)
        assert sum(7 * lengths[i] * held[i] for i in own) == one.video_milliseconds
        for percent, quantile in zip((5, 50, 95), one.length_quantiles, strict=bool(own)):
            assert sum(lengths[i] <= quantile for i in own) * 100 >= percent * len(own)
            assert sum(lengths[i] < quantile for i in own) * 100 < percent * len(own)
        assert sum(not own.isdisjoint(pack) for pack in plan.packs) == one.num_packs
        assert [file for file in files if file.source == one.name] == list(one.files)
        assert sum(bad and name == one.name for name, bad in of_record) == one.bad_records
    event(
        f"sources: {len(sources)}, bad records: {any(bad for _, bad in of_record)}, dropped: {plan.dropped_samples > 0}"
    )


def test_files_of_another_number_of_records_are_no_sources():
    """A breakdown of other data would be wrong in silence."""
    plan = build_raw_plan([3, 4], packing_length=8)
    with pytest.raises(ValueError, match="the files have 3 records, but 2 were measured"):
        table, images = np.ones((2, len(COLUMNS)), np.int32), np.zeros((4, len(MEDIA_COLUMNS)), np.int64)
        summarise_sources(plan, table, [DataFile("a", "a", "text", 3)], media=images)


@st.composite
def schedules(draw):
    """Plans and schedules over them, packed, or each sample alone and padded."""
    packed = draw(st.booleans())
    plan, lengths = draw(plans())
    if not packed:
        plan = build_raw_plan(lengths, packing_length=plan.packing_length, packing=False)
    world_size = draw(st.integers(1, 5))
    batch_size = 1 if packed else draw(st.integers(1, 3))
    schedule = EpochSchedule(
        num_packs=len(plan.packs),
        world_size=world_size,
        dataloader_drop_last=len(plan.packs) >= world_size * batch_size and draw(st.booleans()),
        gradient_accumulation_steps=draw(st.integers(1, 4)),
        num_train_epochs=draw(st.integers(1, 3)),
        batch_size=batch_size,
        seed=draw(st.integers(0, 9)),
    )
    return plan, lengths, schedule, packed


@given(schedules())
def test_a_schedule_is_summed_up_as_it_is_trained(drawn):
    """Steps and work are those of the batches of each rank."""
    plan, lengths, schedule, packed = drawn
    summary = summarise_schedule(plan, lengths, schedule, packed=packed)
    aligned = align_plan(plan, world_size=schedule.world_size, dataloader_drop_last=schedule.dataloader_drop_last)
    batches = [schedule.batches(0, rank=rank) for rank in range(schedule.world_size)]
    per_step = schedule.gradient_accumulation_steps

    def work(batch):
        if packed:
            return sum(lengths[i] ** 2 for pack in batch for i in plan.packs[pack])
        return len(batch) * max(lengths[plan.packs[pack][0]] for pack in batch) ** 2

    steps = [
        [sum(map(work, rank[start : start + per_step])) for rank in batches]
        for start in range(0, len(batches[0]), per_step)
    ]
    imbalances = [max(step) / (sum(step) / len(step)) for step in steps]

    assert len(aligned.packs) == summary.packs_per_rank * aligned.world_size
    assert aligned.pad_needed == summary.repeated_packs
    assert aligned.num_dropped == summary.unaligned_packs
    assert len(steps) == summary.steps_per_epoch
    assert schedule.total_steps == summary.total_steps
    assert len(batches[0]) - (len(steps) - 1) * per_step == summary.last_step_batches
    assert schedule.world_size * schedule.batch_size * per_step == summary.effective_batch_size
    assert sum(map(sum, steps)) / len(steps) == pytest.approx(summary.work_per_step)
    assert sum(imbalances) / len(steps) == pytest.approx(summary.work_imbalance)
    assert max(imbalances) == pytest.approx(summary.worst_work_imbalance)
    event(f"ragged: {summary.last_step_batches < per_step}, repeated: {summary.repeated_packs > 0}, packed: {packed}")


def test_padded_batches_have_no_fill_and_no_gap():
    """Nothing is packed, so nothing is saved; the counts stay."""
    lengths = [60, 20, 90]
    summary = summarise(build_raw_plan(lengths, packing_length=80, packing=False), lengths, packed=False)

    assert (None,) * 5 == (
        summary.gap, summary.fill_mean, summary.fill_p5, summary.fill_worst, summary.padding_saved
    )  # fmt: skip
    assert (3, 3, 1.0) == (summary.num_packs, summary.planned_samples, summary.token_coverage)


VIDEO = st.tuples(st.integers(2, 768), st.integers(4, 2**20), st.integers(0, 7_200_000), st.booleans())
"""Frames that are sampled, patches, milliseconds, and whether it was decoded."""


@given(st.lists(st.lists(VIDEO, max_size=3), max_size=8), st.integers(0, 4))
def test_totals_are_the_sums_of_all_videos(samples, images):
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

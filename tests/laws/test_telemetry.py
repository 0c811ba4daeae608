"""Telemetry is what counting the batches one by one gives."""

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.inspection import summarise
from packplan.core.schedule import EpochSchedule, EpochStats, PackStats
from packplan.core.work.model import SampleWorks, WorkModel
from packplan.core.work.vision import VisionWork
from tests.laws.test_summary import schedules

MODEL = WorkModel(per_position=4, per_pair=2, vision=VisionWork(5, 1, 0, 0))


@st.composite
def trainings(draw):
    """Lengths, a plan over them, and a schedule over that, which drops no pack."""
    plan, lengths, schedule, packed = draw(schedules())
    schedule = attrs.evolve(schedule, dataloader_drop_last=False)
    works = None
    if draw(st.booleans()):
        images = np.array(draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths))))
        works = SampleWorks.from_lengths(MODEL, lengths, images=images, patches=4 * images)
    pack_stats = PackStats.from_plan(plan, np.array(lengths), packed=packed, works=works)
    return lengths, plan, schedule, pack_stats


def step_batches(schedule: EpochSchedule, step: int) -> list[list[list[int]]]:
    """Return each rank's batches in a step of the first epoch."""
    size = schedule.gradient_accumulation_steps
    return [schedule.batches(0, rank=rank)[step * size : (step + 1) * size] for rank in range(schedule.world_size)]


def works_and_widths(lengths, plan, batch, pack_stats) -> tuple[int, int]:
    """Return the work and the positions of a batch."""
    packed, works = pack_stats.packed, pack_stats.works
    indices = [index for pack in batch for index in plan.packs[pack]]
    samples = [lengths[index] for index in indices]
    if works is not None:
        widths = samples if packed else [max(samples)] * len(samples)
        text = sum(MODEL.per_position * width + MODEL.per_pair * width * (width + 1) / 2 for width in widths)
        return text + sum(works.media_flops[index] for index in indices), sum(widths)
    if packed:
        return sum(length**2 for length in samples), sum(samples)
    return len(samples) * max(samples) ** 2, len(samples) * max(samples)


@given(trainings(), st.data())
def test_a_window_is_what_its_batches_add_up_to(training, data):
    """Fill, work, imbalance, tokens and coverage of the steps from one to another."""
    lengths, plan, schedule, pack_stats = training
    stats = EpochStats.from_schedule(pack_stats, schedule, 0)
    start = data.draw(st.integers(0, schedule.num_remaining_steps(0) - 1))
    stop = data.draw(st.integers(start + 1, schedule.num_remaining_steps(0)))
    event(f"packed: {pack_stats.packed}")

    works, rows, total, packs, seen_before, seen = [], [], 0, [], set(), set()
    for step in range(stop):
        ranks = step_batches(schedule, step)
        # Ranks take turns: whether a pack is a repetition does not depend on which of the two is
        # called it.
        here = [pack for mine in ranks for batch in mine for pack in batch]
        (seen if step >= start else seen_before).update(here)
        if step >= start:
            packs += here
            measured = [[works_and_widths(lengths, plan, batch, pack_stats) for batch in mine] for mine in ranks]
            works.append([sum(work for work, _ in mine) for mine in measured])
            rows += zip(*([work for work, _ in mine] for mine in measured), strict=True)
            total += sum(width for mine in measured for _, width in mine)
    useful = sum(lengths[index] for pack in seen - seen_before for index in plan.packs[pack])
    samples = [index for pack in packs for index in plan.packs[pack]]
    long = set(plan.single_long)
    fills = [min(1, sum(lengths[i] for i in plan.packs[pack]) / plan.packing_length) for pack in packs]

    statistics = stats.statistics(start, stop)

    assert (total, useful) == (stats.num_positions(start, stop), stats.num_tokens(start, stop))
    assert sum(map(sum, works)) / len(works) == pytest.approx(statistics["work"])
    imbalances = [max(work) / (sum(work) / len(work)) for work in works]
    if schedule.world_size > 1:
        assert sum(imbalances) / len(imbalances) == pytest.approx(statistics["work_imbalance"])
    assert (schedule.world_size > 1) == ("work_imbalance" in statistics) == ("microbatch_imbalance" in statistics)
    waited = sum(map(max, rows)) / (sum(map(sum, rows)) / schedule.world_size)
    assert waited == pytest.approx(stats.microbatch_imbalance(start, stop))
    assert sum(index in long for index in samples) / len(samples) == statistics["long_share"]
    covered = {index for pack in seen | seen_before for index in plan.packs[pack]}
    assert len(covered) / len(lengths) == statistics["coverage"]
    if pack_stats.packed:
        assert len(samples) / len(packs) == statistics["samples_per_pack"]
        assert sum(fills) / len(fills) == pytest.approx(statistics["fill"])


@given(trainings())
def test_an_epoch_covers_what_the_plan_does(training):
    """Skipped and dropped samples are not covered; the parts of a resumed epoch add up."""
    lengths, plan, schedule, pack_stats = training
    whole = EpochStats.from_schedule(pack_stats, schedule, 0)
    num_steps = schedule.num_remaining_steps(0)
    statistics = whole.epoch_statistics(num_steps)

    assert plan.planned_samples / len(lengths) == statistics["epoch_coverage"]
    assert len(plan.skipped_long) == statistics["epoch_skipped_samples"]
    assert len(plan.skipped_long) / len(lengths) == statistics["epoch_skipped_share"]
    assert len(plan.single_long) == statistics["epoch_long_samples"]
    assert len(plan.single_long) / plan.planned_samples == statistics["epoch_long_share"]
    assert len(plan.single_long) / len(plan.packs) == statistics["epoch_long_pack_share"]
    if pack_stats.packed:
        assert summarise(plan, lengths).fill_worst == statistics["epoch_fill_min"]
        assert plan.fill == pytest.approx(statistics["epoch_fill_mean"])
    for stop in range(1, num_steps):
        resumed = EpochStats.from_schedule(pack_stats, attrs.evolve(schedule, start=schedule.progress_at(stop)), 0)
        rest = num_steps - stop
        assert statistics == pytest.approx(resumed.epoch_statistics(rest))
        assert whole.num_tokens(0, stop) + resumed.num_tokens(0, rest) == whole.num_tokens(0, num_steps)

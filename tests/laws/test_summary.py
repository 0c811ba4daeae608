"""A plan and its schedule in numbers, samples and steps: the same as counting by hand."""

import re
import statistics
from fractions import Fraction
from itertools import combinations

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.align import align_plan
from packplan.core.bounds import lower_bound
from packplan.core.errors import ArgumentError, counted
from packplan.core.inspection import (
    compare_packs,
    describe_few_positions,
    describe_long_samples,
    describe_resume,
    find_sample,
    scheduled_steps,
    summarise,
    summarise_schedule,
    summarise_sources,
)
from packplan.core.metrics import packing_metrics, padded_positions
from packplan.core.packs import Packs
from packplan.core.plan import build_raw_plan
from packplan.core.samples.tables import COLUMNS, MEDIA_COLUMNS, DataFile, video_totals
from packplan.core.surface import pack_figures, sample_figures
from tests import strategies
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
def test_a_packing_length_that_few_samples_fit_is_warned_of(of):
    """With a length that 95 % of the samples fit; records that are no samples do not count."""
    plan, lengths = of
    alone = [lengths[i] for i in plan.single_long if lengths[i] > plan.packing_length]
    event(f"warned: {2 * len(alone) > len(lengths)}, long samples are skipped: {bool(plan.skipped_long)}")

    text = describe_long_samples(plan, lengths, "--packing_length")

    assert bool(text) == (2 * len(alone) > len(lengths))
    if text:
        enough = int(re.search(r"--packing_length (\d+)", text)[1])
        shorter, fitting = (sum(length <= most for length in lengths) for most in (enough - 1, enough))
        assert shorter < 0.95 * len(lengths) <= fitting
        assert text.startswith(f"{len(alone)} of {counted(len(lengths), 'sample')} ")
        records = [*lengths, 0, 0]
        assert text == describe_long_samples(plan, records, "--packing_length")


@pytest.mark.parametrize(
    ("scaling", "most"),
    [({"factor": 2}, 1024), ({"factor": 2.0, "original_max_position_embeddings": None}, 1024), (None, 512),
     ({"full_attention": {"factor": 8}, "sliding_attention": {"factor": None}}, 4096), ({"mrope_section": [1]}, 512)],
)  # fmt: skip
def test_more_tokens_than_positions_are_warned_of(scaling, most):
    """Of any type of layer; not of images, to which mrope gives fewer positions."""
    config = {"thinker_config": {"text_config": {"max_position_embeddings": 512, "rope_scaling": scaling}}}

    assert not describe_few_positions([most], config)
    assert f" {most:,} positions of the model" in describe_few_positions([most + 1], config)
    assert ("mrope_section" in (scaling or {})) != bool(describe_few_positions([most + 1], config, media=True))


@given(plans())
def test_a_summary_counts_what_the_packs_hold(of):
    """Planned, dropped and skipped samples are all samples; fill is counted by pack."""
    plan, lengths = of
    summary = summarise(plan, lengths, supervised=[length // 2 for length in lengths])
    packs = plan.packs.tolist()
    loads = [sum(lengths[i] for i in pack) for pack in packs]
    filled = [min(1, load / plan.packing_length) for load in loads]
    over = [load for load in loads if Fraction(load, plan.packing_length) > Fraction(11, 10)]
    event(f"dropped: {summary.dropped_packs > 0}, skipped: {summary.skipped_samples > 0}")

    assert len(lengths) == summary.planned_samples + summary.dropped_samples + summary.skipped_samples
    assert sum(lengths) == summary.planned_tokens + summary.dropped_tokens + summary.skipped_tokens
    assert (sum(map(len, packs)), sum(loads)) == (summary.planned_samples, summary.planned_tokens)
    assert sum(lengths[i] // 2 for pack in packs for i in pack) == summary.supervised_tokens
    assert summarise(plan, lengths).supervised_tokens is None
    assert summary.token_coverage == summary.planned_tokens / sum(lengths)
    assert [statistics.fmean(filled), min(filled)] == pytest.approx([summary.fill_mean, summary.fill_worst])
    assert summary.fill_worst <= summary.fill_p5 <= 1
    assert sum(fill >= summary.fill_p5 for fill in filled) >= 0.95 * len(filled)
    assert (max(loads), len(over)) == (summary.longest_pack, summary.oversized_packs)
    beyond = len(packs) + len(plan.dropped_packs) - plan.lower_bound
    assert summary.gap * plan.lower_bound == pytest.approx(beyond)
    assert beyond >= 0
    assert packing_metrics(lengths, plan.packs, capacity=plan.packing_length).gap >= 0


@given(plans(), st.booleans(), st.integers(0, 9))
def test_each_figure_is_the_number_of_its_field(of, supervised, auto_packs):
    """Figures that were not measured are left out; those of packs are, where samples share none."""
    plan, lengths = of
    summary = summarise(plan, lengths, supervised=lengths if supervised else None)
    summary = attrs.evolve(summary, auto_packs=auto_packs)
    event(f"supervised: {supervised}, by auto: {auto_packs > 0}")

    figures = {figure.key: figure.value for figure in (*sample_figures(summary), *pack_figures(summary))}
    whole = {key for key in figures if isinstance(getattr(summary, key), int)}
    assert {key: f"{getattr(summary, key):,}" for key in whole} == {key: figures[key] for key in whole}
    assert (supervised, auto_packs > 0) == ("supervised_tokens" in figures, "auto_packs" in figures)
    padded = {figure.key for figure in sample_figures(summary, packed=False)}
    assert {"dropped_samples", "long_samples"} == {figure.key for figure in sample_figures(summary)} - padded


_FEW_PACKS = st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=3).map(sorted), min_size=1, max_size=6)


@given(_FEW_PACKS, _FEW_PACKS)
def test_plans_are_compared_by_the_packs_of_each_sample(first, second):
    """Of any packs, a sample in several of them too; equal packs differ in nothing."""
    before, after = ({i: {tuple(pack) for pack in of if i in pack} for i in range(6)} for of in (first, second))
    changed = {i for i in range(6) if before[i] != after[i]}
    expected = {
        "new": [i for i in changed if not before[i]],
        "gone": [i for i in changed if not after[i]],
        "moved": [i for i in changed if before[i] and after[i]],
    }
    found = compare_packs(Packs.from_lists(first), Packs.from_lists(second))

    assert expected == {kind: samples.tolist() for kind, samples in found.items()}
    assert not any(samples.size for samples in compare_packs(*[Packs.from_lists(first)] * 2).values())


@given(strategies.packable(min_size=1))
def test_packing_efficiency_metrics_are_as_the_specification_defines_them(case):
    """In plain Python, pack by pack, in whatever form a script holds the packs."""
    lengths, capacity = case
    packs = build_raw_plan(lengths, packing_length=capacity).packs.tolist()
    shares = [sum(lengths[i] for i in members) / capacity for members in packs]

    found = packing_metrics(lengths, packs, capacity=capacity)

    mean = statistics.fmean(shares)
    assert [mean, 1 - mean, 1 - statistics.pstdev(shares) / mean] == pytest.approx(
        [found.utilisation, found.waste_ratio, found.balance]
    )
    assert -(-sum(lengths) // capacity) / len(packs) == found.efficiency
    assert len(packs) / lower_bound(lengths, capacity=capacity) - 1 == pytest.approx(found.gap)
    again = packing_metrics(lengths, Packs.from_lists(packs), capacity=capacity, bound=found.lower_bound)
    assert found == again
    twice, both = found + found, packing_metrics(lengths * 2, packs * 2, capacity=capacity, bound=1)
    assert (2 * len(packs), found.gap) == (twice.num_packs, pytest.approx(twice.gap))
    assert (both.sum_of_fills, both.sum_of_squared_fills, both.num_tokens) == (
        twice.sum_of_fills,
        twice.sum_of_squared_fills,
        twice.num_tokens,
    )


@pytest.mark.parametrize(
    ("packs", "bound", "named"),
    [
        ([], None, "no pack"), ([[0, 7]], None, "sample 7"), ([[0], [1]], 0, "bound is 0"),
        ([[1], [0, 1]], None, "pack 1 has several samples and 3 tokens, but the capacity is 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused(packs, bound, named):
    """No pack, a sample without a length, a bound below one, a pack over the capacity."""
    assert 3.0 == packing_metrics([1, 1], [[0, 1]] * 4, capacity=2).gap, "one pack holds both"
    with pytest.raises(ValueError, match=named):
        packing_metrics([1, 2], Packs.from_lists(packs), capacity=2, bound=bound)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 8))
def test_padding_is_the_mean_over_all_batches(lengths, batch_size):
    """Each set of so many samples is as likely as another."""
    drawn = min(batch_size, len(lengths))
    longest = [max(batch) for batch in combinations(lengths, drawn)]

    assert padded_positions(lengths, batch_size=batch_size) == pytest.approx(len(lengths) * np.mean(longest))


@given(plans(), st.data())
def test_sources_divide_a_plan_between_them(of, data):
    """Each has the counts of its own samples, and a pack counts for each; totals are sums."""
    plan, lengths = of
    owners = data.draw(st.lists(st.sampled_from("abc"), min_size=len(lengths), max_size=len(lengths)))
    bad = data.draw(st.lists(st.sampled_from("abc"), max_size=9))
    good = np.sort(data.draw(st.permutations(range(len(lengths) + len(bad))))[: len(lengths)])
    of_record = np.empty(len(lengths) + len(bad), dtype="U1")
    of_record[good] = owners
    is_bad = ~np.isin(np.arange(of_record.size), good)
    of_record[is_bad] = bad
    files = [DataFile(f"{number}.jsonl", str(name), "text", 1) for number, name in enumerate(of_record)]
    held = np.array(lengths) % 3
    table = np.zeros((of_record.size, len(COLUMNS)), np.int32)
    for name, values in {
        "length": lengths, "supervised": np.array(lengths) // 2, "images": 1, "videos": held, "frames": 4 * held,
        "video_patches": 96 * held,
    }.items():  # fmt: skip
        table[good, COLUMNS.index(name)] = values
    table[:, COLUMNS.index("bad")] = is_bad
    media = [milliseconds for n, videos in zip(lengths, held, strict=True) for milliseconds in (0, *[7 * n] * videos)]
    images = np.zeros((len(media), len(MEDIA_COLUMNS)), np.int64)
    images[:, MEDIA_COLUMNS.index("milliseconds")] = media
    images[::2, MEDIA_COLUMNS.index("decoded")] = 1
    event(f"sources: {len({*of_record})}, bad records: {bool(bad)}, dropped: {plan.dropped_samples > 0}")

    sources = summarise_sources(plan.with_indices(good), table, files, media=images)
    totals = video_totals(table, images)

    assert (sum(media) / 1000, -(-len(media) // 2)) == (totals.seconds, totals.decoded)
    for ours, theirs in (("videos", "videos"), ("frames", "frames"), ("patches", "video_patches")):
        assert getattr(totals, ours) == sum(getattr(one, theirs) for one in sources)
    assert [*dict.fromkeys(of_record.tolist())] == [one.name for one in sources]
    dropped, skipped = set(plan.dropped_packs.indices.tolist()), set(plan.skipped_long)
    for one in sources:
        own = {index for index, name in enumerate(owners) if name == one.name}
        parts = {"num": own, "planned": own - dropped - skipped, "dropped": own & dropped, "skipped": own & skipped}
        for part, members in parts.items():
            counts = getattr(one, f"{part}_samples"), getattr(one, f"{part}_tokens")
            assert (len(members), sum(lengths[i] for i in members)) == counts
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
        assert bad.count(one.name) == one.bad_records


def test_files_of_another_number_of_records_are_no_sources():
    """A breakdown of other data would be wrong in silence."""
    plan = build_raw_plan([3, 4], packing_length=8)
    with pytest.raises(ValueError, match="files have 3 records, but a table has 2"):
        table, images = np.ones((2, len(COLUMNS)), np.int32), np.zeros((4, len(MEDIA_COLUMNS)), np.int64)
        summarise_sources(plan, table, [DataFile("a", "a", "text", 3)], media=images)


@st.composite
def schedules(draw):
    """Plans and schedules over them, packed, or each sample alone and padded."""
    plan, lengths = draw(plans())
    schedule = attrs.evolve(draw(strategies.schedules()), dataloader_drop_last=False, works=None)
    packed = schedule.batch_size == 1 and draw(st.booleans())
    if not packed:
        plan = build_raw_plan(lengths, packing_length=plan.packing_length, packing=False)
    num = len(plan.packs)
    drop_last = num >= schedule.world_size * schedule.batch_size and draw(st.booleans())
    return plan, lengths, attrs.evolve(schedule, num_packs=num, dataloader_drop_last=drop_last), packed


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

    starts = range(0, len(batches[0]), per_step)
    steps = [[sum(map(work, rank[start : start + per_step])) for rank in batches] for start in starts]
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


@given(strategies.schedules(), st.data())
def test_a_resumed_run_says_what_is_trained_and_what_is_left(schedule, data):
    """Trained and left together are the epoch's packs; steps are those of the whole run."""
    step = data.draw(st.integers(schedule.start.step, max(schedule.start.step, schedule.total_steps - 1)))
    resumed = attrs.evolve(schedule, start=schedule.progress_at(step))
    said = describe_resume(resumed)

    assert said.startswith(f"after step {step:,}")
    assert f"{max(0, schedule.total_steps - step):,} step" in said
    assert said.endswith(f" left, {schedule.total_steps:,} in all")
    if resumed.start.epoch_step:
        first, rest = (
            int(one.replace(",", "")) for one in re.findall(r": ([\d,]+) .*?, ([\d,]+) (?:is|are) not", said)[0]
        )
        assert resumed.num_epoch_slots(resumed.start.epoch) == first + rest


def test_padded_batches_have_no_fill_and_no_gap():
    """Nothing is packed, so nothing is saved; the counts stay."""
    lengths = [60, 20, 90]
    summary = summarise(build_raw_plan(lengths, packing_length=80, packing=False), lengths, packed=False)

    assert (None,) * 5 == (
        summary.gap, summary.fill_mean, summary.fill_p5, summary.fill_worst, summary.padding_saved
    )  # fmt: skip
    assert (3, 3, 1.0) == (summary.num_packs, summary.planned_samples, summary.token_coverage)


@given(plans())
def test_every_sample_has_its_place(of):
    """A sample is in a pack, dropped or skipped; one beyond the data has no place."""
    plan, lengths = of
    for sample in range(len(lengths)):
        place = find_sample(plan, sample)
        packs = plan.dropped_packs if place.kind == "dropped" else plan.packs

        assert (place.kind == "skipped") == (sample in plan.skipped_long)
        assert (place.kind == "long") == (sample in plan.single_long)
        assert (place.kind == "dropped") == any(sample in pack for pack in plan.dropped_packs)
        assert (place.pack is None) == (place.kind == "skipped")
        if place.pack is not None:
            assert packs[place.pack] == list(place.pack_members)
            assert sample in place.pack_members
    assert ("absent", None, ()) == attrs.astuple(find_sample(plan, len(lengths)))


@given(schedules())
def test_every_turn_of_a_pack_is_one_that_a_rank_takes(drawn):
    """All turns of all packs are all batches of all ranks."""
    _, _, schedule, _ = drawn
    taken = sorted(
        (pack, number // schedule.gradient_accumulation_steps, rank)
        for rank in range(schedule.world_size)
        for number, batch in enumerate(schedule.batches(0, rank=rank))
        for pack in batch
    )

    found = sorted(
        (pack, turn.step, turn.rank) for pack in range(schedule.num_packs) for turn in scheduled_steps(schedule, pack)
    )
    assert taken == found


@given(schedules(), st.data())
def test_figures_are_those_of_the_samples_whatever_records_lie_between(drawn, data):
    """A record of length 0 is no sample: it moves the indices of others, and changes no figure."""
    plan, lengths, schedule, packed = drawn
    gaps = data.draw(st.lists(st.integers(1, 3), min_size=len(lengths), max_size=len(lengths)))
    indices = np.cumsum(gaps) - 1
    among = np.zeros(indices[-1] + data.draw(st.integers(1, 3)), np.int64)
    among[indices] = lengths
    moved = plan.with_indices(indices)
    event(f"records between: {len(among) > len(lengths)}, long: {bool(plan.single_long)}, packed: {packed}")

    assert summarise(plan, lengths, packed=packed) == summarise(moved, among, packed=packed)
    figures = [summarise_schedule(*of, schedule, packed=packed) for of in ((plan, lengths), (moved, among))]
    assert figures[0] == figures[1]
    assert [find_sample(moved, index).kind for index in indices] == [
        find_sample(plan, i).kind for i in range(len(lengths))
    ]
    assert all(find_sample(moved, record).kind == "absent" for record in np.flatnonzero(among == 0).tolist())

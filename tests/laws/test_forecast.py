"""A forecast is the sum of what was measured: of steps, of ranks, of pauses."""

from itertools import pairwise

import attrs
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from packplan.core.forecast import (
    REPEATS,
    Calibration,
    MeasuredStep,
    Pause,
    StepFlops,
    TimeModel,
    Timing,
    calibration_packs,
    fit_steps,
    forecast_run,
)
from packplan.core.packs import Packs
from packplan.core.schedule import EpochStats
from packplan.core.work.model import SampleWorks
from tests.laws.test_telemetry import MODEL, trainings

COEFFICIENTS = st.floats(0.01, 10)


@st.composite
def step_times(draw):
    """Seconds by term; at least a step takes some."""
    others = (
        draw(st.sampled_from([0.0, 1.0]).flatmap(lambda one: st.just(one) if not one else COEFFICIENTS)) for _ in "1234"
    )
    return TimeModel(draw(COEFFICIENTS), *others)


def steps_of(time, terms, *, slowed=()):
    """Return steps with these terms that take what the coefficients say, some of them thrice."""
    steps = [MeasuredStep(*map(float, one), 1.0) for one in terms]
    return [
        attrs.evolve(
            one, microbatches=int(one.microbatches), seconds=one.predict_seconds(time) * (3 if number in slowed else 1)
        )
        for number, one in enumerate(steps)
    ]


TERMS = st.lists(st.tuples(*[st.integers(1, 50)] * 4), min_size=12, max_size=24, unique=True)


@given(step_times(), TERMS, TERMS)
def test_steps_that_follow_the_terms_are_predicted_exactly(time, seen, others):
    """Also steps that were not measured, where the measured ones vary in every direction."""
    found = fit_steps(steps_of(time, seen))
    spans = np.linalg.matrix_rank(np.column_stack([np.ones(len(seen)), seen])) == 5
    event(f"vary in every direction: {spans}")

    assert min(attrs.astuple(found)) >= 0
    for one in steps_of(time, seen + others if spans else seen):
        assert one.seconds == pytest.approx(one.predict_seconds(found), rel=1e-5)


def test_slowed_steps_do_not_count_and_what_does_not_vary_is_part_of_the_constant():
    """Least squares would count a quarter that takes thrice as long; what is absent stays 0."""
    time, terms = TimeModel(1, 0, 2, 0, 0), [(1, number, 0, 0) for number in range(1, 25)]

    found = fit_steps(steps_of(time, terms, slowed=range(0, 24, 4)))
    constant = fit_steps(steps_of(TimeModel(1, 2, 3, 0, 0), [(4, 5, number, 0) for number in range(1, 9)]))

    assert attrs.astuple(time) == pytest.approx(attrs.astuple(found))
    assert (0, 0, 0) == (constant.microbatch, constant.text, constant.vision)
    assert constant.step == pytest.approx(1 + 2 * 4 + 3 * 5)


@given(trainings(), step_times(), st.sampled_from(["step", "microbatch"]), st.integers(0, 9))
def test_a_step_takes_as_long_as_its_busiest_ranks(training, time, sync_at, done):
    """One by one, over ranks and microbatches; an epoch, from where a run resumes."""
    lengths, plan, schedule, stats = training
    schedule = attrs.evolve(schedule, sync_at=sync_at, start=schedule.progress_at(done % schedule.total_steps))
    images = np.arange(len(lengths)) % 3
    flops = SampleWorks.from_lengths(MODEL, lengths, images=images, patches=4 * images)
    epoch = schedule.progress_at(schedule.start.step).epoch
    terms = StepFlops.from_epoch(EpochStats.from_schedule(stats, schedule, epoch), flops, sync_at=sync_at)
    event(f"packed: {stats.packed}, {sync_at}")

    def seconds(batch):
        samples = [index for pack in batch for index in plan.packs[pack]]
        widths = [lengths[index] for index in samples]
        widths = widths if stats.packed else [max(widths)] * len(widths)
        text, attention = 4 * sum(widths), 2 * sum(width * (width + 1) / 2 for width in widths)
        media = sum(flops.media_flops[index] for index in samples)
        return time.microbatch + time.text * text + time.attention * attention + time.vision * media

    window = schedule.gradient_accumulation_steps
    ranks = [[seconds(batch) for batch in schedule.batches(epoch, rank=rank)] for rank in range(schedule.world_size)]
    for number, found in enumerate(terms.seconds(time)):
        here = [rank[number * window : (number + 1) * window] for rank in ranks]
        waits = max(map(sum, here)) if sync_at == "step" else sum(map(max, zip(*here, strict=True)))
        assert found == pytest.approx(time.step + waits)
    assert number + 1 == schedule.num_remaining_steps(epoch)
    # Coefficients of 1 find the busiest rank by FLOPs, so that the fit sees what they predict.
    busiest = terms.busiest_flops().sum(axis=1)
    assert busiest == pytest.approx(terms.seconds(TimeModel(0, 0, 1, 1, 1)))


@given(st.integers(0, 9), st.integers(0, 50), st.booleans())
def test_pauses_follow_the_steps_of_their_interval_and_the_last(every, num_steps, at_start):
    """The last step of a run has one, once; one at the start is one more."""
    times = [step for step in range(1, num_steps + 1) if every and (not step % every or step == num_steps)]

    assert 2.0 * (len(times) + at_start) == Pause(2.0, every, at_start=at_start).total_seconds(num_steps)


@given(trainings(), step_times(), st.tuples(st.integers(0, 5), st.integers(0, 5)))
def test_a_run_takes_its_steps_and_pauses(training, time, every):
    """Steps of later epochs take as long as the mean step of the first."""
    lengths, _, schedule, stats = training
    flops = SampleWorks.from_lengths(MODEL, lengths)
    timing = Timing(time, 12, evaluation=0.5, checkpoint=7.0)
    trained = EpochStats.from_schedule(stats, schedule, 0)
    forward = StepFlops.from_epoch(trained, flops, sync_at=schedule.sync_at) if every[0] else None
    found = forecast_run(timing, trained, schedule, flops, evaluated=forward, every=every)
    event(f"epochs: {schedule.num_epochs}")

    steps = [found.steps[step] if step < len(found.steps) else found.steps.mean() for step in range(found.total_steps)]
    pauses = sum(pause.total_seconds(schedule.total_steps) for pause in (found.evaluation, found.checkpoint))
    assert found.seconds == pytest.approx(sum(steps) + pauses)
    assert 7.0 == found.checkpoint.seconds
    assert found.evaluation.seconds == pytest.approx(
        0.5 * (found.epoch_seconds - time.step * len(found.steps)) if every[0] else 0
    )
    assert found.tokens_per_second == pytest.approx(found.tokens / sum(found.steps))
    assert found.uncertainty is None


def test_exact_steps_leave_no_uncertainty_and_uneven_ones_do():
    """Its error is that of steps that were left out; an evaluation is a share of training."""
    time, terms = TimeModel(1, 0, 2, 0, 0), [(1, number, 0, 0) for number in range(1, 25)]
    exact = Calibration(tuple(steps_of(time, terms)), MeasuredStep(1, 50, 0, 0, 25), 3.0).fit_timing()
    uneven = Calibration(tuple(steps_of(time, terms, slowed=range(0, 24, 3)))).fit_timing()
    assert Calibration(tuple(steps_of(time, terms, slowed=(21, 22)))).fit_timing().step_error > 0.3  # each left out

    assert (0, 0) == pytest.approx((exact.step_error, exact.uncertainty(2.0, [2.0] * 7)), abs=1e-6)
    assert (0.25, 3.0) == pytest.approx((exact.evaluation, exact.checkpoint))
    assert 24 == exact.num_measured
    assert uneven.step_error > 0.5
    assert uneven.uncertainty(2.0, [2.1, 1.9] * 3) == pytest.approx(2 * 5**0.5 * 0.05)
    # A term that one step alone has is known where that step is not left out.
    rare = Calibration(tuple(steps_of(TimeModel(1, 0, 0, 0, 1), [(1, 1, 0, 0)] * 7 + [(1, 1, 0, 9)]))).fit_timing()
    assert (1, 1) == pytest.approx((rare.step_time.vision, rare.step_time.step + rare.step_time.text))
    assert rare.step_error > 0.5
    # Nothing varies in one step, so an evaluation is no share of anything.
    single = Calibration(tuple(steps_of(time, terms[:1])), MeasuredStep(1, 0, 0, 0, 25)).fit_timing()
    assert (3, 1 / 3) == pytest.approx((single.step_time.step, single.evaluation))


@given(st.data())
def test_calibration_trains_whole_steps_of_the_plans_packs(data):
    """Among them the lightest, the heaviest and those of most images; packs, or halves of them."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=40))
    starts = np.cumsum([0, *sizes])
    packs = Packs.from_lists([list(range(a, b)) for a, b in pairwise(starts)])
    number = st.integers(0, 9)
    work, vision = (np.array([data.draw(number) for _ in sizes], dtype=float) for _ in "12")
    world_size, batches, batch_size = (data.draw(st.integers(1, 3)) for _ in "123")
    order = np.arange(len(sizes))

    chosen = calibration_packs(
        packs, work, vision, order, world_size=world_size, batches=batches, batch_size=batch_size
    )

    each, short = world_size * batches * batch_size, world_size * batch_size * (batches > 1)
    whole, rest = divmod(len(chosen) - short, each)
    assert 0 == rest
    assert REPEATS * (whole + (short > 0)) >= 15
    listed = packs.tolist()
    halves = [pack[: -(-len(pack) // 2)] for pack in listed]
    assert all(pack in listed or pack in halves for pack in chosen)
    assert whole == 7 + (np.ptp(vision) > 0) + (batch_size == 1)
    steps = [
        [listed.index(pack) for pack in chosen[n * each : (n + 1) * each]] for n in range(whole - (batch_size == 1))
    ]
    assert (work.max(), work.min()) == (max(work[steps[0]]), min(work[steps[1]]))
    assert vision.max() == max(vision[pack] for step in steps for pack in step)
    assert steps[-2] == np.resize(order[:each], each).tolist()
    if batch_size == 1:
        assert all(pack in halves for pack in chosen[(whole - 1) * each : whole * each])

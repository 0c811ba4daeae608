"""Configuration -> plans, course and trainer: everything before the first step, the same for each command that trains."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import attrs

from adapters.checkpoints import find_checkpoint, read_attention, read_bookmark
from adapters.swift_samples import SwiftSamples
from adapters.swift_trainer import PackTrainer
from app import wiring, wiring_light
from app.course import Batch, batch_of, course_of, forced_batches, require_static, warn_of_ignored
from app.deadline import Deadline
from app.describe import describe
from app.planning import Knobs, PlannedSplit, bookmark_of, plan_split, usable_folders
from core.batch import partial_window
from core.config import RunConfig
from core.course import Bookmark, Course, Progress
from core.errors import PlanChangedError
from core.ports import RankGroup

log = logging.getLogger(__name__)


@attrs.frozen
class Prepared:
    """A run that is ready to train."""

    samples: Mapping[str, SwiftSamples]
    planned: Mapping[str, PlannedSplit]
    course: Course
    trainer: PackTrainer
    checkpoint: Path | None
    """To resume from."""


def prepare(config: RunConfig, group: RankGroup) -> Prepared:
    """
    Plan, and build the trainer.

    Raises:
        PackplanError: Something the user can mend, or something stored that is damaged.
    """
    require_static(config)
    training = config.training
    checkpoint = None
    if training.resume_from_checkpoint is not None:
        checkpoint = find_checkpoint(training.resume_from_checkpoint, training.output_dir, group=group)
    # What the settings alone can get wrong is found before hours of measuring.
    batch = batch_of(config, world_size=group.world_size)
    samples = wiring.open_samples(config)
    folders = [wiring_light.split_folder(training.output_dir, split) for split in samples]
    deadline = Deadline(training.packing_wait_timeout_s)
    group.from_rank_zero(lambda _: usable_folders(folders), timeout_s=deadline.left_s())
    arguments = wiring.open_arguments(config, batch.size, batch.accumulation)

    knobs = {split: Knobs.of(config, split) for split in samples}
    planned = {}
    for split, source in samples.items():
        planned[split] = plan_split(
            split,
            knobs[split],
            source=source,
            stores=wiring_light.open_stores(config, split),
            group=group,
            flush_every=training.packing_length_cache_persist_every,
            deadline=deadline,
        )
    group.settle()
    course = course_of(config, batch, num_packs=len(planned["train"].raw.packs), world_size=group.world_size)
    if checkpoint is not None:
        course = attrs.evolve(course, start=_progress_of(checkpoint, bookmark_of(planned["train"], course, config)))
    if group.rank == 0:
        warn_of_ignored(config)
        for split, plan in planned.items():
            for level, line in describe(plan, knobs[split], world_size=group.world_size):
                log.log(level, line)
        _log_course(config, batch, course)
        if checkpoint is not None:
            _log_attention(config, checkpoint)

    trainer = wiring.build_trainer(config, arguments, course, group=group, samples=samples, planned=planned)
    return Prepared(samples, planned, course, trainer, checkpoint)


def _progress_of(checkpoint: Path, now: Bookmark) -> Progress:
    """Return how far a checkpoint's run came; PlanChangedError if it came there on another plan."""
    then = read_bookmark(checkpoint)
    if differences := then.differences(now):
        raise PlanChangedError(str(checkpoint), differences)
    return then.progress


def _log_course(config: RunConfig, batch: Batch, course: Course) -> None:
    training, accumulation = config.training, batch.accumulation
    unit = "packs" if training.packing else "samples"
    for forced in forced_batches(config):
        log.warning("%s", forced)
    log.info(
        "effective batch: requested %d %s per optimizer step, realised %d = %d ranks x %d per device x %d accumulation",
        accumulation.requested,
        unit,
        accumulation.realised,
        course.world_size,
        batch.size,
        accumulation.gradient_accumulation_steps,
    )
    window = partial_window(
        per_rank_batches=course.batches_per_epoch, gradient_accumulation_steps=course.gradient_accumulation_steps
    )
    if window is not None:
        log.warning("%s", window)
    log.info(
        "optimizer steps: %d per epoch, %d in total (%d batches per rank and epoch)",
        course.steps_per_epoch,
        course.total_steps,
        course.batches_per_epoch,
    )
    if course.start.step:
        _log_resume(course, unit)


def _log_attention(config: RunConfig, checkpoint: Path) -> None:
    then, now = read_attention(checkpoint), wiring_light.attention_of(config).name
    if then not in (None, now):
        log.info("the checkpoint was trained by the attention %s; the run goes on by %s", then, now)


def _log_resume(course: Course, unit: str) -> None:
    start = course.start
    if start.step >= course.total_steps:
        log.warning(
            "the checkpoint is at optimizer step %d, and the run ends at %d: nothing is left to train; raise "
            "training.num_train_epochs or training.max_steps",
            start.step,
            course.total_steps,
        )
        return
    log.info(
        "resuming after optimizer step %d, in epoch %d: %d %s of it are consumed; the rest takes %d batches per rank and "
        "%d steps",
        start.step,
        start.epoch,
        course.consumed(start.epoch).size,
        unit,
        course.num_batches(start.epoch),
        course.num_steps(start.epoch),
    )
    before = start.stretches[-1].world_size if start.stretches else course.world_size
    if before != course.world_size:
        log.info(
            "the epoch began on %d ranks and goes on with %d: what it has not consumed is trained once, cut or "
            "filled for these ranks",
            before,
            course.world_size,
        )

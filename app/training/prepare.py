"""
Configuration -> plans, schedule and trainer: everything before the first step, the same for each
command that trains.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from adapters.trainer.checkpoints import find_checkpoint, read_attention, read_resume_state
from app.planning.deadline import Deadline
from app.planning.log_lines import describe
from app.planning.split import Alignment, PlannedSplit, plan_split, require_agreement, resume_state_of, usable_folders
from app.training.schedule import Batch, batch_of, forced_batches, require_static, schedule_of, warn_of_ignored
from app.training.works import Work, policy_of, work_of
from app.wiring import stores
from app.wiring import training as wiring
from core.batch import partial_window
from core.config import RunConfig
from core.errors import PlanChangedError, agree, counted
from core.ports import RankGroup
from core.schedule import EpochSchedule, Progress, ResumeState

if TYPE_CHECKING:
    from adapters.samples.encoder import SwiftSamples
    from adapters.trainer.static import PackTrainer

log = logging.getLogger(__name__)


@attrs.frozen
class Prepared:
    """A run that is ready to train."""

    samples: Mapping[str, SwiftSamples]
    planned: Mapping[str, PlannedSplit]
    schedule: EpochSchedule
    trainer: PackTrainer
    checkpoint: Path | None
    """To resume from."""


def prepare(config: RunConfig, group: RankGroup) -> Prepared:
    """
    Plan, and build the trainer.

    Raises:
        PackplanError: Something the user can fix, or something stored that is damaged.
    """
    require_static(config)
    training = config.training
    checkpoint = None
    if training.resume_from_checkpoint is not None:
        checkpoint = find_checkpoint(training.resume_from_checkpoint, training.output_dir, group=group)
    # What the settings alone can get wrong is found before hours of measuring.
    batch = batch_of(config, world_size=group.world_size)
    samples = wiring.open_samples(config)
    folders = [stores.split_folder(training.output_dir, split) for split in samples]
    deadline = Deadline(training.packing_wait_timeout_s)
    group.from_rank_zero(lambda _: usable_folders(folders), **deadline.wait())
    arguments = wiring.open_arguments(config, batch.size, batch.accumulation)

    policies = {split: policy_of(config, split) for split in samples}
    planned = {}
    for split, source in samples.items():
        planned[split] = plan_split(
            split,
            policies[split],
            alignment=Alignment.of(config, split),
            source=source,
            stores=stores.open_stores(config, split),
            group=group,
            flush_every=training.packing_length_cache_persist_every,
            deadline=deadline,
        )
    group.settle()
    work, raw = work_of(config, planned["train"].table), planned["train"].raw
    pack_works = raw.packs.loads(work.of.samples)
    # Ranks that counted other works would assign a step's packs in another way.
    require_agreement(group, "the work of the train packs", hashlib.sha256(pack_works.tobytes()).hexdigest())
    schedule = schedule_of(config, batch, planned["train"].aligned, pack_works)
    if checkpoint is not None:
        schedule = attrs.evolve(
            schedule, start=_progress_of(checkpoint, resume_state_of(planned["train"], schedule, config))
        )
    if group.rank == 0:
        warn_of_ignored(config)
        for split, plan in planned.items():
            for level, line in describe(plan, policies[split]):
                log.log(level, line)
        _log_schedule(config, batch, schedule)
        _log_work(work, schedule)
        if checkpoint is not None:
            _log_attention(config, checkpoint)

    trainer = wiring.build_trainer(
        config, arguments, schedule, group=group, samples=samples, planned=planned, works=work.of
    )
    return Prepared(samples, planned, schedule, trainer, checkpoint)


def _progress_of(checkpoint: Path, now: ResumeState) -> Progress:
    """Return how far a checkpoint's run came; PlanChangedError if it came there on another plan."""
    then = read_resume_state(checkpoint)
    if differences := then.differences(now):
        raise PlanChangedError(str(checkpoint), differences)
    return then.progress


def _log_schedule(config: RunConfig, batch: Batch, schedule: EpochSchedule) -> None:
    training, accumulation = config.training, batch.accumulation
    unit = "pack" if training.packing else "sample"
    for forced in forced_batches(config):
        log.warning("%s", forced)
    log.info(
        "effective batch: requested %s per optimizer step, realised %d = %s x %d per device x %d accumulation",
        counted(accumulation.requested, unit),
        accumulation.realised,
        counted(schedule.world_size, "rank"),
        batch.size,
        accumulation.gradient_accumulation_steps,
    )
    window = partial_window(
        per_rank_batches=schedule.batches_per_epoch, gradient_accumulation_steps=schedule.gradient_accumulation_steps
    )
    if window is not None:
        log.warning("%s", window)
    log.info(
        "optimizer steps: %d per epoch, %d in total (%s per rank and epoch)",
        schedule.steps_per_epoch,
        schedule.total_steps,
        counted(schedule.batches_per_epoch, "batch"),
    )
    if schedule.start.step:
        _log_resume(schedule, unit)


def _log_work(work: Work, schedule: EpochSchedule) -> None:
    if work.estimated:
        log.warning("work is estimated from tokens and their squares: %s", work.estimated)
    if schedule.works is None:
        return
    log.info(
        "packs of a step are assigned to ranks by work, which meet in each %s: %.3f %% above the bound "
        "(training.packing_balance)",
        schedule.meeting,
        100 * schedule.above_bound(schedule.start.epoch),
    )


def _log_attention(config: RunConfig, checkpoint: Path) -> None:
    then, now = read_attention(checkpoint), stores.attention_of(config).name
    if then not in (None, now):
        log.info("the checkpoint was trained by the attention %s; the run goes on by %s", then, now)


def _log_resume(schedule: EpochSchedule, unit: str) -> None:
    start = schedule.start
    if start.step >= schedule.total_steps:
        log.warning(
            "the checkpoint is at optimizer step %d, and the run ends at %d: nothing is left to train; raise "
            "training.num_train_epochs or training.max_steps",
            start.step,
            schedule.total_steps,
        )
        return
    log.info(
        "resuming after optimizer step %d, in epoch %d: %s of it %s consumed; the rest takes %s per rank and %s",
        start.step,
        start.epoch,
        counted(consumed := schedule.consumed(start.epoch).size, unit),
        agree(consumed),
        counted(schedule.num_batches(start.epoch), "batch"),
        counted(schedule.num_steps(start.epoch), "step"),
    )
    before = start.segments[-1].world_size if start.segments else schedule.world_size
    if before != schedule.world_size:
        log.info(
            "the epoch began on %s and goes on with %d: what it has not consumed is trained once, cut or "
            "filled for these ranks",
            counted(before, "rank"),
            schedule.world_size,
        )

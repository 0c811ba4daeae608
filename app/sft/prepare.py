"""
Configuration -> plans, schedule and trainer: everything before the first step, the same for each
command that trains.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from packplan.app.planning.deadline import Deadline
from packplan.app.planning.epochs import PlannedEpochs, plan_epochs
from packplan.app.planning.log_lines import log_epochs, log_plan, log_schedule
from packplan.app.planning.schedule import (
    batch_of,
    require_static,
    resume_state_of,
    split_schedule,
    warn_of_ignored,
)
from packplan.app.planning.split import GatheredSplit, PlannedSplit, plan_split, require_agreement, require_writable
from packplan.app.wiring.forecasts import find_timing, told_forecast
from packplan.app.wiring.gather import Gathered, gather
from packplan.app.wiring.training import (
    build_trainer,
    decide_attention,
    identity_of,
    open_arguments,
    open_checkpoint,
)
from packplan.app.wiring.works import Work, work_of
from packplan.core.config import RunConfig
from packplan.core.equality import AttentionChoice
from packplan.core.errors import agree, counted
from packplan.core.ports import RankGroup
from packplan.core.schedule import EpochSchedule, ResumeState, require_start

if TYPE_CHECKING:
    from packplan.adapters.samples.encoder import SwiftEncoder
    from packplan.adapters.trainer.checkpoints import Checkpoint
    from packplan.adapters.trainer.static import PackTrainer

log = logging.getLogger(__name__)


@attrs.frozen
class Prepared:
    """A run that is ready to train."""

    samples: Mapping[str, SwiftEncoder]
    planned: Mapping[str, PlannedSplit]
    schedule: EpochSchedule
    trainer: PackTrainer
    checkpoint: Checkpoint[ResumeState] | None
    """To resume from."""

    epochs: PlannedEpochs | None = None
    """Epochs that have plans of their own; `planned` has the plan of the first."""


def prepare(config: RunConfig, group: RankGroup, *, may_leak: bool = False) -> Prepared:
    """
    Decide the attention, plan, and build the trainer.

    Args:
        config: The run.
        group: All ranks.
        may_leak: Accept an attention under which samples of a pack might see each other, so that
            they can be compared.

    Raises:
        PackplanError: Something the user can fix, or something stored that is damaged.
    """
    require_static(config)
    attention = decide_attention(config, isolated=config.training.packing and not may_leak)
    checkpoint = open_checkpoint(config, group, ResumeState)
    # What the settings alone can get wrong is found before hours of measuring.
    batch = batch_of(config, world_size=group.world_size)
    gathered = gather(config)
    deadline = Deadline(config.training.packing_wait_timeout_s)
    require_writable(gathered.splits.values(), group=group, deadline=deadline)
    arguments = open_arguments(config, batch.size, batch.accumulation)

    planned = {name: plan_split(split, group=group, deadline=deadline) for name, split in gathered.splits.items()}
    timing, unused = find_timing(config, world_size=group.world_size, attention=attention.name)
    found = _scheduled(config, gathered.splits["train"], planned["train"], checkpoint, group=group, deadline=deadline)
    checkpoint = found.checkpoint
    group.settle()
    if group.rank == 0:
        _log(config, gathered, planned, found)
        _log_attention(attention, checkpoint)

    trainer = build_trainer(
        config,
        arguments,
        found.schedule,
        attention=attention,
        group=group,
        samples=gathered.samples,
        planned=planned,
        work=found.work,
        timing=timing,
        epochs=found.epochs,
        state=found.state,
    )
    if group.rank == 0:
        if trainer.forecast is not None:
            log.info("%s", told_forecast(trainer.forecast, group.world_size))
        if unused:
            log.info("a stored calibration is not used: %s", unused)
    return Prepared(gathered.samples, planned, found.schedule, trainer, checkpoint, found.epochs)


@attrs.frozen
class _Scheduled:
    """The packs of each step of a run, and what belongs to them."""

    schedule: EpochSchedule
    work: Work
    state: ResumeState
    """State that checkpoints are compared with."""

    epochs: PlannedEpochs | None
    """Epochs that have plans of their own."""

    checkpoint: Checkpoint[ResumeState] | None
    """Checkpoint that the run resumes from."""


def _scheduled(
    config: RunConfig,
    split: GatheredSplit,
    planned: PlannedSplit,
    checkpoint: Checkpoint[ResumeState] | None,
    *,
    group: RankGroup,
    deadline: Deadline,
) -> _Scheduled:
    """
    Schedule the packs of a run, from where it goes on.

    Args:
        config: The run.
        split: Samples that are trained.
        planned: Their plan.
        checkpoint: Checkpoint that the run resumes from.
        group: All ranks.
        deadline: Time that ranks wait for one another.

    Raises:
        StaleError: The checkpoint was made on another plan.
        PlanError: An epoch has no packs.
    """
    work = work_of(config, planned.table)
    pack_works = planned.raw.packs.sums(work.samples.flops)
    # Ranks that counted other works would assign a step's packs in another way.
    require_agreement(group, "the work of the train packs", hashlib.sha256(pack_works.tobytes()).hexdigest())
    schedule = split_schedule(config, "train", planned.aligned, pack_works)
    state = resume_state_of(planned, schedule, config, identity_of(config))
    if checkpoint is not None and checkpoint.resume_state.differences(state):
        # `last` goes on from an older one, where the newest is of other data or another plan.
        checkpoint = open_checkpoint(config, group, ResumeState, lambda then: then.differences(state))
    if checkpoint is not None:
        schedule = attrs.evolve(schedule, start=checkpoint.resume_state.progress)
    epochs = None
    if split.recipe is not None:
        schedule, epochs = plan_epochs(split, planned, schedule, works=work.samples, group=group, deadline=deadline)
    if checkpoint is not None:
        require_start(schedule, where=checkpoint.folder)
    return _Scheduled(schedule, work, state, epochs, checkpoint)


def _log(
    config: RunConfig,
    gathered: Gathered,
    planned: Mapping[str, PlannedSplit],
    found: _Scheduled,
) -> None:
    """
    Say what will be trained.

    Args:
        config: The run.
        gathered: Samples of the run.
        planned: Plans of its splits.
        found: Packs of each step.
    """
    warn_of_ignored(config)
    for name, plan in planned.items():
        log_plan(plan, gathered.splits[name].policy)
    if found.epochs is not None:
        log_epochs(found.epochs.records, found.schedule, gathered.splits["train"].source.data_files())
    log_schedule(config, found.schedule)
    if found.schedule.start.step:
        _log_resume(found.schedule, "pack" if config.training.packing else "sample")
    _log_work(found.work, found.schedule)


def _log_work(work: Work, schedule: EpochSchedule) -> None:
    if work.estimated:
        log.warning("work is estimated from tokens and their squares: %s", work.estimated)
    if schedule.works is None or schedule.world_size == 1:
        return
    log.info(
        "packs of a step are assigned to ranks by work, which meet in each %s: %.3f %% above the bound "
        "(training.packing_balance)",
        schedule.meeting,
        100 * schedule.above_bound(schedule.start.epoch),
    )


def _log_attention(attention: AttentionChoice, checkpoint: Checkpoint[ResumeState] | None) -> None:
    if checkpoint is not None and checkpoint.attention not in (None, attention.name):
        then = "the checkpoint was trained by the attention %s; the run goes on by %s"
        log.info(then, checkpoint.attention, attention.name)


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
    if not start.epoch_step:
        log.info(
            "going on after optimizer step %d with epoch %d, which takes %s per rank and %s",
            start.step,
            start.epoch,
            counted(schedule.num_batches(start.epoch), "batch"),
            counted(schedule.num_steps(start.epoch), "step"),
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

"""
Stages of a run, from its YAML to training steps; read the functions from top to bottom:

    config -> records and encoder -> lengths -> raw plan -> aligned plan -> schedule -> trainer

Every rank runs these functions. Only rank 0 measures and plans; the other ranks wait, and get the
result from rank 0. In each epoch, the schedule shuffles the raw plan's packs, and repeats or drops
packs in the same way as the aligned plan. The aligned plan itself is only stored, compared and
logged.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from packplan.app.opening.policies import position_warning, work_of_run
from packplan.app.opening.ranks import hold_output_lock
from packplan.app.opening.splits import open_splits
from packplan.app.opening.trainers import (
    build_trainer,
    match_checkpoint,
    open_arguments,
    open_checkpoint,
    resumable_plans,
    resume_state,
    warn_of_overwriting,
)
from packplan.app.opening.verdicts import decide_attention
from packplan.app.planning.log_lines import log_run
from packplan.app.planning.plan import Ranks, measure_and_plan, plan_epochs
from packplan.app.planning.schedule import refuse_stream, schedule_of_split
from packplan.app.planning.split import MeasuredSplit, PlannedSplit
from packplan.core.config.run import RunConfig
from packplan.core.errors import counted, format_command, verb_for
from packplan.core.inspection import format_table
from packplan.core.ports import RankGroup
from packplan.core.schedule import EpochSchedule, ResumeState

if TYPE_CHECKING:
    from packplan.adapters.trainer.trainer import CheckedTrainer, PlanTrainer

log = logging.getLogger(__name__)


def train(config: RunConfig, group: RankGroup) -> tuple[PlanTrainer, dict[str, MeasuredSplit]]:
    """
    Plan and train; return the trainer, and the splits that are trained and evaluated.

    If each epoch has its own plan, only the plans of the current and the next epoch are in memory.

    Raises:
        PackplanError: A setting, the data or the model is refused, or a stored file is damaged.
    """
    warn_of_overwriting(config.training, group)
    trainer, planned = prepare(config, group)
    splits: dict[str, MeasuredSplit] = {
        name: split if split.epochs is None else split.without_plan() for name, split in planned.items()
    }
    del planned
    with hold_output_lock(config, group), logging_interruption(trainer):
        trainer.train()
    _check_and_log_end(config, trainer)
    return trainer, splits


def prepare(
    config: RunConfig, group: RankGroup, *, may_leak: bool = False
) -> tuple[PlanTrainer, dict[str, PlannedSplit]]:
    """
    Choose the attention backend, measure, plan, schedule, and build the trainer; return the trainer
    and the splits.

    Args:
        config: The run.
        group: All ranks.
        may_leak: Whether to accept an attention backend that might mix the samples of a pack, so
            that packed and unpacked results can be compared.

    Raises:
        PackplanError: A setting, the data or the model is refused, or a stored file is damaged.
    """
    # Faults of the settings are found before hours of measuring.
    refuse_stream(config)  # `packplan check` and `plan time` prepare, too
    world_size = config.plan_world_size(group.world_size)
    attention = decide_attention(config, isolated=config.training.packing and not may_leak)
    checkpoint = open_checkpoint(config, group, ResumeState)
    arguments = open_arguments(config, world_size=world_size)

    opened = open_splits(config)  # records, and their encoder
    ranks = Ranks(group, timeout_s=config.training.packing_wait_timeout_s)
    # lengths, raw plan, aligned plan
    train = measure_and_plan(opened.pop("train"), ranks, world_size=world_size, resumable=resumable_plans(config))
    pack_works = train.pack_works
    # Ranks that counted other works would assign a step's packs in another way.
    ranks.require_same("the work of the train packs", hashlib.sha256(pack_works.tobytes()).hexdigest())
    schedule = schedule_of_split(config, "train", train.aligned, pack_works)
    state = resume_state(config, train, schedule)
    if checkpoint is not None:
        checkpoint = match_checkpoint(config, group, checkpoint, lambda then: then.differences(state))
        schedule = attrs.evolve(schedule, start=checkpoint.resume_state.progress)
    if train.recipe is not None:  # each epoch has a plan of its own
        train, schedule = plan_epochs(train, train.recipe, schedule, ranks)
    splits = {"train": train}
    for name, split in opened.items():  # planned only now: a resume may be refused first
        splits[name] = measure_and_plan(split, ranks, world_size=world_size)
    arguments.resume_from_checkpoint = checkpoint and checkpoint.folder
    group.stop_heartbeat()
    if group.rank == 0:
        _log_plans(config, list(splits.values()), schedule, str(attention))
        if checkpoint is not None and checkpoint.attention != attention.name:
            then = "the checkpoint was trained with attention %s; this run continues with %s"
            log.info(then, checkpoint.attention, attention.name)

    return build_trainer(config, arguments, splits, schedule, state, attention=attention, group=group), splits


def _log_plans(config: RunConfig, splits: list[PlannedSplit], schedule: EpochSchedule, attention: str) -> None:
    """Log the plans; warn if nothing is left to train, or if the work is only estimated."""
    log_run(config, splits, schedule, attention=attention)
    if schedule.start.step >= schedule.total_steps:
        log_nothing_left(schedule.start.step, f"at {schedule.total_steps:,}")
    if text := position_warning(config, splits[0].table):
        log.warning("train: %s", text)
    if estimated := work_of_run(config)[1]:
        log.warning("the work of samples is estimated from their tokens: %s", estimated)


def _check_and_log_end(config: RunConfig, trainer: PlanTrainer) -> None:
    """Log the end of training; RuntimeError if a run that may not stop early has other steps."""
    num_steps, schedule = trainer.state.global_step, trainer.schedule
    total = max(schedule.total_steps, schedule.start.step)
    if trainer.was_terminated:
        log_termination(trainer, str(total))
        return
    if num_steps != total and not config.training.trainer.get("early_stop_interval"):
        raise RuntimeError(f"the trainer ran {num_steps} optimizer steps, but {total} were planned")
    log_outcome(config, trainer)


@contextmanager
def logging_interruption(trainer: CheckedTrainer) -> Iterator[None]:
    """
    If Ctrl-C ends this context, log the number of finished steps and the last checkpoint on rank 0.
    """
    try:
        yield
    except KeyboardInterrupt:
        saved = f"the last checkpoint is {trainer.last_save}" if trainer.last_save else "no checkpoint was saved"
        if trainer.group.rank == 0:  # Ctrl-C reaches all ranks, which would say the same
            log.warning("interrupted after %s; %s", counted(trainer.state.global_step, "optimizer step"), saved)
        raise


def log_nothing_left(step: int, end: str) -> None:
    """
    Log that nothing is left to train after the checkpoint at *step*; *end* describes the end of the
    run.
    """
    fact = f"the checkpoint is at optimizer step {step:,}, and the run ends {end}: nothing is left to train"
    log.warning("%s; raise training.num_train_epochs or training.max_steps", fact)


def log_termination(trainer: CheckedTrainer, end: str) -> None:
    """Log that SIGTERM ended a run early; *end* is its last planned step, or its length as text."""
    text = "SIGTERM: a checkpoint is saved at step %d of %s; training.resume_from_checkpoint: %s continues from there"
    log.warning(text, trainer.state.global_step, end, trainer.last_save)


def log_outcome(config: RunConfig, trainer: CheckedTrainer) -> None:
    """
    Log the end of a run: its steps, the model's folder, the log file, and how to load the model.

    These lines are shown only on rank 0.
    """
    steps = trainer.state.global_step
    done = f"{counted(steps, 'optimizer step')} {verb_for(steps)} done"
    if trainer.last_save is None:
        log.info("%s; no checkpoint was saved (training.save_strategy)", done)
        return
    rows = {"model": trainer.last_save, "log": str(Path(trainer.args.output_dir) / "logging.jsonl")}
    if not trainer.is_sharded:
        rows["to try it"] = _inference_command(config, trainer, trainer.last_save)
    log.info("%s", format_table(done, rows))


def _inference_command(config: RunConfig, trainer: CheckedTrainer, checkpoint: str) -> str:
    """
    Return the ms-swift command that loads a checkpoint, with the settings that its files lack.
    """
    base = [config.model.model, "--adapters"] if config.training.adds_weights else []
    template = trainer.template
    flags = [("--model", *base, checkpoint)]
    kinds = {"model_type": template.model_meta.model_type, "template": template.template_meta.template_type}
    flags += [(f"--{name}", kind) for name, kind in kinds.items() if kind]
    return format_command("swift infer", *map(shlex.join, flags))

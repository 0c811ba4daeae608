"""
Fine-tune a model from a static pack plan: `python -m app.sft run.yaml`.

Under torchrun, rank 0 measures and plans, the other ranks wait for it; then all train.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import Any

import attrs

from adapters.swift_trainer import PackTrainer, checkpoint_to_resume, history, was_terminated
from app import wiring
from app.command import run_command
from app.describe import describe
from app.planning import Knobs, PlannedSplit, plan_split, usable_folders
from core.batch import Accumulation, Steps, batches_per_rank, count_steps, partial_window, resolve_accumulation
from core.config import RunConfig
from core.ports import RankGroup

# Not by __name__, which is __main__ when this module is the command.
log = logging.getLogger("app.sft")


@attrs.frozen
class Batch:
    """What one optimizer step is made of."""

    size: int
    """Of one rank: packs, or samples if not packing."""

    accumulation: Accumulation


@attrs.frozen
class Schedule:
    """What the trainer will do, counted before it starts."""

    batch: Batch

    per_rank_batches: int

    steps: Steps


@attrs.frozen
class Result:
    """What a run did."""

    planned: Mapping[str, PlannedSplit]
    schedule: Schedule
    num_steps: int
    terminated: bool
    """SIGTERM ended it; a checkpoint was saved."""

    history: list[Mapping[str, Any]]
    """What the trainer logged."""


def run(config: RunConfig, group: RankGroup) -> Result:
    """
    Plan and train.

    Raises:
        PackplanError: Something the user can mend, or something stored that is damaged.
    """
    wiring.require_isolation(config)
    resumed = checkpoint_to_resume(config.training.resume_from_checkpoint, config.training.output_dir)
    # What the settings alone can get wrong is found before hours of measuring.
    batch = batch_of(config, world_size=group.world_size)
    samples = wiring.open_samples(config)
    folders = [wiring.split_folder(config.training.output_dir, split) for split in samples]
    group.from_rank_zero(lambda _: usable_folders(folders), timeout_s=config.training.packing_wait_timeout_s)
    arguments = wiring.open_arguments(config, samples["train"], batch.size, batch.accumulation)

    knobs = {split: Knobs.of(config, split) for split in samples}
    planned = {}
    for split, source in samples.items():
        planned[split] = plan_split(
            split,
            knobs[split],
            source=source,
            stores=wiring.open_stores(config, split),
            group=group,
            flush_every=config.training.packing_length_cache_persist_every,
            timeout_s=config.training.packing_wait_timeout_s,
        )
    group.settle()
    schedule = schedule_of(config, batch, per_rank=planned["train"].aligned.per_rank)
    if group.rank == 0:
        for split, plan in planned.items():
            for level, line in describe(plan, knobs[split], world_size=group.world_size):
                log.log(level, line)
        _log_schedule(config, schedule, group.world_size)

    trainer = wiring.build_trainer(config, arguments, group=group, samples=samples, planned=planned)
    trainer.train(resume_from_checkpoint=resumed)
    return _result(config, trainer, planned, schedule)


def batch_of(config: RunConfig, *, world_size: int) -> Batch:
    """Return the batch of a run; BatchSizeError if the ranks cannot realise it."""
    training = config.training
    size = 1 if training.packing else training.per_device_train_batch_size
    accumulation = resolve_accumulation(
        effective_batch_size=training.effective_batch_size,
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        world_size=world_size,
        forced_batch_size=size,
    )
    return Batch(size, accumulation)


def schedule_of(config: RunConfig, batch: Batch, *, per_rank: int) -> Schedule:
    """
    Count what training will do.

    Args:
        config: The run.

        batch: What one optimizer step is made of.

        per_rank: Packs of one rank in an epoch; samples if not packing.
    """
    training = config.training
    batches = batches_per_rank(num_samples=per_rank, batch_size=batch.size, drop_last=training.dataloader_drop_last)
    steps = count_steps(
        per_rank_batches=batches,
        gradient_accumulation_steps=batch.accumulation.gradient_accumulation_steps,
        num_train_epochs=training.num_train_epochs,
        max_steps=training.max_steps,
    )
    return Schedule(batch, batches, steps)


def _log_schedule(config: RunConfig, schedule: Schedule, world_size: int) -> None:
    training, accumulation = config.training, schedule.batch.accumulation
    unit = "packs" if training.packing else "samples"
    if training.packing and training.per_device_train_batch_size != 1:
        log.warning(
            "packing forces training.per_device_train_batch_size from %d to 1; accumulation keeps the effective batch",
            training.per_device_train_batch_size,
        )
    if config.eval_packing and training.per_device_eval_batch_size != 1:
        log.warning(
            "packing forces training.per_device_eval_batch_size from %d to 1", training.per_device_eval_batch_size
        )
    log.info(
        "effective batch: requested %d %s per optimizer step, realised %d = %d ranks x %d per device x %d accumulation",
        accumulation.requested,
        unit,
        accumulation.realised,
        world_size,
        schedule.batch.size,
        accumulation.gradient_accumulation_steps,
    )
    window = partial_window(
        per_rank_batches=schedule.per_rank_batches,
        gradient_accumulation_steps=accumulation.gradient_accumulation_steps,
    )
    if window is not None:
        log.warning("%s", window)
    log.info(
        "optimizer steps: %d per epoch, %d in total (%d batches per rank and epoch)",
        schedule.steps.per_epoch,
        schedule.steps.total,
        schedule.per_rank_batches,
    )


def _result(config: RunConfig, trainer: PackTrainer, planned: Mapping[str, PlannedSplit], schedule: Schedule) -> Result:
    num_steps, terminated = trainer.state.global_step, was_terminated(trainer)
    if terminated and num_steps < schedule.steps.total:
        log.warning(
            "SIGTERM: saved a checkpoint at step %d of %d; training.resume_from_checkpoint: last goes on from there",
            num_steps,
            schedule.steps.total,
        )
    elif num_steps != schedule.steps.total and not config.training.trainer.get("early_stop_interval"):
        message = f"the trainer ran {num_steps} optimizer steps, but {schedule.steps.total} were planned"
        raise RuntimeError(message)
    return Result(planned, schedule, num_steps, terminated, history(trainer))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m app.sft", description=__doc__)
    parser.add_argument("config", metavar="run.yaml", help="the run; see docs/configuration.md")
    parser.add_argument("--verbose", action="store_true", help="also show what ms-swift and transformers log")
    options = parser.parse_args(arguments)

    def command() -> None:
        config = wiring.read_config(options.config)
        with wiring.joined_ranks(config.training.trainer) as group:
            run(config, group)

    return run_command(command, verbose=options.verbose)


if __name__ == "__main__":
    raise SystemExit(main())

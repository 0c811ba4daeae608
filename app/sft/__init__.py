"""
Fine-tune a model from a static pack plan: `packplan sft run.yaml`.

Under torchrun, rank 0 measures and plans, the other ranks wait for it; then all train.
"""

import logging
from collections.abc import Mapping
from typing import Any

import attrs

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import (
    add_config_arguments,
    add_logging_options,
    command_parser,
    parse_arguments,
    run_command,
)
from packplan.app.planning.split import PlannedSplit
from packplan.app.wiring import stores
from packplan.core.config import RunConfig
from packplan.core.epochs import EpochRecord
from packplan.core.ports import RankGroup
from packplan.core.schedule import EpochSchedule

log = logging.getLogger(__name__)


@attrs.frozen
class Result:
    """Result of a run."""

    planned: Mapping[str, PlannedSplit]
    """Plans by split; without `train` where each epoch has a plan of its own."""

    epochs: tuple[EpochRecord, ...]
    """Records of these epochs."""

    schedule: EpochSchedule
    num_steps: int
    terminated: bool
    """SIGTERM ended it; a checkpoint was saved."""

    history: list[Mapping[str, Any]]
    """Log entries of the trainer."""


def run(config: RunConfig, group: RankGroup) -> Result:
    """
    Plan and train.

    Raises:
        PackplanError: Something the user can fix, or something stored that is damaged.
    """
    from packplan.app.sft.outcome import interruption_logged, log_outcome
    from packplan.app.sft.prepare import prepare
    from packplan.app.wiring import training
    from packplan.app.wiring.forecasts import told_error

    prepared = prepare(config, group)
    trainer, schedule, checkpoint = prepared.trainer, prepared.schedule, prepared.checkpoint
    planned, epochs = dict(prepared.planned), prepared.epochs
    if epochs is not None:
        # While an epoch is trained, its plan and the next one are held, and no other.
        del planned["train"], prepared
    with training.alone_in_output(config, group), interruption_logged(trainer):
        trainer.train(resume_from_checkpoint=None if checkpoint is None else checkpoint.folder)
    num_steps, terminated = trainer.state.global_step, trainer.was_terminated
    total = max(schedule.total_steps, schedule.start.step)
    if terminated and num_steps < total:
        log.warning(
            "SIGTERM: saved a checkpoint at step %d of %d; training.resume_from_checkpoint: last goes on from there",
            num_steps,
            total,
        )
    elif num_steps != total and not config.training.trainer.get("early_stop_interval"):
        message = f"the trainer ran {num_steps} optimizer steps, but {total} were planned"
        raise RuntimeError(message)
    if trainer.forecast is not None and num_steps > trainer.forecast.first:
        log.info("%s", told_error(trainer.forecast, num_steps, trainer.real_seconds))
    if not terminated:
        log_outcome(config, trainer)
    records = () if epochs is None else epochs.records
    return Result(planned, records, schedule, num_steps, terminated, trainer.history)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("sft", __doc__)
    add_config_arguments(parser)
    add_logging_options(parser)
    options = parse_arguments(parser, arguments)

    def command() -> None:
        with stores.ranks_refuse_together():
            config = stores.read_config(options.config, options.overrides)
            stores.require_inputs(config, loads=True, trains=True)

            with loading_libraries():
                from packplan.app.sft import stream
                from packplan.app.wiring import training

            if options.quiet:
                config = training.without_progress(config)
        with training.joined_ranks(config) as group:
            if config.custom.trainer_variant == "rollout":
                stream.run(config, group)
            else:
                run(config, group)

    return run_command(command, verbose=options.verbose, quiet=options.quiet)

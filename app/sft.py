"""
Fine-tune a model from a static pack plan: `python -m app.sft run.yaml`.

Under torchrun, rank 0 measures and plans, the other ranks wait for it; then all train.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from app.command import add_logging_options, program, run_command
from app.planning import PlannedSplit
from core.config import RunConfig
from core.course import Course
from core.ports import RankGroup

if TYPE_CHECKING:
    from app.preparing import Prepared

# Not by __name__, which is __main__ when this module is the command.
log = logging.getLogger("app.sft")


@attrs.frozen
class Result:
    """What a run did."""

    planned: Mapping[str, PlannedSplit]
    course: Course
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
    from app import wiring
    from app.preparing import prepare

    wiring.require_isolation(config, packed=config.training.packing)
    prepared = prepare(config, group)
    checkpoint = prepared.checkpoint
    prepared.trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return _result(config, prepared)


def _result(config: RunConfig, prepared: Prepared) -> Result:
    from adapters.packing_trainer import history, was_terminated

    trainer, course = prepared.trainer, prepared.course
    num_steps, terminated = trainer.state.global_step, was_terminated(trainer)
    total = max(course.total_steps, course.start.step)
    if terminated and num_steps < total:
        log.warning(
            "SIGTERM: saved a checkpoint at step %d of %d; training.resume_from_checkpoint: last goes on from there",
            num_steps,
            total,
        )
    elif num_steps != total and not config.training.trainer.get("early_stop_interval"):
        message = f"the trainer ran {num_steps} optimizer steps, but {total} were planned"
        raise RuntimeError(message)
    return Result(prepared.planned, course, num_steps, terminated, history(trainer))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog=program("sft"), description=__doc__)
    parser.add_argument("config", metavar="run.yaml", help="the run; see docs/configuration.md")
    add_logging_options(parser)
    options = parser.parse_args(arguments)

    def command() -> None:
        from app import rollout, wiring

        config = wiring.read_config(options.config)
        if options.quiet:
            config = wiring.without_progress(config)
        with wiring.joined_ranks(config.training.trainer) as group:
            if config.custom.trainer_variant == "rollout":
                rollout.run(config, group)
            else:
                run(config, group)

    return run_command(command, verbose=options.verbose, quiet=options.quiet)


if __name__ == "__main__":
    raise SystemExit(main())

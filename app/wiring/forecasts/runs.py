"""Forecast of a run from its timing, its plan and its schedule; without torch."""

import math

import attrs
import numpy as np

from packplan.app.cli.forecasts import duration
from packplan.app.planning.schedule import split_schedule
from packplan.app.planning.split import PlannedSplit, table_works
from packplan.app.wiring.works import trained_work
from packplan.core.config import RunConfig
from packplan.core.errors import counted
from packplan.core.forecast import RunForecast, StepTerms, Timing, forecast_run
from packplan.core.samples import column
from packplan.core.schedule import EpochSchedule, EpochStats, PackStats
from packplan.core.work import SampleWorks


def run_forecast(
    config: RunConfig,
    timing: Timing,
    stats: PackStats,
    schedule: EpochSchedule,
    flops: SampleWorks,
    *,
    evaluated: PlannedSplit | None = None,
) -> RunForecast:
    """
    Return the forecast of a run.

    Args:
        config: The run.
        timing: Seconds of its parts.
        stats: Packs of the epoch of its next step.
        schedule: Order of its packs.
        flops: Works of its samples in FLOPs.
        evaluated: Plan of its evaluation; None without one.
    """
    trained = EpochStats.from_schedule(stats, schedule, schedule.at(schedule.start.step).epoch)
    forward = None if evaluated is None else evaluation_terms(config, evaluated)
    return forecast_run(
        timing, trained, schedule, flops, evaluated=forward, every=_every(config, schedule),
        evaluates_first=bool(config.training.trainer.get("eval_on_start")),
    )  # fmt: skip


def evaluation_terms(config: RunConfig, planned: PlannedSplit) -> StepTerms:
    """
    Return an evaluation as one step, since its ranks wait for each other at its end alone.

    Args:
        config: The run.
        planned: Plan of the evaluation.
    """
    flops = table_works(trained_work(config)[0], planned.table)
    lengths = column(planned.table, "length").astype(np.int64)
    stats = PackStats.from_plan(planned.raw, lengths, packed=config.eval_packing, works=flops)
    schedule = split_schedule(config, "eval", planned.aligned)
    whole = attrs.evolve(schedule, gradient_accumulation_steps=schedule.batches_per_epoch)
    return StepTerms.from_epoch(EpochStats.from_schedule(stats, whole, 0), flops, meeting="step")


def _every(config: RunConfig, schedule: EpochSchedule) -> tuple[int, int]:
    """Return the optimizer steps between two evaluations, and between two checkpoints."""
    trainer = config.training.trainer
    evaluates = trainer.get("eval_strategy", "epoch" if config.custom.val_jsonl else "no")
    eval_steps = trainer.get("eval_steps") or trainer.get("logging_steps", _LOGGING_STEPS)
    saves = trainer.get("save_strategy", "steps")

    def steps(strategy: str, every: float) -> int:
        if strategy == "no":
            return 0
        if strategy == "epoch":
            return schedule.steps_per_epoch
        return int(every) if every >= 1 else max(1, math.ceil(every * schedule.total_steps))

    evaluation = steps(evaluates, eval_steps) if config.custom.val_jsonl else 0
    return evaluation, evaluation if saves == "best" else steps(saves, trainer.get("save_steps", _SAVE_STEPS))


_LOGGING_STEPS, _SAVE_STEPS = 5, 500
"""Defaults of ms-swift."""


def told_forecast(forecast: RunForecast, world_size: int) -> str:
    """Return the measured seconds of a run in words, with their uncertainty and ranks."""
    return (
        f"predicted: {duration(forecast.seconds)} for {counted(forecast.last - forecast.first, 'optimizer step')} on "
        f"{counted(world_size, 'rank')} (+- {forecast.uncertainty:.1%}), {forecast.tokens_per_second:,.0f} tokens a "
        f"second; {forecast.timing.basis}"
    )


def told_error(forecast: RunForecast, step: int, real: float) -> str:
    """
    Return in words by how much a forecast was wrong.

    Args:
        forecast: Forecast of the run.
        step: Optimizer steps at the end.
        real: Seconds of the run.
    """
    predicted = forecast.seconds if step == forecast.last else forecast.until(step)
    wrong = f"{abs(predicted / real - 1):.1%} too {'long' if predicted > real else 'short'}"
    return f"trained for {duration(real)}; {duration(predicted)} were predicted, {wrong} ({forecast.timing.basis})"

"""
Predict how long training takes: each step, an epoch, the run, its evaluations and checkpoints.

The command first trains and times about thirty steps of the run's own packs, under torchrun on all
ranks, and deletes the trained weights. If no plan is stored, the command measures and plans the run
before these steps.
"""

import argparse
import json
from collections.abc import Iterator
from typing import Any

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import add_config_arguments, plain_console, time_text
from packplan.app.opening.runs import raising_on_all_ranks, read_config, require_inputs
from packplan.core.errors import counted
from packplan.core.forecast import RunForecast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document, with each step")


def run(options: argparse.Namespace) -> None:
    """Train and time some steps, and print the forecast on rank 0."""
    with raising_on_all_ranks():
        config = read_config(options.config, options.overrides)
        require_inputs(config, loads=True)
        with loading_libraries():
            from packplan.app.opening.forecasts import config_to_time, forecast_time
            from packplan.app.opening.ranks import hold_output_lock, join_ranks
            from packplan.app.opening.trainers import hide_trainer_progress
            from packplan.app.sft.train import prepare
    timed = hide_trainer_progress(config_to_time(config))
    with join_ranks(timed) as group, hold_output_lock(timed, group):
        trainer, splits = prepare(timed, group)
        forecast = forecast_time(config, trainer, splits, group)
    if group.rank:
        return
    ranks, device = config.plan_world_size(group.world_size), trainer.args.device.type
    if options.json:
        print(json.dumps({**as_document(forecast, world_size=ranks), "device": device}, indent=2))
        return
    console = plain_console(100)
    for name, value, remark in _forecast_rows(forecast, f"{counted(ranks, 'rank')} ({device})"):
        console.print(f"{name:<22}{value:>12}  {remark}", soft_wrap=True, highlight=False)


def as_document(forecast: RunForecast, *, world_size: int) -> dict[str, Any]:
    """Return a forecast for *world_size* ranks as values of a JSON document."""
    pauses = {"evaluation": forecast.evaluation, "checkpoint": forecast.checkpoint}
    return {
        "seconds": forecast.seconds,
        "uncertainty": forecast.uncertainty,
        "measured_steps": forecast.timing.num_measured,
        "step_error": forecast.timing.step_error,
        "steps": forecast.total_steps,
        "step_seconds": forecast.mean_step,
        "epoch_seconds": forecast.epoch_seconds,
        **{f"{name}_seconds": pause.seconds for name, pause in pauses.items()},
        **{f"{name}_every": pause.every for name, pause in pauses.items()},
        "tokens_per_second": forecast.tokens_per_second,
        "world_size": world_size,
        "steps_of_epoch": forecast.steps.tolist(),
    }


def _forecast_rows(forecast: RunForecast, ranks: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a printed forecast for *ranks*: name, value and remark."""
    sure = "" if forecast.uncertainty is None else f"+- {forecast.uncertainty:.1%} "
    basis = counted(forecast.timing.num_measured, "step")
    remark = f"{sure}on {ranks}, from {basis} measured here"
    yield "predicted time", time_text(forecast.seconds), remark
    yield "  tokens a second", f"{forecast.tokens_per_second:,.0f}", "without evaluations and checkpoints"
    steps = forecast.steps
    slowest = f"the fastest of an epoch {time_text(float(steps.min()))}, the slowest {time_text(float(steps.max()))}"
    error = forecast.timing.step_error
    remark = "on average" if error is None else f"{slowest}; 95 % of steps were predicted within {error:.1%}"
    yield "  an optimizer step", time_text(forecast.mean_step), remark
    yield "  an epoch", time_text(forecast.epoch_seconds), f"{counted(len(steps), 'step')}"
    for name, pause in (("an evaluation", forecast.evaluation), ("a checkpoint", forecast.checkpoint)):
        if pause.every and pause.seconds:
            yield f"  {name}", time_text(pause.seconds), f"after every {counted(pause.every, 'step')}, and at the end"

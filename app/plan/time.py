"""
Say how long training takes: each step, an epoch, the run, its evaluations and checkpoints.

With --calibrate, steps of the run's own packs are trained and timed first, under torchrun on all of
its ranks. What is measured is stored beside the plans, and used for runs on this machine.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import add_config_arguments, duration, plain_console, world_size
from packplan.app.plan.stored import open_split
from packplan.app.wiring.commands import read_run_or_command
from packplan.app.wiring.forecasts import attention_name, find_timing, run_forecast
from packplan.app.wiring.runs import ranks_refuse_together, read_config, require_inputs
from packplan.core.config.run import RunConfig
from packplan.core.errors import ConfigError, NotBuiltError, counted
from packplan.core.forecast import RunForecast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_config_arguments(parser)
    parser.add_argument("--calibrate", action="store_true", help="train and time steps of this run here first")
    parser.add_argument(
        "--world-size", type=world_size, metavar="N", help="ranks (default: the most that were built for)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, with each step, not a table")


def run(options: argparse.Namespace) -> None:
    """Measure if --calibrate is given, then print the forecast."""
    ranks = options.world_size
    if options.calibrate:
        if ranks is not None:
            raise ConfigError.at("--calibrate", "measures this machine's ranks: leave --world-size out")
        rank, ranks = _calibrate(options)
        if rank:
            return
    config = read_run_or_command(options.config, options.overrides, world_size=ranks)
    forecast, ranks = _forecast(config, world_size=ranks)
    if forecast is None:
        how = "--calibrate trains some here, and times them"
        print("null" if options.json else f"no step was measured on {counted(ranks, 'rank')}: {how}")
    elif options.json:
        print(json.dumps(as_document(forecast, world_size=ranks), indent=2))
    else:
        console = plain_console(100)
        for name, value, remark in _rows(forecast, world_size=ranks):
            console.print(f"{name:<22}{value:>12}  {remark}", soft_wrap=True, highlight=False)


def _forecast(config: RunConfig, *, world_size: int | None) -> tuple[RunForecast | None, int]:
    """Return the forecast of a run, None if nothing was measured, and its ranks."""
    opened = open_split(config, "train", world_size=world_size)
    train, ranks = opened.split, opened.schedule.world_size
    timing, unused = find_timing(config, world_size=ranks, attention=attention_name(config))
    if unused:
        print(f"warning: a stored calibration is not used: {unused}", file=sys.stderr)
    if timing is None:
        return None, ranks
    evaluated = None
    if config.custom.val_jsonl:
        with contextlib.suppress(NotBuiltError):
            evaluated = open_split(config, "eval", world_size=ranks).split
    return run_forecast(config, timing, train.pack_stats(0), opened.schedule, train.works, evaluated=evaluated), ranks


def as_document(forecast: RunForecast, *, world_size: int) -> dict[str, Any]:
    """Return a forecast on so many ranks as the values of a JSON document."""
    pauses = {"evaluation": forecast.evaluation, "checkpoint": forecast.checkpoint}
    return {
        "seconds": forecast.seconds,
        "hours": forecast.seconds / 3600,
        "uncertainty": forecast.uncertainty,
        "basis": forecast.timing.basis,
        "step_error": forecast.timing.step_error,
        "steps": forecast.last - forecast.first,
        "step_seconds": forecast.mean_step,
        "epoch_seconds": forecast.epoch_seconds,
        **{f"{name}_seconds": pause.seconds for name, pause in pauses.items()},
        **{f"{name}_every": pause.every for name, pause in pauses.items()},
        "tokens_per_second": forecast.tokens_per_second,
        "world_size": world_size,
        "steps_of_epoch": forecast.steps.tolist(),
    }


def _rows(forecast: RunForecast, *, world_size: int) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a forecast: name, value and remark."""
    sure = "" if forecast.uncertainty is None else f"+- {forecast.uncertainty:.1%} "
    remark = f"{sure}on {counted(world_size, 'rank')}, {forecast.timing.basis}"
    yield "predicted time", duration(forecast.seconds), remark
    yield "  tokens a second", f"{forecast.tokens_per_second:,.0f}", "without evaluations and checkpoints"
    steps = forecast.steps
    slowest = f"the fastest of an epoch {duration(float(steps.min()))}, the slowest {duration(float(steps.max()))}"
    error = forecast.timing.step_error
    remark = "in the mean" if error is None else f"{slowest}; 95 % of left-out steps were within {error:.1%}"
    yield "  an optimizer step", duration(forecast.mean_step), remark
    yield "  an epoch", duration(forecast.epoch_seconds), f"{counted(len(steps), 'step')}"
    for name, pause in (("an evaluation", forecast.evaluation), ("a checkpoint", forecast.checkpoint)):
        if pause.every and pause.seconds:
            yield f"  {name}", duration(pause.seconds), f"after each {counted(pause.every, 'step')}, and the last"


def _calibrate(options: argparse.Namespace) -> tuple[int, int]:
    """Time steps of a run on this process's ranks; return the rank and their number."""
    with ranks_refuse_together():
        config = read_config(options.config, options.overrides)
        require_inputs(config, loads=True)
        with loading_libraries():
            from packplan.app.sft.train import prepare
            from packplan.app.wiring.measuring import calibrate, calibrated_run
            from packplan.app.wiring.ranks import alone_in_output, joined_ranks
            from packplan.app.wiring.trainers import without_progress
        config = without_progress(calibrated_run(config))
    with joined_ranks(config) as group, alone_in_output(config, group):
        calibrate(config, *prepare(config, group), group)
        return group.rank, config.data_ranks(group.world_size)

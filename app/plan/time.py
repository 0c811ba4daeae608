"""
Say how long training takes: each step, an epoch, the run, its evaluations and checkpoints.

With --calibrate, steps of the run's own packs are trained and timed first, under torchrun on all of
its ranks. What is measured is stored beside the plans, and used for runs on this machine. Without
it, an earlier run of this plan says the time, or nothing does.
"""

import argparse
import json
import sys
from collections.abc import Iterator

from packplan.adapters.progress import loading_libraries
from packplan.app.cli.command import add_config_arguments, world_size
from packplan.app.cli.console import plain_console
from packplan.app.cli.forecasts import add_price, duration, time_document, time_rows
from packplan.app.plan.stored import inspect_plan
from packplan.app.wiring import stores
from packplan.app.wiring.commands import read_run
from packplan.core.errors import ConfigError, counted
from packplan.core.forecast import RunForecast


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_config_arguments(parser)
    parser.add_argument("--calibrate", action="store_true", help="train and time steps of this run here first")
    parser.add_argument(
        "--world-size", type=world_size, metavar="N", help="ranks (default: the most that were built for)"
    )
    add_price(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document, with each step, not a table")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Measure if that is asked for, then print."""
    ranks = options.world_size
    if options.calibrate:
        if ranks is not None:
            raise ConfigError.at("--calibrate", "measures this machine's ranks: leave --world-size out")
        rank, ranks = _calibrate(options)
        if rank:
            return
    config = read_run(options.config, options.overrides, world_size=ranks)
    view = inspect_plan(config, "train", world_size=ranks, price=options.price)
    forecast = view.forecast
    if view.unused:
        print(f"warning: {view.unused}", file=sys.stderr)
    if forecast is None:
        ranks = counted(view.schedule.world_size, "rank")
        how = "--calibrate trains some here, and times them"
        print("null" if options.json else f"no step was measured on {ranks}: {how}")
        return
    told = {"world_size": view.schedule.world_size, "price": options.price}
    if options.json:
        print(json.dumps({**time_document(forecast, **told), "steps_of_epoch": forecast.steps.tolist()}, indent=2))
    else:
        console = plain_console(100)
        for name, value, remark in [*time_rows(forecast, **told), *_parts(forecast)]:
            console.print(f"{name:<22}{value:>12}  {remark}", soft_wrap=True, highlight=False)


def _parts(forecast: RunForecast) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a run's parts."""
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
    with stores.ranks_refuse_together():
        config = stores.read_config(options.config, options.overrides)
        stores.require_inputs(config, loads=True, trains=True)
        with loading_libraries():
            from packplan.app.sft.train import prepare
            from packplan.app.wiring import training
            from packplan.app.wiring.training.calibration import calibrate, calibrated_run
        config = training.without_progress(calibrated_run(config))
    with training.joined_ranks(config) as group, training.alone_in_output(config, group):
        calibrate(config, *prepare(config, group), group)
        return group.rank, group.world_size

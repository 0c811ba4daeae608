"""Figures of a run's forecast, and the option of its price."""

import argparse
from collections.abc import Iterator
from typing import Any

from packplan.core.errors import counted
from packplan.core.forecast import RunForecast


def add_price(parser: argparse.ArgumentParser) -> None:
    """Declare the price of a run."""
    parser.add_argument("--price", type=_price, metavar="P", help="price of an hour of each rank's device, for a cost")


def _price(text: str) -> float:
    """Read a price, for argparse."""
    price = float(text)
    if not 0 < price < float("inf"):
        message = f"is {text}, but has to be above 0"
        raise argparse.ArgumentTypeError(message)
    return price


def cost(forecast: RunForecast, *, world_size: int, price: float | None) -> float | None:
    """
    Return the cost of a run; None without a price.

    Args:
        forecast: Forecast of the run.
        world_size: Ranks, each on a device of its own.
        price: Price of an hour of a device.
    """
    return None if price is None else forecast.seconds / 3600 * world_size * price


def time_rows(forecast: RunForecast, *, world_size: int, price: float | None) -> Iterator[tuple[str, str, str]]:
    """
    Yield the rows of a forecast: name, value and remark.

    Args:
        forecast: Forecast of the run.
        world_size: Ranks.
        price: Price of an hour of a device; None shows no cost.
    """
    sure = "" if forecast.uncertainty is None else f"+- {forecast.uncertainty:.1%} "
    yield (
        "predicted time",
        duration(forecast.seconds),
        f"{sure}on {counted(world_size, 'rank')}, {forecast.timing.basis}",
    )
    yield "  tokens a second", f"{forecast.tokens_per_second:,.0f}", "without evaluations and checkpoints"
    spent = cost(forecast, world_size=world_size, price=price)
    if spent is not None:
        yield "  cost", f"{spent:,.2f}", f"at {price:,.2f} an hour of each rank's device"


def time_document(forecast: RunForecast, *, world_size: int, price: float | None) -> dict[str, Any]:
    """
    Return a forecast for programs.

    Args:
        forecast: Forecast of the run.
        world_size: Ranks.
        price: Price of an hour of a device; None gives no cost.
    """
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
        "cost": cost(forecast, world_size=world_size, price=price),
    }


def duration(seconds: float) -> str:
    """
    Return seconds in hours, minutes, seconds or milliseconds.

    >>> [duration(one) for one in (0.25, 9, 100, 7200)]
    ['250 ms', '9.0 s', '1.7 min', '2.00 h']
    """
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds >= 3600:
        return f"{seconds / 3600:,.2f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"

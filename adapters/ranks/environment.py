"""Environment variables of a launcher that describe the ranks, checked before use."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from packplan.core.errors import ConfigError, Fault, RunError, agree

_MAX_RANKS, _MAX_PORT = 100_000, 2**16 - 1


def require_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """
    Return the number of ranks, 1 without a launcher.

    Args:
        environment: Environment variables of this process.

    Raises:
        ConfigError: A variable of torchrun is missing beside the others, is no number, or
            contradicts them.
    """
    if found := tuple(_faults(environment)):
        raise ConfigError("the environment of this process", found)
    return int(environment.get("WORLD_SIZE", "1"))


def _faults(environment: Mapping[str, str]) -> Iterator[Fault]:
    found = {name: _number(environment[name]) for name in _NUMBERS if name in environment}
    ranks = found.get("WORLD_SIZE")
    max_ranks = ranks or _MAX_RANKS
    bounds = {
        "WORLD_SIZE": (1, _MAX_RANKS),
        "LOCAL_WORLD_SIZE": (1, max_ranks),
        "RANK": (0, max_ranks - 1),
        "LOCAL_RANK": (0, (found.get("LOCAL_WORLD_SIZE") or max_ranks) - 1),
    }
    needed: list[str] = []
    if (ranks or 1) > 1 or "LOCAL_RANK" in found:
        bounds["MASTER_PORT"] = (1, _MAX_PORT)
        needed += ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
    if {"RANK", "LOCAL_RANK"} & found.keys():
        needed += ["WORLD_SIZE"]
    missing = [name for name in needed if not environment.get(name)]
    if missing:
        beside = next(name for name in ("WORLD_SIZE", "LOCAL_RANK", "RANK") if name in found)
        reason = f"{agree(len(missing))} not set, but {beside} is: start the ranks with torchrun, which sets all"
        yield Fault(", ".join(missing), reason)
    for name, (lowest, highest) in bounds.items():
        if name not in missing:
            yield from _range_faults(name, environment, lowest, highest)


def _range_faults(name: str, environment: Mapping[str, str], lowest: int, highest: int) -> Iterator[Fault]:
    """Yield a fault if a variable is set to anything but a whole number within these bounds."""
    number = _number(text := environment.get(name, str(lowest)))
    if number is None or not lowest <= number <= highest:
        allowed = f"a whole number from {lowest} to {highest:,}" if highest > lowest else str(lowest)
        reason = f"is {text[:40]!r}, but has to be {allowed}: start the ranks with torchrun, which sets it"
        yield Fault(name, reason)


_NUMBERS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT")


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


@contextmanager
def meeting(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """
    Turn what torch makes of ranks that cannot meet into a RunError.

    Args:
        environment: Environment variables of this process, with their address.
    """
    try:
        yield
    except RuntimeError as error:
        place = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT)"
        who = f"rank {environment.get('RANK')} cannot meet the {environment.get('WORLD_SIZE')} ranks at {place}"
        reason = " ".join(str(error).split())[:250]
        fact = f"{who}: {reason}; start all with torchrun, at a --master-port that is free"
        raise RunError("rank_gone", fact) from error

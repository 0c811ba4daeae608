"""Checks torchrun's environment variables, which describe the ranks."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from packplan.core.errors import ConfigError, Fault, RunError

_MAX_RANKS, _MAX_PORT = 100_000, 2**16 - 1


def read_world_size(environment: Mapping[str, str] | None = None) -> int:
    """
    Check torchrun's variables, and return the number of ranks; 1 without torchrun.

    Args:
        environment: Environment variables. None reads `os.environ` at the call, because `datasets`
            replaces that object in the processes of a parallel map.

    Raises:
        ConfigError: A variable is missing although others are set, is not a whole number, is out of
            bounds, or contradicts another variable.
    """
    if found := tuple(_environment_faults(environment or os.environ)):
        raise ConfigError("the environment of this process", found)
    return int((environment or os.environ).get("WORLD_SIZE", "1"))


def _environment_faults(environment: Mapping[str, str]) -> Iterator[Fault]:
    """
    Yield a fault for each of torchrun's variables that is out of bounds, or missing although others
    are set.
    """
    ranks, local = (_parse_number(environment.get(name, "")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    bounds = {
        "WORLD_SIZE": (1, _MAX_RANKS),
        "LOCAL_WORLD_SIZE": (1, ranks or _MAX_RANKS),
        "RANK": (0, (ranks or _MAX_RANKS) - 1),
        "LOCAL_RANK": (0, (local or ranks or _MAX_RANKS) - 1),
        "MASTER_PORT": (1, _MAX_PORT),
    }
    beside = next((name for name in ("RANK", "LOCAL_RANK") if name in environment), "WORLD_SIZE")
    several = beside != "WORLD_SIZE" or (ranks or 1) > 1
    if several and not environment.get("MASTER_ADDR"):
        yield Fault("MASTER_ADDR", f"is not set, but {beside} is: start the ranks with torchrun, which sets both")
    for name, (lowest, highest) in bounds.items():
        text, needed = environment.get(name), several and name != "LOCAL_WORLD_SIZE"
        if text is None and needed:
            yield Fault(name, f"is not set, but {beside} is: start the ranks with torchrun, which sets both")
        elif text is not None and (several or name != "MASTER_PORT"):
            number = _parse_number(text)
            if number is None or not lowest <= number <= highest:
                allowed = f"a whole number from {lowest} to {highest:,}" if highest > lowest else str(lowest)
                yield Fault(name, f"is {text[:40]!r}, but has to be {allowed}: start the ranks with torchrun")


def _parse_number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


@contextmanager
def wrap_rendezvous_errors(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """
    Turn a RuntimeError that torch raises while this rank joins the others into a RunError.

    Args:
        environment: Environment variables with the rank and the address of the store. None means
            the variables of this process.
    """
    try:
        yield
    except RuntimeError as error:
        environment = environment or os.environ
        place = f"{environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')} (MASTER_ADDR, MASTER_PORT)"
        who = f"rank {environment.get('RANK')} cannot connect to the {environment.get('WORLD_SIZE')} ranks at {place}"
        reason = " ".join(str(error).split())[:250]
        raise RunError("rank_gone", f"{who}: {reason}; use torchrun and a free --master-port") from error

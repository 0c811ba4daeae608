"""Arguments of ms-swift under which it would not train a plan as it stands: refused by flag."""

from collections.abc import Iterator
from typing import Any

from packplan.core.config.refusals import refusals_of
from packplan.core.errors import ConfigError, Fault

TESTED_VERSIONS = ("4.6.0",)
"""Versions of ms-swift with which the plugin was shown to train plans exactly."""

_TYPES = ("dpo",)
"""Types of `swift rlhf` whose packs were shown to train as their samples alone do."""


def refuse_version(version: str) -> None:
    """
    Refuse a version of ms-swift that the plugin was not tested with.

    Raises:
        ConfigError: It is another one.
    """
    if version not in TESTED_VERSIONS:
        reason = (
            f"{version} is not a version that this plugin was tested with ({', '.join(TESTED_VERSIONS)}): install that "
            "one, or write the plugin with packplan plugin swift --any-version"
        )
        raise ConfigError("the plugin", (Fault("ms-swift", reason),))


def refuse_arguments(arguments: Any) -> None:
    """
    Refuse arguments that stand against a plan; all at once.

    Args:
        arguments: Arguments of a command of ms-swift.

    Raises:
        ConfigError: There are some.
    """
    if faults := tuple(_faults(arguments)):
        raise ConfigError("the command", faults)


def _faults(arguments: Any) -> Iterator[Fault]:
    own = own_type(arguments) is not None
    if own and arguments.packing:
        yield from type_faults(arguments)
    elif not own and not arguments.packing:
        yield Fault("--packing", "is false, but packs are planned: say --packing true, or leave the plugin out")
        return
    for refusal in refusals_of(arguments, "rlhf" if own else "plugin"):
        yield Fault(f"--{refusal.setting}", str(refusal))


def own_type(arguments: Any) -> str | None:
    """Return the type of `swift rlhf` if it trains its own batches; None if packs are planned."""
    kind = getattr(arguments, "rlhf_type", None)
    if kind == "cpo" and arguments.loss_type == "simpo":  # what ms-swift makes of it
        kind = "simpo"
    return None if kind in _TYPES else kind


def type_faults(arguments: Any) -> Iterator[Fault]:
    """Yield the fault of a type of `swift rlhf` for which no plans are made."""
    if (kind := own_type(arguments)) is not None:
        way = "the plugin trains it without padding, not --packing"
        yield Fault("--rlhf_type", f"is {kind}, but plans are made for {', '.join(_TYPES)} alone: {way}")

"""Arguments of ms-swift under which it would not train a plan as it stands: refused by flag."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from packplan.core.config.refusals import refusals_of
from packplan.core.errors import ConfigError, Fault

TESTED_VERSIONS = ("4.6.0",)
"""Versions of ms-swift with which the plugin was shown to train plans exactly."""

_TYPES = ("dpo",)
"""Types of `swift rlhf` whose packs were shown to train as their samples alone do."""


_DECIDES = (
    "model", "model_type", "template", "system", "agent_template", "use_chat_template", "response_prefix", "norm_bbox",
    "max_length", "max_pixels", "truncation_strategy", "packing_length", "packing_strategy", "task_type", "rlhf_type",
    "dataset", "cached_dataset", "columns", "dataset_shuffle", "data_seed", "split_dataset_ratio", "strict",
)  # fmt: skip
"""Arguments that decide the lengths of the rows, or their order."""


def planned_flags(arguments: Any) -> dict[str, Any]:
    """Return the arguments that decide a plan, by flag, as values that JSON can hold."""
    found = {f"--{name}": getattr(arguments, name, None) for name in _DECIDES}
    values: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return values


def refuse_others(arguments: Any, *, flags: Mapping[str, Any], ranks: int) -> None:
    """
    Refuse a command whose arguments are not those that were planned for; all at once.

    Args:
        arguments: Arguments of a command of ms-swift.
        flags: Result of `planned_flags` when it was planned.
        ranks: Ranks that it was planned for.

    Raises:
        ConfigError: They differ.
    """
    now = planned_flags(arguments)
    faults = [
        Fault(flag, f"is {now.get(flag)}, but the plan was made with {then}: plan again, or set it back")
        for flag, then in flags.items()
        if now.get(flag) != then
    ]
    if ranks != arguments.global_world_size:
        reason = f"are {arguments.global_world_size}, but the plan was made for {ranks}: plan again, or start {ranks}"
        faults.append(Fault("ranks", reason))
    if faults:
        raise ConfigError("the command", tuple(faults))


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

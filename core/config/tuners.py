"""
Keys of `training.` that select the trained weights.

ms-swift defines and reads these keys. This module adds the tuners that read each key, a check of
its value, and the value that an unset key has.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from packplan.core.config.keys import Check, above_0, at_least, from_0_below_1, must, pattern_faults
from packplan.core.config.run import TrainingConfig
from packplan.core.errors import Fault

_READERS: Mapping[str, tuple[str, ...]] = {
    r"lora_\w+|use_rslora|use_dora|lorap_lr_ratio|target_parameters|init_weights": ("lora",),
    r"target_modules|target_regex|modules_to_save": ("lora", "boft", "fourierft", "vera"),
    r"(freeze|trainable)_parameters(_regex|_ratio)?": ("full",),
    r"adapter_\w+": ("adapter",),
    r"boft_\w+": ("boft",),
    r"fourier_\w+": ("fourierft",),
    r"llamapro_\w+": ("llamapro",),
    r"vera_\w+": ("vera",),
}
"""Regular expression for keys -> values of `training.tuner_type` that read these keys."""

UNSET: Mapping[str, Any] = {
    "lora_rank": 8, "lora_alpha": 32.0, "lora_dropout": 0.05, "use_rslora": False, "use_dora": False,
    "target_modules": ["all-linear"], "target_parameters": [], "modules_to_save": [], "freeze_aligner": False,
    "freeze_parameters": [], "freeze_parameters_ratio": 0.0, "trainable_parameters": [],
}  # fmt: skip
"""
Key -> value that is compared between ranks, and with a checkpoint, if a run does not set the key.
"""

_CHECKS: Mapping[str, Check] = {
    "lora_rank": at_least(1),
    "lora_alpha": at_least(1),
    "lora_dropout": from_0_below_1,
    "freeze_parameters_ratio": from_0_below_1,
    "lorap_lr_ratio": above_0,
    "target_regex": pattern_faults,
    "freeze_parameters_regex": pattern_faults,
    "trainable_parameters_regex": pattern_faults,
    "init_weights": must(
        lambda name: bool(re.fullmatch(r"false|gaussian|olora|pissa(_niter_\d+)?", name)),
        "false, gaussian, olora, pissa or pissa_niter_ with a number after it",
    ),
}


def tuners_of(name: str) -> tuple[str, ...]:
    """
    Return the values of `training.tuner_type` that read a key; empty if all values read it.

    >>> tuners_of("boft_block_size"), tuners_of("seed")
    (('boft',), ())
    """
    return next((tuners for pattern, tuners in _READERS.items() if re.fullmatch(pattern, name)), ())


def decides_weights(name: str) -> bool:
    """Return whether a key of `training.` selects or initialises the trained weights."""
    return name in UNSET or bool(tuners_of(name))


def tuner_faults(training: TrainingConfig) -> Iterator[Fault]:
    """
    Yield a fault for each key that the chosen tuner does not read, and for each invalid value.
    `lorap_lr_ratio` also excludes other keys that group the weights for the optimizer.
    """
    for key, value in training.trainer.items():
        tuners = tuners_of(key)
        # A run with another tuner may keep LoRA keys that have a default, such as lora_rank.
        if value and not UNSET.get(key) and tuners and training.tuner_type not in tuners:
            reason = f"needs training.tuner_type: {' or '.join(tuners)}, not {training.tuner_type}: remove the key"
            yield Fault(f"training.{key}", reason)
        elif key in _CHECKS and value is not None:
            yield from (Fault(f"training.{key}", reason) for reason in _CHECKS[key](value))
    others = [name for name in ("optimizer", "vit_lr", "aligner_lr") if training.trainer.get(name, "lorap") != "lorap"]
    if training.trainer.get("lorap_lr_ratio") is not None and others:
        reason = f"groups the weights for the optimizer, and so does training.{others[0]}: keep one of them"
        yield Fault("training.lorap_lr_ratio", reason)

"""Inputs of a run's lengths and plans, from its configuration."""

import json
from collections.abc import Mapping
from typing import Any

import attrs

from packplan.core.config.keys import key_of
from packplan.core.config.run import CustomConfig, RunConfig, TemplateConfig
from packplan.core.fingerprint import Value
from packplan.core.policy import PlanPolicy
from packplan.core.work import WorkModel


def plan_policy(config: RunConfig, split: str, *, work: WorkModel | None = None) -> PlanPolicy:
    """
    Return the plan policy of a split; evaluation never drops.

    Args:
        config: The run.
        split: `train` or `eval`.
        work: Cost of samples, for algorithms whose packs depend on it.
    """
    training, is_train = config.training, split == "train"
    return PlanPolicy(
        packing_length=config.packing_length,
        packing=training.packing if is_train else config.eval_packing,
        algorithm=training.packing_algorithm,
        min_fill_ratio=training.packing_min_fill_ratio,
        drop_last=training.packing_drop_last and is_train,
        allow_single_long=training.packing_allow_single_long,
        seed=training.seed,
        max_dropped_share=training.packing_max_dropped_share,
        replanned=training.packing_epochs == "replanned" and is_train,
        refuse_longer=config.template.truncation_strategy == "raise",
        work=work,
    )


def stream_inputs(config: RunConfig) -> dict[str, Value]:
    """Return the settings that decide a stream's packs, by key."""
    training = config.training
    return {
        "template.max_length": config.packing_length,
        "training.seed": training.seed,
        "training.packing_buffer": training.packing_buffer,
        "training.packing_min_fill_ratio": str(training.packing_min_fill_ratio.normalize()),
        "training.packing_drop_last": training.packing_drop_last,
        "training.packing_allow_single_long": training.packing_allow_single_long,
        "training.tuner_type": training.tuner_type,
    }


def configured_inputs(template: TemplateConfig, custom: CustomConfig, *, packing_length: int) -> dict[str, Value]:
    """
    Return the inputs of lengths that a configuration alone decides, without the model: keys that
    declare `lengths`, by name.

    Args:
        template: Keys of encoding.
        custom: Keys of data.
        packing_length: Tokens of a pack; an input only where the template truncates.
    """
    # To raise changes no length.
    cut = template.truncation_strategy in {"left", "right"}
    inputs: dict[str, Value] = {"packing_length": packing_length if cut else None}
    for section, values in (("template", template), ("custom", custom)):
        for field in attrs.fields(type(values)):
            lengths, value = key_of(field).lengths, getattr(values, field.name)
            if lengths == "value" or (lengths == "value if set" and value is not None):
                inputs[f"{section}.{field.name}"] = _as_input(value)
    return inputs if cut else {**inputs, "template.truncation_strategy": None}


def _as_input(value: Any) -> Value:
    if isinstance(value, Mapping):
        return json.dumps(dict(value), sort_keys=True) if value else None
    return str(value) if isinstance(value, float) else value

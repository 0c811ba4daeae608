"""
A run -> the arguments of `swift sft` that train the same samples without packing, for comparing.

What is the same by default in both is written all the same where ms-swift's default is another, so
that `convert` of the result gives the run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from packplan.core.config import RunConfig
from packplan.core.conversion.convert import Line
from packplan.core.conversion.tables import ADAPTERS, KEYS, WHOLE
from packplan.core.errors import ConfigError, Fault

_LEFT = (
    "packing_algorithm", "packing_balance", "packing_group_by_work", "packing_max_dropped_share",
    "packing_wait_timeout_s", "packing_lengths_from", "packing_length_cache_persist_every",
    "packing_length_precompute_workers", "eval_packing",
)  # fmt: skip
"""Keys about packs that decide nothing without them."""


@attrs.frozen
class Back:
    """What ms-swift is given."""

    arguments: Mapping[str, Any]
    """Name -> value, as a YAML for `swift sft` holds them."""

    lines: tuple[Line, ...]
    """What the run does, and ms-swift would not."""


def to_swift(config: RunConfig, *, given: frozenset[str], world_size: int = 1) -> Back:
    """
    Return the arguments of `swift sft` that train a run's samples one by one.

    Args:
        config: The run, with data and model as they are named.
        given: Keys of the run's YAML, with their sections.
        world_size: Ranks that the run is started on, which its effective batch is divided by.

    Raises:
        ConfigError: The run trains what no file holds: a mix, or the model's own answers.
    """
    custom = config.custom
    if custom.fusion_config is not None:
        reason = "is mixed again each epoch: write an epoch's mix to a file (packplan plan materialise), and name it"
        raise ConfigError("the run", (Fault("custom.fusion_config", reason),))
    if custom.trainer_variant == "rollout":
        raise ConfigError("the run", (Fault("custom.trainer_variant", "is rollout, and its samples are in no file"),))
    arguments = {"model": config.model.model, **_renamed(config), **_data(config), **_training(config, world_size)}
    return Back({name: value for name, value in arguments.items() if value is not None}, tuple(_lines(config, given)))


def _renamed(config: RunConfig) -> dict[str, Any]:
    """Return the arguments that are keys here, of the same meaning."""
    adapters = config.training.tuner_type == "lora"
    left = WHOLE if adapters else ADAPTERS
    found = {}
    for name, key in KEYS.items():
        section, _, field = key.partition(".")
        value: Any = getattr(getattr(config, section), field)
        value = list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
        is_unset = value in (None, [], {}) or (field == "max_steps" and value < 0)
        if name not in left and not is_unset and not (section == "model" and field.startswith(("quant", "bnb"))):
            found[name] = value
    if config.model.quant_method is not None:
        quantised = ("quant_method", "quant_bits", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
        found |= {name: getattr(config.model, name) for name in quantised}
        if config.model.bnb_4bit_compute_dtype is not None:
            found["bnb_4bit_compute_dtype"] = config.model.bnb_4bit_compute_dtype
    found["max_length"] = config.packing_length
    return found


def _data(config: RunConfig) -> dict[str, Any]:
    custom, template = config.custom, config.template
    found: dict[str, Any] = {
        "dataset": list(custom.dataset or custom.train_jsonl),
        "data_seed": custom.data_seed,
        "system": template.system,
        "truncation_strategy": {"left": "left", "right": "right"}.get(template.truncation_strategy or "", "delete"),
        "attn_impl": {"sdpa": "sdpa", "eager": "eager"}.get(config.model.attn_impl),
    }
    if custom.val_dataset or custom.val_jsonl:
        found["val_dataset"] = list(custom.val_dataset or custom.val_jsonl)
    elif custom.split_dataset_ratio:
        found["split_dataset_ratio"] = custom.split_dataset_ratio
    return found


def _training(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the arguments about training, those that ms-swift would take otherwise too."""
    training, custom = config.training, config.custom
    steps = training.gradient_accumulation_steps or 1
    if training.effective_batch_size is not None:
        steps = max(1, round(training.effective_batch_size / training.per_device_train_batch_size / world_size))
    evaluates = bool(custom.val_jsonl or custom.val_dataset or custom.split_dataset_ratio)
    defaults: dict[str, Any] = {
        "learning_rate": 5e-5, "bf16": False, "fp16": False, "eval_strategy": "epoch" if evaluates else "no",
        "ddp_timeout": 1800,
    }  # fmt: skip
    own = {
        "tuner_type": training.tuner_type,
        "freeze_llm": training.freeze_llm,
        "freeze_vit": training.freeze_vit,
        "freeze_aligner": training.freeze_aligner,
        "gradient_accumulation_steps": steps,
        "output_dir": f"{training.output_dir}-swift",
        "add_version": False,
        "packing": False,
        "check_model": False,
    }
    passed = {name: value for name, value in training.trainer.items() if name != "data_seed"}
    return {**defaults, **passed, **own}


def _lines(config: RunConfig, given: frozenset[str]) -> Iterator[Line]:
    """Yield what the run does, and ms-swift would not."""
    training, custom = config.training, config.custom
    if training.packing:
        reason = (
            "a step holds packs here, and one sample for each of them there: raise gradient_accumulation_steps by the "
            "samples of a pack (samples_per_pack in the log) for as many tokens"
        )
        yield Line("training.gradient_accumulation_steps", "changed", reason)
    if training.packing and training.packing_drop_last:
        reason = "samples of packs that are filled too little are trained there: set it to false to train them here"
        yield Line("training.packing_drop_last", "not supported", reason)
    if training.packing_allow_single_long and config.template.truncation_strategy is None:
        reason = "samples above max_length are deleted there: set it to false to leave them out here"
        yield Line("training.packing_allow_single_long", "not supported", reason)
    if training.loss_reduction != "token":
        yield Line("training.loss_reduction", "not supported", "the loss is the mean over tokens there")
    if custom.on_bad_record == "skip":
        yield Line("custom.on_bad_record", "taken over", "bad records are left out there without being named")
    for key in ("object_field_order", "use_summary"):
        if f"custom.{key}" in given:
            yield Line(f"custom.{key}", "not supported", "dense captions are no records of ms-swift")
    for key in _LEFT:
        if f"training.{key}" in given:
            yield Line(f"training.{key}", "not needed here", "nothing is packed")

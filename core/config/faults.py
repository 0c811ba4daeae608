"""
What is wrong with a run that its types cannot say: all faults at once, those of its data and of its
tuners here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from packplan.core.config.key_faults import key_faults
from packplan.core.config.run import CustomConfig, ModelConfig, RunConfig, TrainingConfig
from packplan.core.errors import Fault
from packplan.core.samples import parse_entry

_OF_ADAPTERS = ("target_regex", "target_parameters", "modules_to_save", "use_rslora", "use_dora", "lorap_lr_ratio")

_OF_ALL_WEIGHTS = (
    "freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio", "trainable_parameters",
    "trainable_parameters_regex",
)  # fmt: skip

_PATTERNS = ("target_regex", "freeze_parameters_regex", "trainable_parameters_regex")

_NAMES = 2
"""A Chinese and an English one."""


def faults(config: RunConfig) -> Iterator[Fault]:
    """Yield everything wrong with a configuration that its types cannot say."""
    yield from key_faults(config)
    yield from _entry_faults(config.custom)
    yield from _split_faults(config.custom)
    yield from _tuner_faults(config.training)
    yield from _optimizer_faults(config.training)
    yield from _quantisation_faults(config.model, config.training)


def _entry_faults(custom: CustomConfig) -> Iterator[Fault]:
    """Yield what is wrong with how data are named."""
    for files, entries in (("train_jsonl", "dataset"), ("val_jsonl", "val_dataset")):
        if getattr(custom, files) and getattr(custom, entries):
            yield Fault(f"custom.{files}", f"and custom.{entries} both name data: keep one")
        for name in getattr(custom, entries):
            try:
                parse_entry(name, exists=lambda _: False)
            except ValueError as error:
                yield Fault(f"custom.{entries}", f"has {name}, which {error}")
    if custom.fusion_config is not None and custom.dataset:
        yield Fault("custom.fusion_config", "and custom.dataset both name the data: remove one")
    for key in ("model_name", "model_author"):
        if len(getattr(custom, key)) > _NAMES:
            yield Fault(f"custom.{key}", "has to be a Chinese and an English name, or one for both")


def _split_faults(custom: CustomConfig) -> Iterator[Fault]:
    """Yield what is wrong with the split that is evaluated."""
    ratio = custom.split_dataset_ratio
    if not 0 <= ratio < 1:
        yield Fault("custom.split_dataset_ratio", f"is {ratio}, but has to be from 0 to below 1")
    elif ratio and (custom.val_jsonl or custom.val_dataset):
        yield Fault("custom.split_dataset_ratio", "splits data for evaluation, but others are named: remove one")
    elif ratio and not custom.dataset:
        yield Fault("custom.split_dataset_ratio", "splits what custom.dataset names: write the data there")
    if not 0 <= custom.data_seed < 2**32:
        yield Fault("custom.data_seed", f"is {custom.data_seed}, but has to be from 0 to 2**32 - 1")


def _tuner_faults(training: TrainingConfig) -> Iterator[Fault]:
    """Yield what is wrong with which weights are trained."""
    full = training.tuner_type == "full"
    for key in _OF_ADAPTERS if full else _OF_ALL_WEIGHTS:
        if getattr(training, key):
            what, other = ("adapters", "lora") if full else ("training all weights", "full")
            yield Fault(f"training.{key}", f"is of {what}: set training.tuner_type: {other}, or remove it")
    for key in _PATTERNS:
        try:
            re.compile(getattr(training, key) or "")
        except re.error as error:
            yield Fault(f"training.{key}", f"is no pattern ({error}): correct it")
    if not 0 <= training.freeze_parameters_ratio < 1:
        ratio = training.freeze_parameters_ratio
        yield Fault("training.freeze_parameters_ratio", f"is {ratio}, but has to be from 0 to below 1")


def _optimizer_faults(training: TrainingConfig) -> Iterator[Fault]:
    """Yield what is wrong with LoRA+, which groups the weights of the optimizer."""
    key, ratio = "training.lorap_lr_ratio", training.lorap_lr_ratio
    if ratio is None:
        return
    if not 0 < ratio < float("inf"):
        yield Fault(key, f"is {ratio}, but has to be above 0")
    if training.trainer.get("optimizer") not in {None, "lorap"}:
        yield Fault(key, "is of the optimizer lorap, but training.optimizer names another: remove one")
    if {"vit_lr", "aligner_lr"} & set(training.trainer):
        yield Fault(key, "and training.vit_lr or training.aligner_lr both group the weights: keep one")


def _quantisation_faults(model: ModelConfig, training: TrainingConfig) -> Iterator[Fault]:
    """Yield what is wrong with quantised weights."""
    if model.quant_method is None:
        if model.quant_bits is not None:
            yield Fault("model.quant_bits", "has no effect without model.quant_method: set it to bnb, or remove it")
        return
    if model.quant_bits not in {4, 8}:
        yield Fault("model.quant_bits", f"is {model.quant_bits}, but has to be 4 or 8")
    if training.tuner_type == "full":
        yield Fault("model.quant_method", "quantises weights that would be trained: set training.tuner_type: lora")

"""
What is wrong with the values of a run's keys, one by one or together, that their types cannot say.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from packplan.core.config.run import PACKING_BUFFER, CustomConfig, RunConfig, TrainingConfig
from packplan.core.equality import BACKENDS
from packplan.core.errors import Fault
from packplan.core.packers import ALGORITHMS
from packplan.core.samples import READ

MANY_EPOCHS = 10**6
"""Epochs that no run trains: a typing error, whose steps nothing could count to."""

REFUSED_TRAINING_KEYS = MappingProxyType(
    {
        "packing_length": "is derived from template.max_length (else model.max_model_len): set that instead",
        "packing_avg_samples": "guesses how many samples a pack holds, which a static plan counts: remove it",
        "group_by_length": "has no meaning for packs, which are already of like length: remove it",
        "predict_with_generate": "is not supported, since evaluation measures the loss: remove it",
        "max_epochs": "would end training at another step than planned: use training.num_train_epochs",
        "auto_find_batch_size": "would change the batch behind the plan: remove it",
        "remove_unused_columns": "would drop what packs are made of: remove it",
        "eval_use_evalscope": "is not supported: remove it",
        "generation_config": "is of answers that an evaluation writes, but it measures the loss: remove it",
        "generation_max_length": "is of answers that an evaluation writes, but it measures the loss: remove it",
        "generation_num_beams": "is of answers that an evaluation writes, but it measures the loss: remove it",
        "parallelism_config": "joins several ranks to one learner, but a plan counts every rank: remove it",
        "ignore_data_skip": "would train packs of the epoch again after a resume: remove it; to start again from a "
        "checkpoint's weights, set model.model to it",
        "average_tokens_across_devices": "is always on, so that the loss is the mean over all tokens: remove it",
    }
)
"""Keys of `training.` -> why they are refused, and what to do."""


def key_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield everything wrong with a configuration that its types cannot say."""
    yield from _number_faults(config)
    yield from _column_faults(config.custom)
    yield from _source_faults(config.custom)
    yield from _mode_faults(config)
    if not (config.template.max_length or config.global_max_length or config.model.max_model_len):
        yield Fault("template.max_length", "is not set, and it is the budget of a pack: set it to a number of tokens")
    custom = config.custom
    if not custom.train_jsonl and custom.fusion_config is None and not custom.dataset:
        yield Fault("custom.train_jsonl", "is not set: name the data file, or a list of them")
    attn_impl = config.model.attn_impl
    if attn_impl not in BACKENDS and not {"/", "|"} & set(attn_impl):
        yield Fault("model.attn_impl", f"is {attn_impl}, but has to be one of {', '.join(BACKENDS)}")


def _number_faults(config: RunConfig) -> Iterator[Fault]:
    training = config.training
    at_least_one = {
        "custom.max_line_bytes": config.custom.max_line_bytes,
        "custom.max_messages": config.custom.max_messages,
        "global_max_length": config.global_max_length,
        "model.max_model_len": config.model.max_model_len,
        "template.max_length": config.template.max_length,
        "template.max_pixels": config.template.max_pixels,
        "template.fps_min_frames": config.template.fps_min_frames,
        "template.fps_max_frames": config.template.fps_max_frames,
        "template.video_min_pixels": config.template.video_min_pixels,
        "template.video_max_pixels": config.template.video_max_pixels,
        "template.video_total_pixels": config.template.video_total_pixels,
        "custom.max_video_bytes": config.custom.max_video_bytes,
        "training.packing_buffer": training.packing_buffer,
        "training.packing_length_cache_persist_every": training.packing_length_cache_persist_every,
        "training.packing_length_precompute_workers": training.packing_length_precompute_workers,
        "training.effective_batch_size": training.effective_batch_size,
        "training.per_device_train_batch_size": training.per_device_train_batch_size,
        "training.per_device_eval_batch_size": training.per_device_eval_batch_size,
        "training.gradient_accumulation_steps": training.gradient_accumulation_steps,
        "training.lora_rank": training.lora_rank,
        "training.lora_alpha": training.lora_alpha,
    }
    for path, value in at_least_one.items():
        if value is not None and value < 1:
            yield Fault(path, f"is {value}, but has to be at least 1")
    if training.packing_group_by_work < 0:
        yield Fault(
            "training.packing_group_by_work", f"is {training.packing_group_by_work}, but has to be at least 0 steps"
        )
    if training.packing_group_by_work and (training.packing_balance == "none" or not training.packing):
        reason = "groups packs by work, which needs training.packing, and training.packing_balance other than none"
        yield Fault("training.packing_group_by_work", f"{reason}: set those, or remove it")
    yield from _video_faults(config)
    yield from _share_faults(training)
    if not 0 <= training.packing_wait_timeout_s < float("inf"):
        yield Fault(
            "training.packing_wait_timeout_s",
            f"is {training.packing_wait_timeout_s}, but has to be a number of seconds, or 0 to wait for ever",
        )
    if training.max_steps < 1 and not 0 < training.num_train_epochs < MANY_EPOCHS:
        reason = f"is {training.num_train_epochs}, but has to be above 0 and below {MANY_EPOCHS:,}"
        yield Fault("training.num_train_epochs", reason)
    if training.max_steps == 0 or training.max_steps < -1:
        yield Fault("training.max_steps", f"is {training.max_steps}, but has to be at least 1, or -1 for no limit")
    if not 0 <= training.seed < 2**32:
        yield Fault("training.seed", f"is {training.seed}, but has to be from 0 to 2**32 - 1")
    if training.packing_algorithm not in ALGORITHMS:
        yield Fault(
            "training.packing_algorithm",
            f"is {training.packing_algorithm!r}, but has to be one of {', '.join(ALGORITHMS)}",
        )


def _video_faults(config: RunConfig) -> Iterator[Fault]:
    template = config.template
    for name, value in (("template.fps", template.fps), ("custom.max_video_s", config.custom.max_video_s)):
        if value is not None and not 0 < value < float("inf"):
            yield Fault(name, f"is {value}, but has to be above 0")
    for what, low, high in (
        ("frames", ("fps_min_frames", 4), ("fps_max_frames", 768)),
        ("pixels", ("video_min_pixels", None), ("video_max_pixels", None)),
    ):
        least, most = (getattr(template, name) or default for name, default in (low, high))
        if least is not None and most is not None and least > most:
            yield Fault(f"template.{low[0]}", f"is {least}, but template.{high[0]} is {most} {what}: lower it")
    if template.fps_max_frames == 1:
        yield Fault("template.fps_max_frames", "is 1, but frames are taken in pairs: set it to 2 or more")


def _share_faults(training: TrainingConfig) -> Iterator[Fault]:
    for name in ("packing_min_fill_ratio", "packing_max_dropped_share"):
        share = getattr(training, name)
        if share.is_nan() or not 0 <= share <= 1:
            yield Fault(f"training.{name}", f"is {share}, but has to be from 0 to 1")
    if not 0 <= training.lora_dropout < 1:
        yield Fault("training.lora_dropout", f"is {training.lora_dropout}, but has to be from 0 to below 1")


def _column_faults(custom: CustomConfig) -> Iterator[Fault]:
    share = custom.max_bad_share
    if share.is_nan() or not 0 <= share <= 1:
        yield Fault("custom.max_bad_share", f"is {share}, but has to be from 0 to 1")
    if custom.on_bad_record == "skip" and custom.trainer_variant == "rollout":
        yield Fault("custom.on_bad_record", "is skip, but which records are bad is found by static plans: remove it")
    for name, known in custom.columns.items():
        if known not in READ:
            yield Fault(f"custom.columns.{name}", f"is {known}, but has to be one of {', '.join(sorted(READ))}")


def _mode_faults(config: RunConfig) -> Iterator[Fault]:
    training, custom = config.training, config.custom
    if training.trainer.get("label_smoothing_factor"):
        yield Fault(
            "training.label_smoothing_factor", "is averaged over packs by the trainer, not over tokens: remove it"
        )
    if training.packing and training.trainer.get("enable_channel_loss"):
        yield Fault(
            "training.enable_channel_loss",
            "logs a loss per channel, but under packing only aggregate metrics are logged: remove it, or set "
            "training.packing: false",
        )
    if training.packing_lengths_from == "":
        yield Fault("training.packing_lengths_from", "is empty: name the output_dir of another run, or remove it")
    if custom.trainer_variant == "rollout":
        yield from _rollout_faults(config)
        return
    if custom.rollout_reward is not None:
        yield Fault("custom.rollout_reward", "is of the rollout variant: set custom.trainer_variant: rollout")
    if training.packing and training.packing_mode == "dynamic":
        yield Fault(
            "training.packing_mode",
            "dynamic is not for Stage-1: set training.packing_mode: static, or custom.trainer_variant: rollout",
        )
    if training.packing and training.packing_mode == "static" and training.packing_buffer != PACKING_BUFFER:
        yield Fault(
            "training.packing_buffer", "has no meaning in static mode, which plans the whole data set: remove it"
        )
    if custom.fusion_config is not None:
        yield Fault(
            "custom.fusion_config",
            "mixes data sets again each epoch, which a static plan cannot follow: write an epoch's mix to one JSONL "
            "(packplan plan materialise mix.yaml -o mix.jsonl) and name it in custom.train_jsonl",
        )


def _source_faults(custom: CustomConfig) -> Iterator[Fault]:
    entries = {*custom.train_jsonl, *custom.val_jsonl}
    for entry, name in custom.source_names.items():
        if entry not in entries:
            reason = "is no entry of custom.train_jsonl or custom.val_jsonl: write it as it is written there"
            yield Fault(f"custom.source_names.{entry}", reason)
        if not name.strip():
            yield Fault(f"custom.source_names.{entry}", "is empty: name the source")


def _rollout_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield what is wrong with a run that packs while it trains."""
    training, custom = config.training, config.custom
    if training.packing_mode == "static":
        reason = "is static, which is Stage-1's; the rollout variant packs while it trains: set it to dynamic"
        yield Fault("training.packing_mode", reason)
    if not training.packing:
        yield Fault("training.packing", "is false, but the rollout variant packs: set it to true")
    if training.max_steps < 1:
        yield Fault("training.max_steps", "is not set, and packs that come as they fill cannot be counted: set it")
    if training.resume_from_checkpoint is not None:
        yield Fault("training.resume_from_checkpoint", "is for static plans: a stream starts again; remove it")
    if custom.fusion_config is not None and custom.train_jsonl:
        yield Fault("custom.fusion_config", "and custom.train_jsonl both name the data: remove one")
    if custom.rollout_reward is not None and training.trainer.get("dataloader_num_workers"):
        reason = "would answer prompts in processes without the model: set it to 0"
        yield Fault("training.dataloader_num_workers", reason)
    yield from _sampling_faults(custom)


def _sampling_faults(custom: CustomConfig) -> Iterator[Fault]:
    for name in ("rollout_completions", "rollout_keep", "rollout_max_new_tokens"):
        if getattr(custom, name) < 1:
            yield Fault(f"custom.{name}", f"is {getattr(custom, name)}, but has to be at least 1")
    if custom.rollout_keep > custom.rollout_completions:
        yield Fault("custom.rollout_keep", "is more than custom.rollout_completions: lower it")
    if not 0 < custom.rollout_temperature < float("inf"):
        yield Fault("custom.rollout_temperature", f"is {custom.rollout_temperature}, but has to be above 0")

"""
The trainer of `packplan rl`: TRL's `GRPOTrainer` with microbatches according to the keys of
`policy.`.
"""

import functools
import logging
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config

from packplan.adapters.config.trainer_keys import TrainerKey, argument_keys, machine_faults, require_deepspeed_agrees
from packplan.adapters.families import trained_config
from packplan.adapters.files import wrap_save_errors
from packplan.adapters.hf.balance import BalanceCounts
from packplan.adapters.hf.following import insert_base_class
from packplan.adapters.hf.packed_calls import Unpadding
from packplan.adapters.hf.refusals import warn_of_unclipped_gradients
from packplan.adapters.hf.saving import KeepsCheckpoints, find_damage
from packplan.adapters.samples.data_files import open_records
from packplan.adapters.samples.prompts import Prompts
from packplan.app.opening.stores import records_cache, refuse_other_parts
from packplan.core.config.rl import RlConfig
from packplan.core.errors import ConfigError, PackplanError
from packplan.core.ports import RankGroup
from packplan.hf import balance, unpad

log = logging.getLogger(__name__)

_ADAPTER_PREFIXES = ("lora_", "use_peft", "use_rslora", "use_dora")
"""Prefixes of the arguments of TRL's `ModelConfig` that define adapters."""

_CHECKPOINT_KEY = "grpo.resume_from_checkpoint"

_PLACEHOLDER_KEYS = ("image_token_id", "video_token_id", "audio_token_id")


def installed_keys() -> dict[str, TrainerKey]:
    """Return the settings that `grpo.` passes on to the installed TRL."""
    adapters = {name: key for name, key in argument_keys(ModelConfig).items() if name.startswith(_ADAPTER_PREFIXES)}
    return {**adapters, **argument_keys(GRPOConfig), "reward_funcs": TrainerKey(("str", "list"))}


def train(config: RlConfig, group: RankGroup, *, quiet: bool = False) -> GRPOTrainer:
    """
    Train a run, save the policy to its output folder, and return the trainer. A run that SIGTERM
    ends before its last step saves only a checkpoint.

    Args:
        config: The run.
        group: All ranks; TRL's trainer uses the process group of these ranks.
        quiet: Whether to hide progress bars.

    Raises:
        ConfigError: TRL refuses a setting, or a reward function fails.
        RecordError: A record cannot be converted to a prompt.
    """
    folder, checkpoint = config.training.output_dir, config.grpo.get("resume_from_checkpoint")
    if checkpoint == "last" and (checkpoint := get_last_checkpoint(folder)) is None:
        reason = f"is last, but {folder} has no checkpoint: remove the key to begin at step 1"
        raise ConfigError.for_key(_CHECKPOINT_KEY, reason)
    if checkpoint is not None:
        refuse_other_parts(_CHECKPOINT_KEY, checkpoint, config.grpo.get("deepspeed"), num_ranks=group.world_size)
        facts = group.gather(find_damage(Path(checkpoint), share=group.rank, num_shares=group.world_size) or "")
        if fact := next(filter(None, facts), None):
            raise ConfigError.for_key(_CHECKPOINT_KEY, f"is {checkpoint}, but {fact}")
    if quiet or not sys.stderr.isatty():
        disable_progress_bar()
    trainer, hooks, counts = open_trainer(config, quiet=quiet)
    disable_progress_bar()  # transformers' bar of weight files that are written
    group.wait_for_all()  # a rank that has failed would be missed only in a collective of TRL
    insert_base_class(trainer, KeepsCheckpoints)
    trainer.keep_checkpoints(replaces_handler=True)
    trainer.checkpoint_key, trainer.last_save = _CHECKPOINT_KEY, checkpoint
    with wrap_save_errors(Path(folder)):
        trainer.train(resume_from_checkpoint=checkpoint)
        if trainer.was_terminated:
            log.warning("SIGTERM: a checkpoint is saved; grpo.resume_from_checkpoint: %s continues", trainer.last_save)
            return trainer
        trainer.save_model()
        trainer.save_state()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    if rewards and trainer.is_world_process_zero():
        log.info("the first logged reward is %.3f, the last %.3f; the policy is in %s", rewards[0], rewards[-1], folder)
    if counts is not None and counts.metrics is not None and trainer.is_world_process_zero():
        found = counts.metrics
        figures = (found.utilisation, found.waste_ratio, found.balance, found.efficiency)
        log.info("microbatches of rank 0: utilisation %.4f, waste %.4f, balance %.4f, efficiency %.4f", *figures)
        text = "the %s computed %s of %s positions; the others were padding"
        for name, one in zip(("policy", "reference model"), hooks, strict=False):
            log.info(text, name, f"{one.counts.real:,}", f"{one.counts.padded:,}")
    return trainer


def open_trainer(config: RlConfig, *, quiet: bool = False) -> tuple[GRPOTrainer, list[Unpadding], BalanceCounts | None]:
    """
    Load the model; return its trainer, the `unpad` hooks of its models, and the microbatch counts.

    Args:
        config: The run.
        quiet: Whether to hide progress bars.

    Raises:
        ConfigError: TRL refuses a setting, or a reward function cannot be found.
    """
    packing, dynamic = config.policy.sequence_packing, config.policy.dynamic_batching
    model, names = config.model, config.grpo["reward_funcs"]
    rewards = [_load_reward(name) for name in ([names] if isinstance(names, str) else names)]
    adapters = {name: value for name, value in config.grpo.items() if name.startswith(_ADAPTER_PREFIXES)}
    on_cpu = bool(config.grpo.get("use_cpu")) or not torch.cuda.is_available()
    if faults := tuple(machine_faults(config.grpo, on_cpu=on_cpu, section="grpo")):
        raise ConfigError("the section grpo", faults)
    try:
        args = GRPOConfig(**_grpo_arguments(config, quiet=quiet))
        require_deepspeed_agrees(args)
        warn_of_unclipped_gradients(args, "grpo")
        processor = AutoProcessor.from_pretrained(
            model.model, truncation_side="left", padding_side="left", trust_remote_code=model.trust_remote_code
        )
        trainer = GRPOTrainer(
            model.model,
            rewards,
            args=args,
            train_dataset=_open_prompts(config, config.custom.train_jsonl, processor),
            eval_dataset=_open_prompts(config, config.custom.val_jsonl, processor),
            processing_class=processor,
            peft_config=get_peft_config(ModelConfig(**adapters)),
        )
    except PackplanError:
        raise
    except (ValueError, TypeError, NotImplementedError, ImportError, OSError) as error:
        raise ConfigError.for_key("grpo", f"is refused by TRL: {error}") from error
    models = filter(None, (trainer.model, trainer.ref_model)) if packing.enabled else ()
    hooks, counts = [unpad(one) for one in models], None
    cut = packing if packing.enabled else dynamic
    if cut.enabled:
        counts = balance(
            trainer,
            max_tokens=cut.train_mb_tokens,
            logprob_max_tokens=cut.logprob_mb_tokens,
            padded=dynamic.enabled,
            algorithm=packing.algorithm,
            length_multiple=cut.sequence_length_round,
        )
    return trainer, hooks, counts


def _grpo_arguments(config: RlConfig, *, quiet: bool) -> dict[str, Any]:
    """
    Return the arguments of `GRPOConfig`: the keys of `grpo.`, and defaults from other keys of the
    run.
    """
    others = (*_ADAPTER_PREFIXES, "reward_funcs")
    given = {name: value for name, value in config.grpo.items() if not name.startswith(others)}
    model, on_cpu = config.model, not torch.cuda.is_available()
    loading: dict[str, Any] = {"dtype": model.torch_dtype or "auto", "trust_remote_code": model.trust_remote_code}
    if given.get("deepspeed"):
        loading["device_map"] = None  # as TRL sets it on GPUs: ZeRO 3 takes no other
    if model.attn_impl not in {"auto", "varlen"}:
        loading["attn_implementation"] = model.attn_impl
    drawing: dict[str, Any] = {}
    loaded = trained_config(AutoConfig.from_pretrained(model.model, trust_remote_code=model.trust_remote_code))
    tokens = [getattr(loaded, name, None) for name in _PLACEHOLDER_KEYS]
    if any(tokens) and not given.get("use_vllm"):
        # A drawn placeholder would have no image, and no model could compute the answer.
        drawing["suppress_tokens"] = [token for token in tokens if token is not None]
    defaults = {
        "use_cpu": on_cpu,
        "bf16": not (on_cpu or given.get("use_cpu") or given.get("fp16")),
        "eval_strategy": "steps" if config.custom.val_jsonl else "no",
        "disable_tqdm": quiet or not sys.stderr.isatty(),
    }
    below = {
        "model_init_kwargs": loading | (given.get("model_init_kwargs") or {}),
        "generation_kwargs": drawing | (given.get("generation_kwargs") or {}),
    }
    return {**defaults, **given, **below, "resume_from_checkpoint": None}


def _open_prompts(config: RlConfig, files: tuple[str, ...], processor: Any) -> Prompts | None:
    """Return the prompts of some data files; None if there are none."""
    if not files:
        return None
    if not getattr(processor, "chat_template", None):
        raise ConfigError.for_key(
            "model.model", f"is {config.model.model}, whose tokenizer has no chat template: add one"
        )
    custom, cache = config.custom, records_cache(config)
    records = open_records(files, max_line_bytes=custom.max_line_bytes, cache=cache, media=custom.media_dir)
    return Prompts(records, custom, system=config.template.system, sees=isinstance(processor, ProcessorMixin))


def _load_reward(name: str) -> Callable[..., Any]:
    """
    Return the reward function `module:name`. Raise ConfigError if the function is missing, or
    later, if a call fails.
    """
    key = "grpo.reward_funcs"
    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:  # whatever the user's own module raises
        reason = f"has {name}, which cannot be imported as module:function: {type(error).__name__}: {error}"
        raise ConfigError.for_key(key, reason) from error
    if not callable(found):
        raise ConfigError.for_key(key, f"has {name}, which is not a function: name a function")

    @functools.wraps(found)
    def refuse_its_errors(**columns: Any) -> Any:
        try:
            return found(**columns)
        except Exception as error:
            raise ConfigError.for_key(key, f"has {name}, which failed: {type(error).__name__}: {error}") from error

    return refuse_its_errors

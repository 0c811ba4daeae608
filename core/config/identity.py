"""
Settings that enter fingerprints, settings that all ranks compare, and settings that a checkpoint
stores for resuming.

A path may differ between machines. Ranks therefore compare whether a path is set, and what the path
points to. Weights, checkpoint, data and tokenizer are compared by their digests, and settings files
by their text. A resumed run compares data and packing through the plan and the digest of the
data, not through the keys. `docs/training.md` lists the settings that a resumed run may change.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from packplan.core.config.keys import key_facts, yield_keys
from packplan.core.config.run import LOADS, TRAINS, PathText, RunConfig
from packplan.core.config.tuners import UNSET, decides_weights
from packplan.core.errors import RankDifference
from packplan.core.fingerprint import Fingerprint, RunIdentity, Value
from packplan.core.policy import Part, PlanPolicy
from packplan.core.work.model import WorkModel

_STREAM_KEYS = ("seed", "packing_buffer", "packing_drop_last", "packing_allow_single_long", "tuner_type")

DECLARED_KEYS = dict(yield_keys(RunConfig))

PATH_KEYS = frozenset(
    {key for key, field in DECLARED_KEYS.items() if str(PathText) in str(field.type) and not key_facts(field).per_rank}
    | {"training.accelerator_config", "training.deepspeed", "training.fsdp_config", "training.logging_dir"}
)
"""Keys whose value is a path, which may differ between machines."""

PER_RANK: Mapping[str, str] = {
    **{key: key_facts(field).per_rank for key, field in DECLARED_KEYS.items() if key_facts(field).per_rank},
    "training.dataloader_num_workers": "depends on the cores of a rank's machine",
    "training.dataset_num_proc": "depends on the cores of a rank's machine",
    "training.dataloader_persistent_workers": "depends on the memory of a rank's machine",
    "training.dataloader_pin_memory": "depends on the memory of a rank's machine",
    "training.dataloader_prefetch_factor": "depends on the memory of a rank's machine",
    "training.disable_tqdm": "decides the output of a rank; --quiet sets it",
    "training.hub_token": "a secret, which no message shows",
    "training.local_rank": "number of a rank on its machine",
    "training.model_init_kwargs": "may name a rank's device; the model itself is compared",
    "training.ref_model_init_kwargs": "may name a rank's device; the model itself is compared",
    "training.push_to_hub": "only rank 0 uploads",
    "training.log_level": "decides the output of a rank",
    "training.log_level_replica": "decides the output of a rank",
    "training.log_on_each_node": "decides the output of a rank",
    "training.report_to": "only rank 0 reports to services, and other ranks may lack their packages",
    "training.run_name": "only rank 0 reports to services; a name may hold the time",
}
"""Key that may differ between ranks -> reason why a difference does not change training."""

FIXED_ARGUMENTS = frozenset(
    {
        "label_smoothing_factor", "loss_reduction", "loss_type", "enable_dft_loss", "enable_channel_loss",
        "neftune_noise_alpha", "router_aux_loss_coef", "optim", "optim_args", "optim_target_modules", "optimizer",
        "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "freeze_llm", "freeze_vit",
        # A checkpoint's optimizer restores these values and ignores those of the run.
        "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "vit_lr", "aligner_lr",
    }
)  # fmt: skip
"""Trainer settings that a resumed run has to keep: loss, optimizer, learning rate, frozen parts."""

PREFERENCE_ARGUMENTS = FIXED_ARGUMENTS | {
    "beta", "loss_weights", "ld_alpha", "rpo_alpha", "f_divergence_type", "f_alpha_divergence_coef", "label_smoothing",
    "use_weighting", "discopop_tau", "desirable_weight", "undesirable_weight", "center_rewards_coefficient",
    "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "max_length", "truncation_mode",
    "disable_dropout",
}  # fmt: skip
"""
Trainer settings that a resumed run on preference data has to keep. Trainers of preference data have
more settings, and may truncate rows.
"""

_FIXED_PATTERN = re.compile(r"(galore|lisa)_")
"""Pattern for the start of optimizer settings that a resumed run has to keep."""

UNCOMPARED = re.compile(
    # A checkpoint stores its attention backend separately.
    r"attn_impl|"
    # Input, logging, saving and evaluation; seeds are compared with the epoch schedule.
    r"resume_.*|restore_.*|output_dir|download|trust_remote_code|trainer|seed|data_seed|train_dataloader_shuffle|"
    r"(?:dataloader_(?!drop_last)|eval_|do_|log_|logging_|save_|hub_|include_|metric_|load_best|ddp_|torch_|trackio_).*|"
    r"(?:per_device_eval_|greater_|push_|batch_eval).*|report_to|run_name|project|debug|callbacks|disable_tqdm|"
    r"early_stop_interval|(?:vit_)?gradient_checkpointing.*|use_cpu|prediction_loss_only|safe_serialization|max_shard_size|skip_memory_metrics|tuner_type"
)
"""
Pattern for keys that are not part of a run's identity. Either no step depends on them, or they
are compared elsewhere.
"""


_SECRET = re.compile(r"(?:.*_)?(?:api_key|secret|password)|(?:hf|hub|auth|access|api|use_auth)?_?token")
"""Pattern for the names of secret values, which no message and no checkpoint contains."""


def is_changeable(name: str) -> bool:
    """
    Return whether a trainer's argument that is not fixed enters the identity of a run.

    The arguments of output, paths and machines do not.

    >>> [name for name in ("max_steps", "output_dir", "local_rank") if is_changeable(name)]
    ['max_steps']
    """
    key = f"training.{name}"
    return not (name.startswith("_") or UNCOMPARED.fullmatch(name) or key in PATH_KEYS or key in PER_RANK)


def plan_policy(config: RunConfig, split: str, *, work: WorkModel | None = None) -> PlanPolicy:
    """
    Return the plan policy of a split. The policy of the evaluation never drops packs.

    Args:
        config: Configuration of the run.
        split: `train` or `eval`.
        work: Model of the samples' work, for algorithms that pack by work.
    """
    training, is_train, share = config.training, split == "train", config.custom.val_share
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
        max_images=training.packing_max_images,
        part=Part(val_share=str(share), seed=training.seed, held_out=not is_train) if share else None,
        work=work,
    )


def stream_inputs(config: RunConfig) -> dict[str, Value]:
    """Return each setting that decides the packs of a stream: key -> value."""
    training = config.training
    return {
        "template.max_length": config.packing_length,
        "training.packing_min_fill_ratio": str(training.packing_min_fill_ratio.normalize()),
        **{f"training.{name}": getattr(training, name) for name in _STREAM_KEYS},
    }


def config_length_inputs(config: RunConfig) -> dict[str, Value]:
    """
    Return each key whose value enters the fingerprint of lengths, with this value.

    The fields declare these keys by `lengths`. The packing length has a value only if the template
    truncates. A command of ms-swift adds its own inputs.
    """
    # `raise` never changes a length.
    cut = config.template.truncation_strategy in {"left", "right"}
    inputs: dict[str, Value] = {"packing_length": config.packing_length if cut else None}
    for section, values in (("template", config.template), ("custom", config.custom), ("model", config.model)):
        for field in attrs.fields(type(values)):
            lengths, value = key_facts(field).lengths, getattr(values, field.name)
            if lengths == "value" or (lengths == "value if set" and value not in (None, ())):
                inputs[f"{section}.{field.name}"] = _input_value(value)
    if not cut:
        inputs["template.truncation_strategy"] = None
    return {**inputs, **config.command.length_inputs} if config.command else inputs


def _input_value(value: Any) -> Value:
    if isinstance(value, Mapping):
        return json.dumps(dict(value), sort_keys=True) if value else None
    if isinstance(value, tuple):
        return json.dumps(value)
    return str(value) if isinstance(value, float) else value


def shared_values(config: RunConfig, files: Mapping[str, Any]) -> dict[str, str]:
    """
    Return each key that has to be the same on all ranks, with its value as JSON.

    Args:
        config: Configuration of the run.
        files: Key -> content of the file that the key names. The content replaces the path.
    """
    sections = attrs.asdict(config, filter=lambda field, _: not key_facts(field).set_by_command)
    sections["training"] |= {**UNSET, **sections["training"].pop("trainer")}
    return _without_rank_values(sections, files)


def shared_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """
    Return each argument of a trainer that has to be the same on all ranks, with its value as JSON.

    If `data_seed` is set and therefore orders the packs, ranks may have different values of `seed`.

    >>> shared_arguments({"data_seed": 1, "seed": 7, "output_dir": "out", "local_rank": 1})
    {'data_seed': '1', 'output_dir': '"a path"'}
    """
    own = {name: value for name, value in arguments.items() if name != "seed" or arguments.get("data_seed") is None}
    values = _without_rank_values({"training": own}, {})
    return {key.removeprefix("training."): value for key, value in values.items()}


def _without_rank_values(sections: dict[str, dict[str, Any]], files: Mapping[str, Any]) -> dict[str, str]:
    """
    Return values as JSON, without those of `PER_RANK`. The content in *files* replaces a path, and
    `a path` replaces a path without content.
    """
    for section, name in (key.split(".") for key in (*PATH_KEYS, *PER_RANK)):
        key, value = f"{section}.{name}", sections.get(section, {}).pop(name, None)
        if value and key in PATH_KEYS:
            # `last` selects a checkpoint and is not a path.
            path = value if isinstance(value, Mapping) or value == "last" else "a path"
            sections[section][name] = files.get(key, path)
    return flat_values(sections)


def flat_values(document: Mapping[str, Any]) -> dict[str, str]:
    """
    Return the values of nested sections as JSON: dotted key -> value. Values of None are left out,
    and so are secrets, such as tokens of hubs.

    >>> flat_values({"a": {"b": 0.5, "c": None, "hf_token": "hf_1"}, "eos_token": ["x"]})
    {'a.b': '0.5', 'eos_token': '["x"]'}
    """
    return dict(_flat_items("", document))


def _flat_items(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, below in value.items():
            if _SECRET.fullmatch(str(name)):
                continue
            yield from _flat_items(f"{key}.{name}" if key else str(name), below)
    elif value is not None:
        yield key, json.dumps(value, ensure_ascii=False, default=_plain_text)


def _plain_text(value: Any) -> Any:
    """
    Return a JSON value for a value that JSON lacks. All processes return the same: sets are sorted,
    and memory addresses removed.
    """
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if fields := getattr(type(value), "__dataclass_fields__", None):  # may hold sets, such as LoraConfig does
        return {name: getattr(value, name) for name in fields if not _SECRET.fullmatch(name)}
    return re.sub(" at 0x[0-9a-f]+", "", str(value))


def rank_differences(runs: Sequence[Mapping[str, str]]) -> tuple[RankDifference, ...]:
    """
    Return each key whose value differs between ranks, sorted by name.

    Args:
        runs: Settings of each rank: key -> value.

    >>> rank_differences([{"a": "1", "b": "2"}, {"a": "1"}])
    (RankDifference(key='b', values=('2', None)),)
    """
    keys = sorted({key for run in runs for key in run})
    by_rank = ((key, tuple(run.get(key) for run in runs)) for key in keys)
    return tuple(RankDifference(key, values) for key, values in by_rank if len(set(values)) > 1)


def run_identity(config: RunConfig, *, files: Mapping[str, Any], model: Mapping[str, str]) -> RunIdentity:
    """
    Return the identity of a run: the model, samples, loss and settings that a checkpoint stores.

    Keys that decide samples are included. Changing such a key may change labels without changing
    any length, so that the plan stays the same.

    Args:
        config: Configuration of the run.
        files: Key -> content of the file that the key names.
        model: Name of each of the model's files -> its size and digest.
    """
    samples = config_length_inputs(config)
    fixed, changeable = {**samples, **model}, dict[str, str]()
    for key, value in shared_values(config, files).items():
        section, name = key.split(".")[:2]
        if section not in {"model", "training"} or name == "model" or UNCOMPARED.fullmatch(name):
            continue
        declared = DECLARED_KEYS.get(f"{section}.{name}")
        decides = TRAINS if declared is None else key_facts(declared).neither
        kept = name in FIXED_ARGUMENTS or decides_weights(name) or _FIXED_PATTERN.match(name)
        if decides == LOADS or kept:
            fixed[key] = value
        elif decides == TRAINS:
            changeable[key] = value
    return RunIdentity(Fingerprint(fixed), Fingerprint(changeable))

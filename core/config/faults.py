"""
Checks of a configuration that involve several keys, and advice on unknown keys.

All faults are reported at once. The message about an unknown key names the section that has this
key, or a known key that was misspelled. `packing_lenght` is recognised as `packing_length`, but
`min_pixels` is not mistaken for `max_pixels`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import attrs

from packplan.core.config.keys import key_facts, key_faults
from packplan.core.config.run import CustomConfig, ModelConfig, RunConfig, TemplateConfig, TrainingConfig
from packplan.core.config.tuners import tuner_faults
from packplan.core.errors import Fault, verb_for
from packplan.core.packers import ALGORITHMS
from packplan.core.samples.urls import mask_credentials

MAX_EPOCHS = 10**6
"""
Limit of `training.num_train_epochs`: this value and larger values are refused as typing errors.
"""

_ENDLESS_SCHEDULES = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau", "greedy")
"""Values of `training.lr_scheduler_type` that do not need the total number of steps."""

_STEP_KEYS = ("warmup_ratio", "warmup_steps", "logging_steps", "eval_steps", "save_steps")
"""Keys of `training.` whose value is a number of steps or, below 1, a share of all steps."""


_EVALUATES: Mapping[str, tuple[object, ...]] = {
    "eval_on_start": (True,), "eval_strategy": ("steps", "epoch"), "load_best_model_at_end": (True,),
    "save_strategy": ("best",),
}  # fmt: skip
"""Trainer argument -> values that require an evaluation data set."""


MAX_NAMED = 3
"""Maximum number of keys that the message about an unknown key suggests."""

_DISTINGUISHING = re.compile(r"\d+|(?:^|_)(?:min|max)(?=_|$)")
"""
Parts of a key's name that change its meaning: numbers, `min` and `max`. A suggested key has to
contain the same parts.
"""


def run_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield each fault of a configuration whose values all have the right types."""
    yield from key_faults(config)
    yield from missing_data_faults(config.custom)
    yield from evaluation_faults(config, "training", config.training.trainer)
    yield from _source_faults(config.custom)
    yield from _video_faults(config.template)
    yield from _training_faults(config.training)
    yield from _variant_faults(config)
    yield from _epoch_faults(config)
    yield from tuner_faults(config.training)
    yield from _quantisation_faults(config.model, config.training)
    if {config.template.max_length, config.global_max_length, config.model.max_model_len} == {None}:
        yield Fault("template.max_length", "is not set: set it to the number of tokens that a pack may hold")


def missing_data_faults(custom: CustomConfig) -> Iterator[Fault]:
    """Yield a fault if the run names no training data."""
    if not custom.train_jsonl and custom.fusion_config is None:
        yield Fault("custom.train_jsonl", "is not set: name the data file, or a list of files")


def evaluation_faults(config: RunConfig, section: str, settings: Mapping[str, Any]) -> Iterator[Fault]:
    """
    Yield a fault for each setting that needs an evaluation, if the run has no evaluation data.

    Args:
        config: Configuration of the run.
        section: Section that has the trainer's settings, such as `training`.
        settings: Name of each trainer setting -> its value.
    """
    for name, values in _EVALUATES.items() if not (config.custom.val_jsonl or config.custom.val_share) else ():
        if settings.get(name) in values:
            reason = f"is {str(settings[name]).lower()}, but the run has no evaluation"
            yield Fault(f"{section}.{name}", f"{reason}: set custom.val_jsonl, or remove {name}")


def _source_faults(custom: CustomConfig) -> Iterator[Fault]:
    """
    Yield a fault for each pair of keys that name the same data. Without a mix, also yield the
    faults of `source_names`.
    """
    if custom.val_share and custom.val_jsonl:
        yield Fault("custom.val_share", "and custom.val_jsonl both name the evaluation: remove one")
    if custom.fusion_config is None:
        yield from source_name_faults(custom)
    elif custom.train_jsonl:
        yield Fault("custom.fusion_config", "and custom.train_jsonl both name the data: remove one")


def source_name_faults(custom: CustomConfig) -> Iterator[Fault]:
    """
    Yield a fault for each key of `source_names` that is not a data file of the run or of its mix.
    """
    for entry in custom.source_names:
        if entry not in {*custom.train_jsonl, *custom.val_jsonl}:
            data = "custom.train_jsonl" if custom.fusion_config is None else "custom.fusion_config"
            reason = f"is not an entry of {data} or custom.val_jsonl: write the path exactly as there"
            yield Fault(f"custom.source_names.{mask_credentials(entry)}", reason)


def _video_faults(template: TemplateConfig) -> Iterator[Fault]:
    """Yield a fault if `fps_min_frames` is above `fps_max_frames`; defaults replace unset keys."""
    least, most = template.fps_min_frames or 4, template.fps_max_frames or 768
    if least > most:
        yield Fault("template.fps_min_frames", f"is {least}, above template.fps_max_frames ({most}): set fewer frames")


def _training_faults(training: TrainingConfig) -> Iterator[Fault]:
    """
    Yield faults in the number of epochs, in the number of ranks that share a pack, and in losses by
    channel.
    """
    if training.max_steps < 1 and not 0 < training.num_train_epochs < MAX_EPOCHS:
        reason = f"is {training.num_train_epochs}, but has to be above 0 and below {MAX_EPOCHS:,}"
        yield Fault("training.num_train_epochs", reason)
    if training.sequence_parallel_size != 1 and not training.packing:
        yield Fault("training.sequence_parallel_size", "needs packed rows, but training.packing is false: set it to 1")
    if training.max_sequence_parallel_size is not None and not training.shares_by_degree:
        reason = f"is only for training.sequence_parallel_size: auto, not {training.sequence_parallel_size}: remove it"
        yield Fault("training.max_sequence_parallel_size", reason)
    if training.packing and training.trainer.get("enable_channel_loss"):
        reason = "logs a loss for each channel, but with packing only the loss of all samples is logged"
        yield Fault("training.enable_channel_loss", f"{reason}: remove the key, or set training.packing: false")


def _variant_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault for each key that contradicts `custom.trainer_variant`."""
    training, custom = config.training, config.custom
    if custom.trainer_variant == "rollout":
        yield from _rollout_faults(config)
        return
    default_buffer = attrs.fields(TrainingConfig).packing_buffer.default
    if training.packing and training.packing_mode == "dynamic":
        reason = "is dynamic, which packs while training: set it to static, or custom.trainer_variant to rollout"
        yield Fault("training.packing_mode", reason)
    if training.packing and training.packing_mode == "static" and training.packing_buffer != default_buffer:
        reason = "has no meaning in static mode, which plans the whole data set: remove it"
        yield Fault("training.packing_buffer", reason)
    if custom.fusion_config is not None and custom.fusion_schedule is None:
        reason = "draws other samples in each epoch, which one static plan cannot follow: set custom.fusion_schedule: "
        yield Fault("custom.fusion_config", f"{reason}planned, which plans each epoch")
    elif custom.fusion_config is None and custom.fusion_schedule is not None:
        yield Fault("custom.fusion_schedule", "is set, but custom.fusion_config is not: set both keys, or neither")


def _epoch_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault for each key that does not fit `training.packing_epochs` or a planned mix."""
    training, key = config.training, "training.packing_epochs"
    if training.shares_by_degree and (training.packing_epochs == "replanned" or config.custom.planned_mix):
        reason = "is auto, which needs the same packs in every epoch, but each epoch draws its own packs: set a number"
        yield Fault("training.sequence_parallel_size", reason)
    if training.packing_epochs == "same":
        return
    if not training.packing:
        yield Fault(key, "is replanned, which needs packs: set training.packing: true, or remove the key")
    algorithm = ALGORITHMS.get(training.packing_algorithm)
    if algorithm is not None and algorithm.keeps_order:
        reason = f"is replanned, but {training.packing_algorithm} keeps the order of the data: remove the key"
        yield Fault(key, f"{reason}, or set another training.packing_algorithm")


def _rollout_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield faults of a run that makes packs while training (a stream)."""
    training = config.training
    yield from _stream_faults(config)
    if training.packing_mode == "static":
        reason = "is static, but custom.trainer_variant: rollout packs while training: set the mode to dynamic"
        yield Fault("training.packing_mode", reason)
    if not training.packing:
        yield Fault("training.packing", "is false, but custom.trainer_variant: rollout needs packs: set it to true")
    if training.max_steps < 1:
        yield from _endless_faults(training)


def _stream_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield a fault for each key that is set although it has no effect in a stream."""
    custom, trainer = config.custom, config.training.trainer
    for section in ("custom", "training"):
        values = getattr(config, section)
        for field in attrs.fields(type(values)):
            stream, is_set = key_facts(field).stream, getattr(values, field.name) != field.default
            if is_set and (stream == "refused" or (stream == "evaluation" and not custom.val_jsonl)):
                yield Fault(f"{section}.{field.name}", "is for planned packs, which a stream does not have: remove it")
    if trainer.get("dataloader_persistent_workers"):
        reason = "keeps loader workers alive, but those of a stream start again with each epoch: remove it"
        yield Fault("training.dataloader_persistent_workers", reason)
    if custom.fusion_config is not None and not trainer.get("train_dataloader_shuffle", True):
        reason = "is false, but custom.fusion_config draws the order of the samples: remove it"
        yield Fault("training.train_dataloader_shuffle", reason)


def _endless_faults(training: TrainingConfig) -> Iterator[Fault]:
    """
    Yield a fault that names all settings that depend on the number of steps. A stream without
    `max_steps` does not know this number.
    """
    trainer = training.trainer
    needing = [name for name in _STEP_KEYS if 0 < (trainer.get(name) or 0) < 1]
    if trainer.get("lr_scheduler_type", "cosine") not in _ENDLESS_SCHEDULES:
        needing.append("lr_scheduler_type")
    if training.num_train_epochs % 1:
        needing.append("num_train_epochs")
    if needing:
        reason = (
            f"is not set, but {', '.join(needing)} {verb_for(len(needing), 'depends', 'depend')} on the number of steps"
        )
        yield Fault("training.max_steps", f"{reason}, which a stream does not know before its end: set max_steps")


def _quantisation_faults(model: ModelConfig, training: TrainingConfig) -> Iterator[Fault]:
    """Yield faults in the keys of quantised weights."""
    if model.quant_method is None:
        if model.quant_bits is not None:
            yield Fault("model.quant_bits", "has no effect without model.quant_method: bnb: set both keys, or neither")
        return
    if model.quant_bits not in {4, 8}:
        yield Fault("model.quant_bits", f"is {model.quant_bits}, but has to be 4 or 8")
    if training.tuner_type == "full":
        yield Fault("model.quant_method", "quantises weights that would be trained: set training.tuner_type: lora")


@attrs.frozen
class ForeignKey:
    """Key of another program, and the Packplan key that replaces it."""

    programs: str
    """Names of the programs that have the key, such as `TRL and axolotl`."""

    ours: str = ""
    """Packplan's key with its section; empty if there is none."""

    about: str = ""
    """Difference between the two keys, or the reason why Packplan has no such key; may be empty."""

    def advise(self, written: Sequence[str]) -> str:
        """
        Return which program the key belongs to, and the Packplan keys to write instead, if any.
        """
        if not written:
            return f"is a key of {self.programs} that {self.about or 'has no counterpart here'}: remove it"
        about = f" ({self.about})" if self.about else ""
        return f"is a key of {self.programs}: write {_join_with_or(written)}{about}"


def explain_unknown_key(
    name: str, level: str, known: Iterable[str], *, refused: Mapping[str, str], foreign: Mapping[str, ForeignKey]
) -> str:
    """
    Return the reason why a key is unknown in its section, and what to write instead.

    Args:
        name: The unknown key, as the user wrote it.
        level: Section of the key, such as `training` or `policy.sequence_packing`; empty at the top
            level.
        known: All keys of the configuration, each with its section: `training.learning_rate`.
        refused: Key with its section -> reason and remedy, for keys that are always refused.
        foreign: Name of another program's key -> its Packplan counterpart.

    >>> explain_unknown_key("learning_rate", "", ["training.learning_rate"], refused={}, foreign={})
    'is not a key of the top level: write training.learning_rate'
    """
    paths, level = list(known), re.sub(r"\[\d+\]", "[]", level)
    if f"{_prefix_of(level)}{name}" in paths:
        section, _, last = name.rpartition(".")
        return f"is written with a dot: write {last} in the section {_prefix_of(level)}{section}"
    theirs = foreign.get(name, ForeignKey(""))
    ours = theirs.ours if theirs.ours in paths else _last_part(theirs.ours)
    written = dict.fromkeys(path for one in (ours, name) for path in paths if one in {path, _last_part(path)})
    if any(_last_part(path) == name for path in written):
        return f"is not a key of {level or 'the top level'}: write {_join_with_or([*written])}"
    if reasons := [reason for path, reason in refused.items() if _last_part(path) == name]:
        return reasons[0]
    if theirs.programs:
        return theirs.advise([*written])
    here = [path for path in (*paths, *refused) if path.rpartition(".")[0] == level]
    meant = similar_keys(name, map(_last_part, here))
    if meant and f"{_prefix_of(level)}{meant[0]}" in refused:
        return f"is unknown; {meant[0]}, which it resembles, {refused[f'{_prefix_of(level)}{meant[0]}']}"
    if not meant:
        names = similar_keys(name, map(_last_part, paths))
        meant = [path for close in names for path in paths if _last_part(path) == close]
    return f"is unknown: {f'did you mean {_join_with_or(meant)}?' if meant else 'remove it'}"


def similar_keys(name: str, known: Iterable[str]) -> list[str]:
    """
    Return up to `MAX_NAMED` known keys that *name* may be a misspelling of, the nearest first.

    >>> similar_keys("learning_rat", ["learning_rate", "seed"])
    ['learning_rate']
    >>> similar_keys("min_pixels", ["max_pixels"])
    []
    """
    words = name.lower().replace("-", "_")
    alike = {key for key in known if _DISTINGUISHING.findall(key) == _DISTINGUISHING.findall(words)}
    return get_close_matches(words, sorted(alike), MAX_NAMED, cutoff=0.8)


def _prefix_of(level: str) -> str:
    return f"{level}." if level else ""


def _last_part(path: str) -> str:
    return path.rpartition(".")[2]


def _join_with_or(names: Sequence[str]) -> str:
    return " or ".join(names[:MAX_NAMED])

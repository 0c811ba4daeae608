"""Settings that a checkpoint of reinforcement learning keeps, and which of them may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from packplan.core.config.ranks import flat_values
from packplan.core.config.run import RunConfig
from packplan.core.errors import Fault

_FIXED = frozenset(
    {
        "model.model", "model.torch_dtype", "custom.train_jsonl", "training.seed", "training.tuner_type",
        "training.lora_rank", "training.lora_alpha", "training.target_modules", "training.freeze_llm",
        "training.freeze_vit", "training.freeze_aligner", "policy.train_global_batch_size",
        "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt",
    }
)  # fmt: skip
"""Keys whose values a resumed run has to share: model, data, seed and batch sizes."""

_WITH_VALUES = '"value"'
"""Baseline with a value head, whose weights are in the checkpoint, as `resume_values` gives it."""

_FREE = frozenset({"grpo.num_steps", "grpo.save_every"})
"""Keys of `grpo.` that leave each step as it is."""


def resume_values(config: RunConfig, *, model: str, prompts: str) -> dict[str, str]:
    """
    Return the settings of a run that its checkpoints keep, as JSON by key.

    Args:
        config: The run.
        model: Name of the model, or the whole path of its folder.
        prompts: Digest of the encoded prompts and of the records' answers.
    """
    sections = attrs.asdict(config)
    sections["training"] |= {
        name: sections["training"]["trainer"].get(name) for name in ("learning_rate", "weight_decay", "max_grad_norm")
    }
    values = flat_values(sections) | flat_values({"model.model": model, "custom.train_jsonl": prompts})
    trained = {"training.learning_rate", "training.weight_decay", "training.max_grad_norm", *_FIXED}
    return {
        key: value for key, value in values.items() if key in trained or (key.startswith("grpo.") and key not in _FREE)
    }


def resume_faults(checkpoint: str, then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Fault]:
    """
    Yield each setting that a run may not change when it resumes.

    Args:
        checkpoint: Name of the checkpoint.
        then: `resume_values` of the run that wrote it.
        now: `resume_values` of the run that resumes.
    """
    changed = {key for key in _FIXED if then.get(key) != now.get(key)}
    if "model.model" in changed:
        changed.discard("custom.train_jsonl")  # another tokenizer gives other prompts of the same data
    for key in sorted(changed):
        values = f"is {_shown(now, key)}, but {checkpoint} was trained with {_shown(then, key)}"
        if key == "custom.train_jsonl":
            values = f"gives other prompts or answers than those that {checkpoint} was trained on"
        yield Fault(key, f"{values}: restore it, or start again in another training.output_dir")
    baselines = [values.get("grpo.baseline") for values in (then, now)]
    if baselines[0] != baselines[1] and _WITH_VALUES in baselines:
        reason = f"is {baselines[1]}, but {checkpoint} was trained with {baselines[0]}: a value head cannot come or go"
        yield Fault("grpo.baseline", f"{reason}: restore it")


def changed_settings(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the settings that a run changed when it resumed, and may, each with both values."""
    return [
        f"{key} ({_shown(then, key)}, now {_shown(now, key)})"
        for key in sorted({*then, *now} - _FIXED)
        if then.get(key) != now.get(key)
    ]


def _shown(values: Mapping[str, str], key: str) -> str:
    return values.get(key, "unset")

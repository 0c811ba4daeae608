"""Faults of a run of reinforcement learning, beyond those of every run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import attrs

from packplan.core.config.keys import key_faults, key_of
from packplan.core.config.rl import GrpoConfig, PolicyConfig, SequencePackingConfig
from packplan.core.config.run import RunConfig, TemplateConfig
from packplan.core.context_parallel import padded_length
from packplan.core.errors import Fault

RL_TRAINER_KEYS = frozenset(
    {"learning_rate", "weight_decay", "max_grad_norm", "use_cpu", "ddp_timeout", "save_total_limit"}
)
"""Keys of `TrainingConfig.trainer` that `packplan rl` reads."""


def rl_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield everything wrong with a run of reinforcement learning, beyond `faults`."""
    policy, grpo = config.policy, config.grpo
    for section in ("training", "custom"):
        values = getattr(config, section)
        for field in attrs.fields(type(values)):
            # A mapping has a factory for a default.
            if not key_of(field).rl and getattr(values, field.name) not in (field.default, {}):
                yield Fault(f"{section}.{field.name}", "is not used by packplan rl: remove it")
    if config.template.loss_scale != attrs.fields(TemplateConfig).loss_scale.default:
        yield Fault("template.loss_scale", "weighs the tokens of records, but packplan rl trains on answers: remove it")
    if config.training.tuner_type not in {"full", "lora"}:
        reason = f"is {config.training.tuner_type}, but packplan rl trains all weights or low-rank adapters: set it to "
        reason += "full or lora"
        yield Fault("training.tuner_type", reason)
    for name in sorted(set(config.training.trainer) - RL_TRAINER_KEYS):
        yield Fault(
            f"training.{name}",
            f"is not used by packplan rl, which takes {', '.join(sorted(RL_TRAINER_KEYS))}: remove it",
        )
    if policy.tensor_parallel_size > 1 and config.training.tuner_type != "full":
        reason = "shares layers of the whole model, but low-rank adapters are added to them: set it to 1"
        yield Fault("policy.tensor_parallel_size", reason)
    if ":" in grpo.loss and policy.context_parallel_size > 1:
        yield Fault("grpo.loss", "is of your own, which needs whole sequences: set policy.context_parallel_size: 1")
    yield from _unread_keys(grpo)
    yield from _engine_faults(config)
    yield from _loss_faults(config)
    if not any(key_faults(policy)):
        yield from _policy_faults(policy)
        yield from _budget_faults(config)
        yield from _row_faults(policy.sequence_packing)


def _engine_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield faults of an engine other than the policy."""
    command = config.grpo.engine_command
    if command is None:
        if config.grpo.max_staleness:
            reason = "changes nothing while the policy answers itself: set grpo.engine_command, or remove it"
            yield Fault("grpo.max_staleness", reason)
        return
    for name in ("{folder}", "{port}"):
        if name not in command:
            yield Fault("grpo.engine_command", f"is {command}, without {name}: put it where the server reads it")
    try:
        shlex.split(command)
    except ValueError as error:
        yield Fault("grpo.engine_command", f"is {command}, which is no command: {str(error).lower()}")
    if config.training.tuner_type != "full":
        reason = f"is {config.training.tuner_type}, but an engine gets whole models: set it to full, or remove "
        yield Fault("training.tuner_type", reason + "grpo.engine_command")


_READ_BY: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "ratio_clip_min": frozenset({"clipped", "gspo", "cispo"}),
        "ratio_clip_max": frozenset({"clipped", "gspo", "cispo"}),
        "ratio_clip_c": frozenset({"clipped", "gspo"}),
        "force_on_policy_ratio": frozenset({"clipped", "cispo"}),
    }
)
"""Key of `grpo.` -> losses by name that read it."""

_WITH_MINIMUM = frozenset({"icepop", "sequence_mask"})
"""Corrections that leave out what is below a limit."""

_NEEDED_BY: Mapping[str, tuple[str, Callable[[GrpoConfig], object]]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("kl_estimator", "kl_input_clamp_value", "kl_output_clamp_value", "kl_sampling_gradient"),
            ("without a penalty: set grpo.kl_coefficient", lambda grpo: grpo.kl_coefficient),
        ),
        **dict.fromkeys(
            ("discount", "gae_lambda", "value_coefficient", "value_clip"),
            ("without a value head: set grpo.baseline: value", lambda grpo: grpo.baseline == "value"),
        ),
        "importance_correction": (
            "while the policy answers itself: set grpo.engine_command",
            lambda grpo: grpo.engine_command is not None,
        ),
        "importance_max": (
            "without a correction: set grpo.importance_correction",
            lambda grpo: grpo.importance_correction != "none",
        ),
        "importance_min": (
            "without a lower limit: set grpo.importance_correction: icepop",
            lambda grpo: grpo.importance_correction in _WITH_MINIMUM,
        ),
    }
)
"""Key of `grpo.` -> what it changes nothing without, and whether a run has that."""

_OF_TOKENS = (
    "entropy_coefficient", "importance_correction", "normalisation", "ratio_clip_min", "ratio_clip_max", "ratio_clip_c",
    "force_on_policy_ratio", "kl_estimator", "kl_input_clamp_value", "kl_output_clamp_value", "kl_sampling_gradient",
)  # fmt: skip
"""Keys of `grpo.` that losses by name read, and losses of one's own do not."""


_COMPARED = 2
"""Fewest answers that are compared with each other."""


def _unread_keys(grpo: GrpoConfig) -> Iterator[Fault]:
    """Yield settings of losses that change nothing."""
    defaults, is_own = attrs.fields_dict(GrpoConfig), ":" in grpo.loss

    def is_set(name: str) -> bool:
        return bool(getattr(grpo, name) != defaults[name].default)

    for name, losses in _READ_BY.items():
        if not is_own and grpo.loss not in losses and is_set(name):
            reason = f"is not read by grpo.loss: {grpo.loss}, but by {' and '.join(sorted(losses))}: remove it"
            yield Fault(f"grpo.{name}", reason)
    for name, (without, has) in _NEEDED_BY.items():
        if is_set(name) and not has(grpo):
            yield Fault(f"grpo.{name}", f"changes nothing {without}, or remove it")
    for name in _OF_TOKENS:
        if is_own and is_set(name):
            yield Fault(f"grpo.{name}", f"is not read by grpo.loss: {grpo.loss}, but by losses by name: remove it")


def _loss_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield settings of losses that contradict each other, or the batches."""
    grpo = config.grpo
    if ":" in grpo.loss and grpo.baseline == "value":
        yield Fault("grpo.baseline", "is value, which losses by name train, and not one of your own: set another")
    if grpo.num_generations_per_prompt < _COMPARED and grpo.baseline in {"group", "leave_one_out"}:
        reason = "is 1, but answers are compared with others to their prompt: raise it, or set grpo.baseline: batch"
        yield Fault("grpo.num_generations_per_prompt", reason)
    if grpo.importance_correction in _WITH_MINIMUM and grpo.importance_min >= grpo.importance_max:
        reason = f"is {grpo.importance_min}, but has to be below grpo.importance_max, {grpo.importance_max}"
        yield Fault("grpo.importance_min", reason)
    answers = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    batch_size = config.policy.train_global_batch_size
    if grpo.force_on_policy_ratio and batch_size is not None and batch_size < answers:
        reason = (
            f"holds for the first update of a step alone, but its {answers:,} answers are trained in updates of "
            f"{batch_size:,} (policy.train_global_batch_size): remove either"
        )
        yield Fault("grpo.force_on_policy_ratio", reason)


def _budget_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield faults of budgets that do not hold a sequence of the greatest length."""
    if not (config.template.max_length or config.global_max_length or config.model.max_model_len):
        return
    for name, mode in (
        ("sequence_packing", config.policy.sequence_packing),
        ("dynamic_batching", config.policy.dynamic_batching),
    ):
        widest = -(-config.packing_length // mode.sequence_length_round) * mode.sequence_length_round
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            budget = getattr(mode, key)
            if mode.enabled and budget is not None and budget < widest:
                reason = (
                    f"is {budget:,}, but a sequence may take {widest:,} (template.max_length, in multiples of "
                    f"sequence_length_round): raise it, or lower template.max_length"
                )
                yield Fault(f"policy.{name}.{key}", reason)


def _row_faults(packing: SequencePackingConfig) -> Iterator[Fault]:
    """Yield budgets that rows of whole sequences cannot be as wide as, if they have to."""
    multiple = packing.sequence_length_round
    for name, budget in (
        ("train_mb_tokens", packing.train_mb_tokens),
        ("logprob_mb_tokens", packing.logprob_mb_tokens),
    ):
        if packing.enabled and packing.row_width == "budget" and budget is not None and budget % multiple:
            reason = (
                f"is {budget:,}, but rows of that width (row_width: budget) have to be a multiple of {multiple:,} "
                f"(sequence_length_round): set it to {-(-budget // multiple) * multiple:,}"
            )
            yield Fault(f"policy.sequence_packing.{name}", reason)


def _policy_faults(policy: PolicyConfig) -> Iterator[Fault]:
    """Yield faults of modes that do not go together."""
    packing, dynamic = policy.sequence_packing, policy.dynamic_batching
    multiple = padded_length(1, cp_size=policy.context_parallel_size, tp_size=policy.tensor_parallel_size)
    if packing.enabled and dynamic.enabled:
        reason = "and policy.sequence_packing exclude each other: disable one; packing computes less"
        yield Fault("policy.dynamic_batching", reason)
    if policy.context_parallel_size > 1 and not packing.enabled:
        reason = "cuts packed rows: enable policy.sequence_packing, or set it to 1"
        yield Fault("policy.context_parallel_size", reason)
    if packing.enabled and packing.sequence_length_round % multiple:
        reason = (
            f"is {packing.sequence_length_round}, but the ranks that share a row or a layer need a multiple of "
            f"{multiple}: set it to "
            f"{-(-packing.sequence_length_round // multiple) * multiple}"
        )
        yield Fault("policy.sequence_packing.sequence_length_round", reason)

"""
What a run is: frozen, validated once, every field with its unit and default.

`RunConfig` mirrors the YAML, section by section. Keys of `training.` that are ms-swift's or transformers' own are in
`TrainingConfig.trainer`, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal

import attrs

from core.errors import Fault
from core.packers import ALGORITHMS

PACKING_BUFFER = 512


def _read_only(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(keys))


@attrs.frozen(kw_only=True)
class ModelConfig:
    """`model.`: what is trained."""

    model: str
    """Folder of the model, its tokenizer and its processor."""

    model_type: str | None = None
    """ms-swift's name of the architecture; unset, the model's config.json says it."""

    attn_impl: str = "sdpa"
    """Attention backend; packing refuses one that is not established to keep samples apart."""

    torch_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights; unset, the model's own."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model's folder."""

    max_model_len: int | None = None
    """Tokens; the budget of a pack where `template.max_length` is not set."""


@attrs.frozen(kw_only=True)
class TemplateConfig:
    """`template.`: how a record becomes tokens."""

    template: str | None = None
    """ms-swift's name of the chat template; unset, the model type's."""

    max_length: int | None = None
    """Tokens of a pack: the packing length; unset, `global_max_length`, else `model.max_model_len`. There is no
    `packing_length` key."""

    max_pixels: int | None = None
    """Pixels an image is scaled down to; unset, the processor's own limit."""

    system: str | None = None
    """System prompt of records that bring none; unset, the template's."""

    truncation_strategy: Literal["left", "right", "raise"] | None = None
    """Cut samples above the limit at that end (cut samples are long samples, and counted), or refuse them; unset, they are
    never cut: they are long samples."""


@attrs.frozen(kw_only=True)
class CustomConfig:
    """`custom.`: the data, and which trainer."""

    train_jsonl: tuple[str, ...] = ()
    """Data files, one record a line; relative image paths start at the folder of their file. Needed, unless `fusion_config`
    names the data."""

    val_jsonl: tuple[str, ...] = ()
    """Data files of the evaluation; unset, there is none."""

    fusion_config: str | None = None
    """A mix of data sets, another one each epoch (a YAML); of the rollout variant. A static plan takes what `app.plan
    materialise` writes."""

    trainer_variant: Literal["sft", "rollout"] = "sft"
    """`sft` is Stage-1, from static plans; `rollout` packs while it trains."""

    object_field_order: Literal["desc_first", "geometry_first"] = "desc_first"
    """Order of what is said of each object of a dense caption."""

    use_summary: bool = False
    """Answer dense captions with their summary."""

    rollout_reward: str | None = None
    """Of the rollout variant: scores the model's own answers, the best of which are trained: one of
    `core.rewards.REWARDS`, or `module:function`. Unset, the data are trained as they are."""

    rollout_completions: int = 4
    """Answers to each prompt."""

    rollout_keep: int = 1
    """The best so many answers of a prompt become training samples."""

    rollout_max_new_tokens: int = 64
    """Tokens of an answer."""

    rollout_temperature: float = 1.0
    """Temperature of the answers; above 0."""


@attrs.frozen(kw_only=True)
class TrainingConfig:
    """`training.`: packing, the batch, and the trainer's own settings."""

    output_dir: str
    """Folder of checkpoints, logs and plans."""

    packing: bool = True
    """`false` trains padded batches through the same trainer; the packing keys may stay."""

    packing_mode: Literal["static", "dynamic"] = "static"
    """Stage-1 is static, the rollout variant dynamic."""

    packing_algorithm: str = "constant_volume"
    """How samples are put into packs: one of `core.packers.ALGORITHMS`. `certified` finds the fewest."""

    packing_buffer: int = PACKING_BUFFER
    """Samples that are packed together; of dynamic packing: another value is refused in static mode."""

    packing_min_fill_ratio: Decimal = Decimal("0.65")
    """Packs filled below this share of the packing length are dropped; compared as the decimal it is."""

    packing_drop_last: bool = True
    """Whether packs filled below `packing_min_fill_ratio` are dropped."""

    packing_allow_single_long: bool = True
    """Give a sample of the packing length or more a pack of its own; `false` skips it."""

    eval_packing: bool | None = None
    """Whether evaluation is packed; unset, in Stage-1 and not in the rollout variant. Never without `packing`. The metric
    is the same either way."""

    packing_wait_timeout_s: float = 7200.0
    """Seconds that other ranks wait for rank 0 to measure and plan; 0 means for ever."""

    packing_lengths_from: str | None = None
    """The `output_dir` of another run, whose lengths are taken over where this run has none: a series of compared runs
    measures once. It is only read, and has to have been measured from the same inputs."""

    packing_length_cache_persist_every: int | None = None
    """Samples between two flushes of the measured lengths; unset, it adapts to the size of the data set."""

    packing_length_precompute_workers: int = 8
    """Processes that measure, at most one a core; a short rest is measured in one. 1 measures in the main process."""

    effective_batch_size: int | None = None
    """Packs of one optimizer step over all ranks (samples, if not packing), which the ranks have to divide; unset, what the
    next two imply."""

    per_device_train_batch_size: int = 1
    """Batch of a rank. Packing forces it to 1, with a warning, and keeps the packs of a step by accumulation."""

    gradient_accumulation_steps: int | None = None
    """Batches of a rank in one optimizer step; unset, 1. Overridden where `effective_batch_size` is set, or packing forces the
    batch to 1."""

    per_device_eval_batch_size: int = 1
    """Samples of a padded evaluation batch; packed evaluation forces it to 1."""

    dataloader_drop_last: bool = False
    """Drop the packs that do not fill all ranks, instead of repeating packs from the front."""

    num_train_epochs: float = 3.0
    """Epochs; may be fractional."""

    max_steps: int = -1
    """Optimizer steps in total, if positive; overrides the epochs."""

    loss_reduction: Literal["token", "sample", "sqrt"] = "token"
    """What weighs the same in a step's loss, over all ranks: every token, every sample, or in between (`sqrt`: a token
    of a sample of n supervised tokens weighs n ** -0.5)."""

    seed: int = 42
    """Seed of weights, dropout and the order of packs, which is drawn anew each epoch."""

    resume_from_checkpoint: str | None = None
    """A checkpoint's folder, or `last` for the newest whole one of `output_dir`."""

    tuner_type: Literal["full", "lora"] = "full"
    """Train all weights, or low-rank adapters."""

    lora_rank: int = 8
    """Rank of the adapters."""

    lora_alpha: int = 32
    """An adapter's output is scaled by this over its rank."""

    lora_dropout: float = 0.05
    """Share of an adapter's inputs that are dropped, from 0 to below 1."""

    target_modules: tuple[str, ...] = ("all-linear",)
    """Modules that get an adapter."""

    freeze_llm: bool = False
    """Keep the language model's weights."""

    freeze_vit: bool = False
    """Keep the vision tower's weights."""

    freeze_aligner: bool = False
    """Keep the weights between the two."""

    trainer: Mapping[str, Any] = attrs.field(factory=dict, converter=_read_only)
    """Every other key of ms-swift's `Seq2SeqTrainingArguments`, and so of transformers, as it is, checked against its type."""


@attrs.frozen(kw_only=True)
class SequencePackingConfig:
    """`policy.sequence_packing`: microbatches of an RL batch as packed rows."""

    enabled: bool = False
    """Whether microbatches are made so."""

    train_mb_tokens: int = 4096
    """Tokens of a row while the policy is updated, padding included."""

    logprob_mb_tokens: int | None = None
    """Tokens of a row where only log-probabilities are computed; unset, `train_mb_tokens`."""

    algorithm: str = "modified_first_fit_decreasing"
    """How sequences are put into rows: one of `core.packers.ALGORITHMS`."""

    sequence_length_round: int = 1
    """Each sequence is padded to a multiple of it."""

    assignment: Literal["balanced", "round_robin"] = "balanced"
    """Deal sequences so that workers have equal attention work, or whole packs in turn."""

    microbatch_order: Literal["packer", "largest_first"] = "packer"
    """Of a worker's rows: by first sequence, or by falling number of tokens."""


@attrs.frozen(kw_only=True)
class DynamicBatchingConfig:
    """`policy.dynamic_batching`: microbatches of an RL batch as padded batches of sequences of like length."""

    enabled: bool = False
    """Whether microbatches are made so."""

    train_mb_tokens: int = 4096
    """Sequences times width of a microbatch while the policy is updated."""

    logprob_mb_tokens: int | None = None
    """The same where only log-probabilities are computed; unset, `train_mb_tokens`."""

    sequence_length_round: int = 64
    """Widths are multiples of it."""


@attrs.frozen(kw_only=True)
class PolicyConfig:
    """`policy.`: how an RL batch is computed; `app.rl` alone reads it."""

    sequence_packing: SequencePackingConfig = attrs.field(factory=SequencePackingConfig)

    dynamic_batching: DynamicBatchingConfig = attrs.field(factory=DynamicBatchingConfig)

    train_global_batch_size: int | None = None
    """Sequences of one optimizer step over all workers; unset, all rollouts of a step."""

    train_micro_batch_size: int = 4
    """Sequences of a padded microbatch, where neither packing nor dynamic batching is enabled."""

    logprob_batch_size: int | None = None
    """The same where only log-probabilities are computed; unset, `train_micro_batch_size`."""

    generation_batch_size: int = 32
    """Prompts that a worker answers at a time."""

    context_parallel_size: int = 1
    """Ranks that share each row; needs packing."""

    tensor_parallel_size: int = 1
    """`app.rl` runs 1 alone; others cut with `core.shard` for an engine of their own."""

    pipeline_parallel_size: int = 1
    """`app.rl` runs 1 alone; packed rows would be padded to a fixed length."""

    compile: bool = False
    """Compile the model with torch.compile; not with dynamic batching, whose shapes change."""


@attrs.frozen(kw_only=True)
class GrpoConfig:
    """`grpo.`: the reinforcement learning of `app.rl` (GRPO: Shao et al., "DeepSeekMath", 2024)."""

    num_steps: int = 100
    """Rounds of rollouts and updates."""

    num_prompts_per_step: int = 8
    """Prompts of a round; they come in an order of each epoch over the data."""

    num_generations_per_prompt: int = 8
    """Answers to each, which are compared with each other; at least 2."""

    max_new_tokens: int = 64
    """Tokens of an answer."""

    temperature: float = 1.0
    """Temperature of the answers; above 0."""

    reward: str = "word_overlap"
    """Scores an answer against the record's own: one of `core.rewards.REWARDS`, or `module:function`."""

    loss: str = "clipped"
    """`clipped`, the policy-gradient loss of PPO and GRPO, or `module:function`: a loss over the logits of a sequence (see
    `adapters.sequence_loss.SequenceLoss`)."""

    normalisation: Literal["token", "sequence"] = "token"
    """What weighs the same in the clipped loss: every token of an answer, or every answer."""

    ratio_clip_min: float = 0.2
    """How far below 1 the ratio of new to old probability counts."""

    ratio_clip_max: float = 0.2
    """How far above 1."""

    save_every: int | None = None
    """Steps between two writes of the policy, to `policy-<step>/`; unset: at the end alone, to `policy/`."""

    kl_coefficient: float = 0.0
    """Weight of the divergence from the model that training started with; 0 keeps no copy of it."""


@attrs.frozen(kw_only=True)
class RunConfig:
    """One run, as its YAML says."""

    model: ModelConfig
    template: TemplateConfig
    custom: CustomConfig
    training: TrainingConfig
    policy: PolicyConfig = attrs.field(factory=PolicyConfig)
    grpo: GrpoConfig = attrs.field(factory=GrpoConfig)

    global_max_length: int | None = None
    """Tokens; sets `template.max_length` and `model.max_model_len` where these are not given."""

    @property
    def packing_length(self) -> int:
        """Tokens a pack may hold: `template.max_length`, else `model.max_model_len`, each else `global_max_length`."""
        length = self.template.max_length or self.global_max_length or self.model.max_model_len
        assert length is not None  # noqa: S101  # `faults` refuses a run without one
        return length

    @property
    def eval_packing(self) -> bool:
        """Whether evaluation is packed."""
        asked = self.training.eval_packing
        return self.training.packing and (self.custom.trainer_variant == "sft" if asked is None else asked)


RL_KEYS = MappingProxyType(
    {
        "training": frozenset(
            {"output_dir", "seed", "tuner_type", "lora_rank", "lora_alpha", "lora_dropout", "target_modules",
             "freeze_llm", "freeze_vit", "freeze_aligner", "trainer"}
        ),
        "custom": frozenset({"train_jsonl", "object_field_order", "use_summary"}),
    }
)  # fmt: skip
"""Keys of these sections that `app.rl` reads."""

RL_TRAINER_KEYS = frozenset({"learning_rate", "weight_decay", "max_grad_norm", "use_cpu", "ddp_timeout"})
"""Keys of `TrainingConfig.trainer` that `app.rl` reads."""

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
        "parallelism_config": "joins several ranks to one learner, but a plan counts every rank: remove it",
        "ignore_data_skip": "would train packs of the epoch again after a resume: remove it; to start anew from a "
        "checkpoint's weights, set model.model to it",
        "average_tokens_across_devices": "is always on, so that the loss is the mean over all tokens: remove it",
    }
)
"""Keys of `training.` -> why they are refused, and what to do."""


def faults(config: RunConfig) -> Iterator[Fault]:
    """Yield everything wrong with a configuration that its types cannot say."""
    yield from _number_faults(config)
    yield from _mode_faults(config)
    if not (config.template.max_length or config.global_max_length or config.model.max_model_len):
        yield Fault("template.max_length", "is not set, and it is the budget of a pack: set it to a number of tokens")
    if not config.custom.train_jsonl and config.custom.fusion_config is None:
        yield Fault("custom.train_jsonl", "is not set: name the data file, or a list of them")


def _number_faults(config: RunConfig) -> Iterator[Fault]:
    training = config.training
    at_least_one = {
        "global_max_length": config.global_max_length,
        "model.max_model_len": config.model.max_model_len,
        "template.max_length": config.template.max_length,
        "template.max_pixels": config.template.max_pixels,
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
    ratio = training.packing_min_fill_ratio
    if ratio.is_nan() or not 0 <= ratio <= 1:
        yield Fault("training.packing_min_fill_ratio", f"is {ratio}, but has to be from 0 to 1")
    if not 0 <= training.lora_dropout < 1:
        yield Fault("training.lora_dropout", f"is {training.lora_dropout}, but has to be from 0 to below 1")
    if not 0 <= training.packing_wait_timeout_s < float("inf"):
        yield Fault(
            "training.packing_wait_timeout_s",
            f"is {training.packing_wait_timeout_s}, but has to be a number of seconds, or 0 to wait for ever",
        )
    if training.max_steps < 1 and not 0 < training.num_train_epochs < float("inf"):
        yield Fault("training.num_train_epochs", f"is {training.num_train_epochs}, but has to be above 0")
    if training.max_steps == 0 or training.max_steps < -1:
        yield Fault("training.max_steps", f"is {training.max_steps}, but has to be at least 1, or -1 for no limit")
    if not 0 <= training.seed < 2**32:
        yield Fault("training.seed", f"is {training.seed}, but has to be from 0 to 2**32 - 1")
    if training.packing_algorithm not in ALGORITHMS:
        yield Fault(
            "training.packing_algorithm",
            f"is {training.packing_algorithm!r}, but has to be one of {', '.join(ALGORITHMS)}",
        )


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
    data_seed = training.trainer.get("data_seed", 0)
    if data_seed is None or data_seed < 0:
        yield Fault("training.data_seed", f"is {data_seed}, but has to be at least 0: remove it to use training.seed")
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
            "mixes data sets anew each epoch, which a static plan cannot follow: write an epoch's mix to one JSONL "
            "(python -m app.plan materialise mix.yaml -o mix.jsonl) and name it in custom.train_jsonl",
        )


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
        yield Fault("training.resume_from_checkpoint", "is for static plans: a stream starts anew; remove it")
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


def rl_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield what is wrong with a run of reinforcement learning, beyond `faults`."""
    policy, grpo = config.policy, config.grpo
    for section, used in RL_KEYS.items():
        values = getattr(config, section)
        for field in attrs.fields(type(values)):
            if field.name not in used and getattr(values, field.name) != field.default:
                yield Fault(f"{section}.{field.name}", "is not used by app.rl: remove it")
    for name in ("learning_rate", "weight_decay", "max_grad_norm"):
        value = config.training.trainer.get(name, 0)
        if not 0 <= value < float("inf"):
            yield Fault(f"training.{name}", f"is {value}, but has to be at least 0")
    for name in sorted(set(config.training.trainer) - RL_TRAINER_KEYS):
        yield Fault(
            f"training.{name}", f"is not used by app.rl, which takes {', '.join(sorted(RL_TRAINER_KEYS))}: remove it"
        )
    yield from _grpo_faults(grpo)
    if grpo.loss != "clipped" and policy.context_parallel_size > 1:
        yield Fault("grpo.loss", "is of your own, which needs whole sequences: set policy.context_parallel_size: 1")
    small = [Fault(f"policy.{path}", f"is {n}, but has to be at least 1") for path, n in _sizes(policy) if n < 1]
    yield from small
    if small:
        return
    yield from _policy_faults(policy)
    yield from _budget_faults(config)


def _grpo_faults(grpo: GrpoConfig) -> Iterator[Fault]:
    for name in ("num_steps", "num_prompts_per_step", "max_new_tokens", "save_every"):
        value = getattr(grpo, name)
        if value is not None and value < 1:
            yield Fault(f"grpo.{name}", f"is {value}, but has to be at least 1")
    if grpo.num_generations_per_prompt < 2:
        reason = f"is {grpo.num_generations_per_prompt}, but answers are compared with each other: at least 2"
        yield Fault("grpo.num_generations_per_prompt", reason)
    if not 0 < grpo.temperature < float("inf"):
        yield Fault("grpo.temperature", f"is {grpo.temperature}, but has to be above 0")
    for name in ("ratio_clip_min", "ratio_clip_max", "kl_coefficient"):
        if not 0 <= getattr(grpo, name) < float("inf"):
            yield Fault(f"grpo.{name}", f"is {getattr(grpo, name)}, but has to be at least 0")


def _budget_faults(config: RunConfig) -> Iterator[Fault]:
    """Yield which budgets do not hold a sequence of the greatest length."""
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


def _sizes(policy: PolicyConfig) -> Iterator[tuple[str, int]]:
    for name, value in attrs.asdict(policy).items():
        nested = value.items() if isinstance(value, dict) else [("", value)]
        for key, size in nested:
            if isinstance(size, int) and not isinstance(size, bool):
                yield f"{name}.{key}".rstrip("."), size


def _policy_faults(policy: PolicyConfig) -> Iterator[Fault]:
    """Yield which modes do not go together."""
    packing, dynamic = policy.sequence_packing, policy.dynamic_batching
    ways = 2 * policy.context_parallel_size if policy.context_parallel_size > 1 else 1
    multiple = ways * policy.tensor_parallel_size
    if packing.enabled and dynamic.enabled:
        reason = "and policy.sequence_packing exclude each other: disable one; packing computes less"
        yield Fault("policy.dynamic_batching", reason)
    if packing.algorithm not in ALGORITHMS:
        reason = f"is {packing.algorithm!r}, but has to be one of {', '.join(ALGORITHMS)}"
        yield Fault("policy.sequence_packing.algorithm", reason)
    if dynamic.enabled and policy.pipeline_parallel_size > 1:
        reason = "needs microbatches of one shape, which dynamic batching does not give: use policy.sequence_packing"
        yield Fault("policy.pipeline_parallel_size", reason)
    if dynamic.enabled and policy.compile:
        reason = "would compile anew for each shape of dynamic batching: remove it, or use policy.sequence_packing"
        yield Fault("policy.compile", reason)
    if policy.context_parallel_size > 1 and not packing.enabled:
        reason = "cuts packed rows: enable policy.sequence_packing, or set it to 1"
        yield Fault("policy.context_parallel_size", reason)
    if packing.enabled and packing.sequence_length_round % multiple:
        reason = (
            f"is {packing.sequence_length_round}, but the ranks that share a row need a multiple of {multiple} (2 * "
            f"context_parallel_size * tensor_parallel_size): set it to {-(-packing.sequence_length_round // multiple) * multiple}"
        )
        yield Fault("policy.sequence_packing.sequence_length_round", reason)

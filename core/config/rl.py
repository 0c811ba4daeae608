"""What a run of reinforcement learning is: the sections `policy:` and `grpo:` of its YAML."""

from __future__ import annotations

from typing import Literal

import attrs


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
    """Assign sequences so that workers have equal attention work, or whole packs in turn."""

    microbatch_order: Literal["packer", "largest_first"] = "packer"
    """Order of a worker's rows: by first sequence, or by falling number of tokens."""


@attrs.frozen(kw_only=True)
class DynamicBatchingConfig:
    """
    `policy.dynamic_batching`: microbatches of an RL batch as padded batches of sequences of like
    length.
    """

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
    """`policy.`: how an RL batch is computed; `packplan rl` alone reads it."""

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
    """`packplan rl` runs 1 alone; others cut with `core.shard` for an engine of their own."""

    pipeline_parallel_size: int = 1
    """`packplan rl` runs 1 alone; packed rows would be padded to a fixed length."""

    compile: bool = False
    """Compile the model with torch.compile; not with dynamic batching, whose shapes change."""


@attrs.frozen(kw_only=True)
class GrpoConfig:
    """
    `grpo.`: the reinforcement learning of `packplan rl` (GRPO: Shao et al., "DeepSeekMath", 2024).
    """

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
    """Scores an answer against the record's own: one of `core.rl.REWARDS`, or `module:function`."""

    loss: str = "clipped"
    """
    `clipped`, the policy-gradient loss of PPO and GRPO, or `module:function`: a loss over the
    logits of a sequence (see `adapters.sequence_loss.SequenceLoss`).
    """

    normalisation: Literal["token", "sequence"] = "token"
    """What weighs the same in the clipped loss: every token of an answer, or every answer."""

    ratio_clip_min: float = 0.2
    """How far below 1 the ratio of new to old probability counts."""

    ratio_clip_max: float = 0.2
    """How far above 1."""

    save_every: int | None = None
    """
    Steps between two writes of the policy, to `policy-<step>/`; unset: at the end alone, to
    `policy/`.
    """

    kl_coefficient: float = 0.0
    """Weight of the divergence from the model that training started with; 0 keeps no copy of it."""

"""Sections `policy:` and `grpo:`, the configuration of a run of reinforcement learning."""

from __future__ import annotations

from typing import Literal

import attrs

from packplan.core.config.keys import above_0, at_least, key, must, one_of, share
from packplan.core.packers import ALGORITHMS

_OF_BATCHES = [name for name, algorithm in ALGORITHMS.items() if not algorithm.displaces]
"""Packing algorithms of an RL batch, whose sequences have no order to keep."""


@attrs.frozen(kw_only=True)
class SequencePackingConfig:
    """`policy.sequence_packing`: microbatches of an RL batch as packed rows."""

    enabled: bool = False
    """Pack sequences into rows."""

    train_mb_tokens: int = key(4096, check=at_least(1))
    """Tokens of a row in updates of the policy, padding included."""

    logprob_mb_tokens: int | None = key(None, check=at_least(1))
    """Tokens of a row for log-probabilities alone; unset, `train_mb_tokens`."""

    algorithm: str = key("modified_first_fit_decreasing", check=one_of(_OF_BATCHES))
    """How sequences are packed into rows: as `training.packing_algorithm`, but not `ordered`."""

    sequence_length_round: int = key(1, check=at_least(1))
    """Each sequence is padded to a multiple of it."""

    assignment: Literal["balanced", "round_robin"] = "balanced"
    """Give workers equal attention work, or whole packs in turn."""

    microbatch_order: Literal["packer", "largest_first"] = "packer"
    """Order of a worker's rows: by first sequence, or most tokens first."""

    row_width: Literal["own", "longest", "budget"] = "own"
    """
    Positions that rows are padded to: none beyond their sequences (`own`), those of the `longest`
    row of the update, or the whole `budget`, so that all rows of a run have one shape.
    """


@attrs.frozen(kw_only=True)
class DynamicBatchingConfig:
    """`policy.dynamic_batching`: microbatches as padded batches of sequences of like length."""

    enabled: bool = False
    """Pad sequences of like length to one width."""

    train_mb_tokens: int = key(4096, check=at_least(1))
    """Sequences times width of a microbatch in updates of the policy."""

    logprob_mb_tokens: int | None = key(None, check=at_least(1))
    """The same for log-probabilities alone; unset, `train_mb_tokens`."""

    sequence_length_round: int = key(64, check=at_least(1))
    """Widths are multiples of it."""


@attrs.frozen(kw_only=True)
class PolicyConfig:
    """`policy.`: computation of an RL batch, for `packplan rl` alone."""

    sequence_packing: SequencePackingConfig = attrs.field(factory=SequencePackingConfig)

    dynamic_batching: DynamicBatchingConfig = attrs.field(factory=DynamicBatchingConfig)

    train_global_batch_size: int | None = key(None, check=at_least(1))
    """Sequences of an optimizer step over all workers; unset, all rollouts of a step."""

    train_micro_batch_size: int = key(4, check=at_least(1))
    """Sequences of a padded microbatch, without packing or dynamic batching."""

    logprob_batch_size: int | None = key(None, check=at_least(1))
    """The same for log-probabilities alone; unset, `train_micro_batch_size`."""

    generation_batch_size: int = key(32, check=at_least(1))
    """Prompts that a worker answers at a time."""

    context_parallel_size: int = key(1, check=at_least(1))
    """Ranks that share each row; needs packing."""

    tensor_parallel_size: int = key(1, check=at_least(1))
    """Ranks that share each layer, by the model's own plan in transformers."""

    sharding: Literal["none", "fsdp2"] = "none"
    """`fsdp2`: workers hold a share of weights, gradients and optimizer states each."""

    @property
    def ranks_per_shard(self) -> int:
        """Number of ranks that compute the same shard of a batch together."""
        return self.context_parallel_size * self.tensor_parallel_size


@attrs.frozen(kw_only=True)
class GrpoConfig:
    """
    `grpo.`: reinforcement learning of `packplan rl` (GRPO: Shao et al., "DeepSeekMath", 2024).
    """

    num_steps: int = key(100, check=at_least(1))
    """Rounds of rollouts and updates."""

    num_prompts_per_step: int = key(8, check=at_least(1))
    """Prompts of a round, in an order drawn for each epoch."""

    num_generations_per_prompt: int = key(8, check=at_least(1))
    """Answers to a prompt; at least 2 where they are compared with each other."""

    max_new_tokens: int = key(64, check=at_least(1))
    """Tokens of an answer."""

    temperature: float = key(1.0, check=above_0)
    """Sampling temperature; above 0."""

    engine_command: str | None = None
    """
    Command of an OpenAI-compatible server that answers prompts, `{folder}` and `{port}` in it:
    `transformers serve {folder} --port {port}`. Unset, the policy answers.
    """

    max_staleness: int = key(0, check=at_least(0))
    """
    Steps by which the weights of an answer may be older than the policy: the engine gets new ones
    before they are.
    """

    reward: str = "word_overlap"
    """Score of an answer against the record's: one of `core.rl.REWARDS`, or `module:function`."""

    loss: str = "clipped"
    """
    `clipped`, the policy-gradient loss of PPO and GRPO, `gspo`, `cispo`, `reinforce`, or
    `module:function`, a loss over a sequence's logits (`adapters.losses.sequences.SequenceLoss`).
    """

    normalisation: Literal["token", "sequence", "constant"] = "token"
    """
    Unit of equal weight in the loss: token, answer, or answers of `max_new_tokens` tokens
    (`constant`, Dr. GRPO).
    """

    baseline: Literal["group", "leave_one_out", "batch", "value"] = "group"
    """
    Baseline of rewards: the mean of the answers to a prompt, of the other ones of them (RLOO), of
    all answers of a step (REINFORCE++), or the value that a value head expects (PPO).
    """

    scale_rewards: bool = True
    """
    Divide advantages by their deviation in the group or the batch, those of a value head by the
    deviation of all tokens; Dr. GRPO does not.
    """

    discount: float = key(1.0, check=share)
    """With a value head: discount factor of each token."""

    gae_lambda: float = key(0.95, check=share)
    """With a value head: 0 trusts the value of the next token, 1 the reward alone."""

    value_coefficient: float = key(0.5, check=above_0)
    """Weight of a value head's squared error."""

    value_clip: float | None = key(None, check=above_0)
    """Distance from its old value up to which a new one lowers the error; unset, any."""

    entropy_coefficient: float = key(0.0, check=at_least(0))
    """Weight of the entropy, which the loss rewards; it is logged in any case."""

    importance_correction: Literal["none", "truncated", "sequence", "icepop", "sequence_mask"] = "none"
    """
    Weigh tokens by the policy's probability over that of the engine which drew them, up to a limit
    (`truncated`), or by the product over the answer (`sequence`). Leave out tokens beyond a limit
    (`icepop`), or answers whose mean is (`sequence_mask`).
    """

    importance_max: float = key(2.0, check=above_0)
    """Largest weight; a large number sets no limit."""

    importance_min: float = key(0.5, check=at_least(0))
    """Smallest weight of `icepop` and `sequence_mask`."""

    ratio_clip_min: float = key(0.2, check=at_least(0))
    """Distance below 1 up to which the ratio of new to old probability counts."""

    ratio_clip_max: float = key(0.2, check=at_least(0))
    """Distance above 1 up to which the ratio counts."""

    ratio_clip_c: float | None = key(None, check=must(lambda limit: limit > 1, "above 1"))
    """Dual clip: largest loss of an unfavourable token, over its advantage; above 1."""

    force_on_policy_ratio: bool = False
    """Take 1 for the ratio: each answer is trained once, by the policy that gave it."""

    save_every: int | None = key(10, check=at_least(1))
    """
    Steps between checkpoints, `checkpoint-<step>/`, from which a run resumes; `null` writes none.
    The policy is saved at the end, to `policy/`.
    """

    kl_coefficient: float = key(0.0, check=at_least(0))
    """Weight of the divergence from the initial model; 0 keeps no copy of it."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence, by its name in Schulman's "Approximating KL Divergence"."""

    kl_input_clamp_value: float | None = key(None, check=above_0)
    """Largest logarithm of a ratio that the estimator reads; 20 in NeMo-RL."""

    kl_output_clamp_value: float | None = key(None, check=above_0)
    """Largest estimate of a token; 10 in NeMo-RL."""

    kl_sampling_gradient: bool = False
    """Add the gradient of the sampling, so that the penalty's is the divergence's own."""

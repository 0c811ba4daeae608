"""
Configuration of `packplan rl`: the sections `policy:` and `grpo:`, and the keys shared with
`packplan sft`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from packplan.core.config.faults import evaluation_faults, missing_data_faults
from packplan.core.config.keys import at_least, key, key_faults, one_of, yield_keys
from packplan.core.config.run import RunConfig
from packplan.core.errors import Fault
from packplan.core.packers import ALGORITHMS

_READ_KEYS = frozenset(
    f"{section}.{name}"
    for section, names in {
        "model": "model attn_impl torch_dtype trust_remote_code download",
        "template": "system",
        "custom": "train_jsonl val_jsonl object_field_order use_summary columns max_line_bytes max_image_pixels "
        "literal_image_tags records_cache media_cache media_dir",
    }.items()
    for name in names.split()
)
"""Keys of `packplan sft` that `packplan rl` reads too."""


@attrs.frozen(kw_only=True)
class SequencePackingConfig:
    """`policy.sequence_packing`: microbatches of rows that the model computes without padding."""

    enabled: bool = False
    """Pack sequences into microbatches."""

    train_mb_tokens: int = key(4096, check=at_least(1))
    """
    Maximum number of tokens in a microbatch of policy updates. A longer sequence is a microbatch by
    itself.
    """

    logprob_mb_tokens: int | None = key(None, check=at_least(1))
    """
    Maximum number of tokens in a microbatch that only computes log-probabilities of the policy or
    the reference model. If unset, `train_mb_tokens` applies.
    """

    algorithm: str = key("modified_first_fit_decreasing", check=one_of(ALGORITHMS))
    """Packing algorithm, named as in `training.packing_algorithm`."""

    sequence_length_round: int = key(1, check=at_least(1))
    """Lengths are rounded up to a multiple of this number."""


@attrs.frozen(kw_only=True)
class DynamicBatchingConfig:
    """`policy.dynamic_batching`: padded microbatches of sequences of similar length."""

    enabled: bool = False
    """Form microbatches of sequences of similar length, padded to one width."""

    train_mb_tokens: int = key(4096, check=at_least(1))
    """Maximum size of a microbatch of policy updates: number of sequences times padded width."""

    logprob_mb_tokens: int | None = key(None, check=at_least(1))
    """
    Maximum size, counted in the same way, of a microbatch that only computes log-probabilities. If
    unset, `train_mb_tokens` applies.
    """

    sequence_length_round: int = key(64, check=at_least(1))
    """Padded widths are rounded up to a multiple of this number."""


@attrs.frozen(kw_only=True)
class PolicyConfig:
    """
    `policy.`: how `packplan rl` forms microbatches. If neither section below is enabled, TRL forms
    the microbatches.
    """

    sequence_packing: SequencePackingConfig = attrs.field(factory=SequencePackingConfig)

    dynamic_batching: DynamicBatchingConfig = attrs.field(factory=DynamicBatchingConfig)


@attrs.frozen(kw_only=True)
class RlConfig(RunConfig):
    """
    Configuration of `packplan rl`.

    The YAML has no section `training:`. The field `training` holds only the output folder.
    """

    policy: PolicyConfig = attrs.field(factory=PolicyConfig)

    grpo: Mapping[str, Any] = attrs.field(factory=dict)
    """
    `reward_funcs` (functions, as `module:function`), arguments of TRL's `GRPOConfig`, and arguments
    of TRL's `ModelConfig` for low-rank adapters.
    """


def rl_faults(config: RlConfig) -> Iterator[Fault]:
    """
    Yield each fault of a reinforcement learning configuration whose values all have the right
    types.
    """
    yield from key_faults(config)
    yield from missing_data_faults(config.custom)
    yield from evaluation_faults(config, "grpo", config.grpo)
    for path, field in yield_keys(RunConfig):
        section, _, name = path.rpartition(".")
        value = getattr(getattr(config, section) if section else config, name)
        if section != "training" and path not in _READ_KEYS and value not in (field.default, {}):
            yield Fault(path, "is not used by packplan rl: remove it")
    if config.policy.sequence_packing.enabled and config.policy.dynamic_batching.enabled:
        reason = "and policy.sequence_packing exclude each other: disable one (packing computes no padding)"
        yield Fault("policy.dynamic_batching", reason)
    if config.policy.dynamic_batching.enabled and config.grpo.get("torch_compile"):
        reason = "compiles a program for each width, and policy.dynamic_batching has many widths: remove it"
        yield Fault("grpo.torch_compile", f"{reason}, or use policy.sequence_packing")
    if not config.grpo.get("reward_funcs"):
        yield Fault("grpo.reward_funcs", "is not set: name a function, as module:function, or a list of functions")

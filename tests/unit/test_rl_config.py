"""The sections of reinforcement learning: what goes together, and what is refused, by key."""

from __future__ import annotations

import pytest

from packplan.adapters.config.run import parse_config
from packplan.adapters.config.trainer_keys import TrainerKey
from packplan.core.errors import ConfigError

KEYS = {"learning_rate": TrainerKey(("float",)), "warmup_steps": TrainerKey(("int",))}
PACKING = {"sequence_packing": {"enabled": True}}
DYNAMIC = {"dynamic_batching": {"enabled": True}}


def parsed(policy=None, grpo=None, training=None, template=None):
    """Parse a run of reinforcement learning."""
    document = {
        "model": {"model": "m"},
        "template": {"max_length": 100} if template is None else template,
        "custom": {"train_jsonl": "t.jsonl"},
        "training": {"output_dir": "o", **(training or {})},
        "policy": policy or {},
        "grpo": grpo or {},
    }
    return parse_config(document, "run.yaml", KEYS, rl=True)


@pytest.mark.parametrize("policy", [{}, PACKING, DYNAMIC, {**DYNAMIC, "sequence_packing": {"enabled": False}}])
def test_each_mode_is_accepted(policy):
    """Packing, dynamic batching, or neither; with the specification's keys."""
    config = parsed({**policy, "train_global_batch_size": 64}, {"num_steps": 3}, {"learning_rate": "1e-5"})

    assert 64 == config.policy.train_global_batch_size
    assert 3 == config.grpo.num_steps
    assert 1e-5 == config.training.trainer["learning_rate"]


def test_rows_are_multiples_of_what_shares_them():
    """2 * context_parallel_size; without sharing, any."""
    packing = {"enabled": True, "sequence_length_round": 16}
    assert 2 == parsed({"sequence_packing": packing, "context_parallel_size": 2}).policy.context_parallel_size
    assert parsed({"sequence_packing": {**packing, "sequence_length_round": 3}})
    with pytest.raises(ConfigError, match=r"is 20, but .* multiple of 8 .* set it to 24"):
        parsed({"sequence_packing": {**packing, "sequence_length_round": 20}, "context_parallel_size": 4})


@pytest.mark.parametrize(
    ("policy", "grpo", "says"),
    [
        ({**PACKING, **DYNAMIC}, {}, "policy.dynamic_batching: and policy.sequence_packing exclude each other"),
        ({"sequence_packing": {"algorithm": "tetris"}}, {}, "policy.sequence_packing.algorithm: is 'tetris'"),
        ({"context_parallel_size": 2}, {}, "policy.context_parallel_size: cuts packed rows: enable"),
        ({**DYNAMIC, "context_parallel_size": 2}, {}, "policy.context_parallel_size: cuts packed rows: enable"),
        ({"sequence_packing": {"enabled": True, "train_mb_tokens": 99}}, {},
         "train_mb_tokens: is 99, but a sequence may take 100"),
        ({"dynamic_batching": {"enabled": True, "logprob_mb_tokens": 127}}, {},
         "logprob_mb_tokens: is 127, but a sequence may take 128"),
        ({"train_micro_batch_size": 0}, {}, "policy.train_micro_batch_size: is 0, but has to be at least 1"),
        ({"sequence_packing": {"sequence_length_round": 0}}, {}, "policy.sequence_packing.sequence_length_round: is 0"),
        ({"sequence_packing": {"enabled": "no"}}, {},
         "policy.sequence_packing.enabled: is 'no', but has to be true or false"),
        ({"sequence_pakcing": {}}, {}, "policy.sequence_pakcing: is no known key: did you mean sequence_packing"),
        ({**PACKING, "sequence_packing": {"enabled": True, "sequence_length_round": 4}, "context_parallel_size": 2},
         {"loss": "m:f"}, "grpo.loss: is of your own"),
        ({"dynamic_batching": True}, {}, "policy.dynamic_batching: is True, but has to be a section of keys"),
        ({"train_micro_batch_size": 0, "generation_batch_size": -1}, {}, "policy.generation_batch_size: is -1"),
        ({}, {"save_every": 0}, "grpo.save_every: is 0, but has to be at least 1"),
        ({}, {"num_steps": 0}, "grpo.num_steps: is 0, but has to be at least 1"),
        ({}, {"num_generations_per_prompt": 1}, "generations_per_prompt: is 1, but has to be at least 2: answers are"),
        ({}, {"temperature": 0}, "grpo.temperature: is 0.0, but has to be above 0"),
        ({}, {"kl_coefficient": -1}, "grpo.kl_coefficient: is -1.0, but has to be at least 0"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(policy, grpo, says):
    """By key, with what to do."""
    with pytest.raises(ConfigError, match=says):
        parsed(policy, grpo)


def test_settings_that_are_not_used_are_refused():
    """
    Those of the trainer, which this is not; and a run without a length names that, not its budgets.
    """
    with pytest.raises(
        ConfigError, match=r"training.warmup_steps: is not used by app.rl, which takes ddp_timeout, learn"
    ):
        parsed(training={"warmup_steps": 3})
    for key, value in (("effective_batch_size", 4), ("resume_from_checkpoint", "last"), ("max_steps", 1)):
        with pytest.raises(ConfigError, match=f"training.{key}: is not used by app.rl"):
            parsed(training={key: value})
    for value in (-1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=r"training.learning_rate: is .*, but has to be a number of at least 0"):
            parsed(training={"learning_rate": value})
    with pytest.raises(ConfigError, match=r"template.loss_scale: weighs the tokens of records"):
        parsed(template={"max_length": 64, "loss_scale": "last_round"})
    with pytest.raises(ConfigError, match=r"1 fault.*\n.*template.max_length: is not set"):
        parsed(PACKING, template={})

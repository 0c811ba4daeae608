"""The sections of reinforcement learning: what goes together, and what is refused, by key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packplan.core.config import changed_settings, resume_faults, resume_values
from tests.documents import faults_of, parsed

PACKING = {"sequence_packing": {"enabled": True}}
ENGINE = {"engine_command": "serve {folder} {port}"}

DYNAMIC = {"dynamic_batching": {"enabled": True}}


@pytest.mark.parametrize(
    "policy",
    [{}, PACKING, DYNAMIC, {**DYNAMIC, "sequence_packing": {"enabled": False}},
     {"sequence_packing": {"enabled": True, "sequence_length_round": 16}, "context_parallel_size": 2},
     {"sequence_packing": {"enabled": True, "sequence_length_round": 3}},
     {"sequence_packing": {"enabled": True, "sequence_length_round": 16, "row_width": "budget"}}],
)  # fmt: skip
def test_each_mode_is_accepted(policy):
    """
    Packing, dynamic batching, or neither; rows are multiples of twice the ranks that share them.
    """
    keys = {"policy": {**policy, "train_global_batch_size": 64}, "grpo.num_steps": 3}
    config = parsed(keys, rl=True, learning_rate="1e-5")

    assert (64, 3) == (config.policy.train_global_batch_size, config.grpo.num_steps)
    assert 1e-5 == config.training.trainer["learning_rate"]


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        ({"policy": {**PACKING, **DYNAMIC}}, "policy.dynamic_batching", "and policy.sequence_packing exclude"),
        ({"policy.sequence_packing.algorithm": "tetris"}, "policy.sequence_packing.algorithm", "is 'tetris'"),
        ({"policy.context_parallel_size": 2}, "policy.context_parallel_size", "cuts packed rows: enable"),
        ({"policy": {**DYNAMIC, "context_parallel_size": 2}}, "policy.context_parallel_size", "cuts packed rows"),
        ({"policy.sequence_packing": {"enabled": True, "train_mb_tokens": 79}},
         "policy.sequence_packing.train_mb_tokens", "is 79, but a sequence may take 80"),
        ({"policy.dynamic_batching": {"enabled": True, "logprob_mb_tokens": 127}},
         "policy.dynamic_batching.logprob_mb_tokens", "is 127, but a sequence may take 128"),
        ({"policy.sequence_packing": {"enabled": True, "sequence_length_round": 8, "row_width": "budget",
                                      "logprob_mb_tokens": 1001}},
         "policy.sequence_packing.logprob_mb_tokens", "a multiple of 8 (sequence_length_round): set it to 1,008"),
        ({"policy.sequence_packing": {"enabled": True, "sequence_length_round": 20}, "policy.context_parallel_size": 4},
         "policy.sequence_packing.sequence_length_round", "a multiple of 8: set it to"),
        ({"policy": {**PACKING, "tensor_parallel_size": 4}}, "policy.sequence_packing.sequence_length_round",
         "need a multiple of 4: set it to "),
        ({"training.tuner_type": "lora", "policy.tensor_parallel_size": 2}, "policy.tensor_parallel_size",
         "adapters are added to them: set it to 1"),
        ({"policy.sharding": "fsdp1"}, "policy.sharding", "has to be one of"),
        ({"policy.sequence_packing": {"enabled": True, "sequence_length_round": 4}, "policy.context_parallel_size": 2,
          "grpo.loss": "m:f"}, "grpo.loss", "is of your own"),
        ({"policy.train_micro_batch_size": 0}, "policy.train_micro_batch_size", "is 0, but has to be at least 1"),
        ({"policy.generation_batch_size": -1}, "policy.generation_batch_size", "is -1"),
        ({"policy.sequence_packing.sequence_length_round": 0}, "policy.sequence_packing.sequence_length_round", "is 0"),
        ({"policy.sequence_packing.enabled": "no"}, "policy.sequence_packing.enabled", "has to be true or false"),
        ({"policy.sequence_pakcing": {}}, "policy.sequence_pakcing", "did you mean sequence_packing"),
        ({"policy.dynamic_batching": True}, "policy.dynamic_batching", "is True, but has to be a section of keys"),
        ({"grpo.save_every": 0}, "grpo.save_every", "is 0, but has to be at least 1"),
        ({"grpo.num_steps": 0}, "grpo.num_steps", "is 0, but has to be at least 1"),
        ({"grpo.num_generations_per_prompt": 1}, "grpo.num_generations_per_prompt", "is 1, but answers are compared"),
        ({"grpo.max_staleness": 1}, "grpo.max_staleness", "while the policy answers itself"),
        ({"grpo.engine_command": "serve {folder}"}, "grpo.engine_command", "without {port}"),
        ({"grpo.engine_command": "serve '{folder} {port}"}, "grpo.engine_command", "no command: no closing quotation"),
        ({"grpo": ENGINE, "training.tuner_type": "lora"}, "training.tuner_type", "an engine gets whole models"),
        ({"grpo": {"entropy_coefficient": 0.1, "loss": "m:f"}}, "grpo.entropy_coefficient", "but by losses by name"),
        ({"grpo": {"ratio_clip_max": 0.1, "loss": "m:f"}}, "grpo.ratio_clip_max", "but by losses by name"),
        ({"grpo": {"baseline": "value", "loss": "m:f"}}, "grpo.baseline", "which losses by name train"),
        ({"grpo.gae_lambda": 1}, "grpo.gae_lambda", "without a value head: set grpo.baseline: value"),
        ({"grpo.importance_max": 3}, "grpo.importance_max", "without a correction"),
        ({"grpo.importance_correction": "truncated"}, "grpo.importance_correction", "while the policy answers itself"),
        ({"grpo": {**ENGINE, "importance_correction": "truncated", "importance_min": 0.1}}, "grpo.importance_min",
         "icepop"),
        *[({"grpo": {**ENGINE, "importance_correction": correction, "importance_min": 2}}, "grpo.importance_min",
           "to be below grpo.importance_max, 2.0") for correction in ("icepop", "sequence_mask")],
        ({"grpo": {**ENGINE, "importance_correction": "tis"}}, "grpo.importance_correction", "is 'tis'"),
        ({"grpo": {"loss": "gspo", "force_on_policy_ratio": True}}, "grpo.force_on_policy_ratio", "not read by"),
        ({"grpo.temperature": 0}, "grpo.temperature", "is 0.0, but has to be above 0"),
        ({"grpo.kl_coefficient": -1}, "grpo.kl_coefficient", "is -1.0, but has to be at least 0"),
        ({"grpo": {"loss": "reinforce", "ratio_clip_max": 0.3}}, "grpo.ratio_clip_max", "is not read by"),
        ({"grpo": {"loss": "cispo", "ratio_clip_c": 3}}, "grpo.ratio_clip_c", "is not read by grpo.loss: cispo"),
        ({"grpo.ratio_clip_c": 1}, "grpo.ratio_clip_c", "is 1.0, but has to be above 1"),
        ({"grpo.kl_estimator": "k1"}, "grpo.kl_estimator", "changes nothing without a penalty"),
        ({"grpo": {"kl_coefficient": 0.1, "kl_estimator": "k4"}}, "grpo.kl_estimator", "is 'k4'"),
        ({"grpo.force_on_policy_ratio": True, "policy.train_global_batch_size": 63}, "grpo.force_on_policy_ratio",
         "its 64 answers are trained in updates of 63"),
        # Keys of other trainings.
        ({"training.warmup_steps": 3}, "training.warmup_steps", "which takes ddp_timeout, learning_rate"),
        ({"training.effective_batch_size": 4}, "training.effective_batch_size", "is not used by packplan rl"),
        ({"training.max_steps": 1}, "training.max_steps", "is not used by packplan rl"),
        *[({"training.learning_rate": rate}, "training.learning_rate", "but has to be a number of at least 0")
          for rate in (-1, float("nan"), float("inf"))],
        ({"training.tuner_type": "boft"}, "training.tuner_type", "is boft, but packplan rl trains all weights"),
        ({"template.loss_scale": "last_round"}, "template.loss_scale", "weighs the tokens of records"),
        # A run without a length names that, not its budgets.
        ({"policy": PACKING, "template.max_length": None}, "template.max_length", "is not set"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(keys, key, says):
    """By its key alone, with what to do."""
    found = faults_of(keys, rl=True)

    assert {key} == set(found)
    assert says in found[key]


VALUES = st.dictionaries(st.sampled_from(["training.seed", "model.model", "grpo.reward", "grpo.loss"]), st.text("ab"))


@given(VALUES, VALUES)
def test_every_changed_setting_of_a_resumed_run_is_refused_or_named(then, now):
    """Model, data, seed and batch sizes may not change; others are told with both values."""
    refused = {fault.path for fault in resume_faults("checkpoint-1", then, now)}
    told = {text.partition(" ")[0] for text in changed_settings(then, now)}

    changed = {key for key in {*then, *now} if then.get(key) != now.get(key)}
    assert changed & {"training.seed", "model.model"} == refused
    assert changed - refused == told


def test_what_a_checkpoint_keeps_leaves_the_number_of_steps_free():
    """Digest of the prompts and name of the model in place of their paths."""
    runs = [
        parsed({"policy": PACKING, "grpo.num_steps": steps, "grpo.save_every": steps}, rl=True, learning_rate=rate)
        for steps, rate in ((3, 1e-5), (4, 1e-6))
    ]
    first, second = (resume_values(run, model="whole path", prompts="digest") for run in runs)

    assert ('"whole path"', '"digest"') == (first["model.model"], first["custom.train_jsonl"])
    assert ["training.learning_rate (1e-05, now 1e-06)"] == changed_settings(first, second)
    (fault,) = resume_faults("checkpoint-1", first, {**first, "custom.train_jsonl": "another"})
    assert "gives other prompts or answers" in fault.reason


def test_a_value_head_neither_comes_nor_goes_when_a_run_resumes():
    """Its weights are in the checkpoint; any other baseline may change."""
    group, leave_one_out, value = (
        resume_values(parsed({"grpo.baseline": name}, rl=True), model="", prompts="")
        for name in ("group", "leave_one_out", "value")
    )

    for then, now in ((group, value), (value, group)):
        (fault,) = resume_faults("checkpoint-1", then, now)
        assert "grpo.baseline" == fault.path
        assert "a value head cannot come or go" in fault.reason
    assert [] == list(resume_faults("checkpoint-1", group, leave_one_out)) == list(resume_faults("", value, value))


def test_ranks_that_share_rows_and_layers_compute_one_shard():
    """As many as the product of both sizes."""
    policy = {**PACKING, "context_parallel_size": 2, "tensor_parallel_size": 3}
    policy["sequence_packing"] = {**policy["sequence_packing"], "sequence_length_round": 12}

    assert 6 == parsed({"policy": policy}, rl=True).policy.ranks_per_shard

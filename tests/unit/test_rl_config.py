"""The sections of reinforcement learning: what goes together, and what is refused, by key."""

import pytest
import yaml

from packplan.adapters.config.run import load_rl_config
from packplan.adapters.config.trainer_keys import GRPO_KEYS_FILE, read_key_table
from packplan.core.config.rl import RlConfig
from packplan.core.errors import ConfigError

PACKING, DYNAMIC = {"sequence_packing": {"enabled": True}}, {"dynamic_batching": {"enabled": True}}
GRPO = {"output_dir": "o", "reward_funcs": "m:f"}
LEAST = {"model": {"model": "m"}, "custom": {"train_jsonl": "a.jsonl"}, "grpo": GRPO}


@pytest.fixture
def parsed(tmp_path):
    """Return a function that reads a run with these keys over those that it needs."""

    def read(sections, *overrides) -> RlConfig:
        document = {**sections, **{name: {**keys, **sections.get(name, {})} for name, keys in LEAST.items()}}
        (tmp_path / "rl.yaml").write_text(yaml.safe_dump(document))
        return load_rl_config(tmp_path / "rl.yaml", read_key_table(GRPO_KEYS_FILE), overrides=overrides)

    return read


@pytest.mark.parametrize("policy", [{}, PACKING, DYNAMIC, {**DYNAMIC, "sequence_packing": {"enabled": False}}])
def test_each_mode_is_accepted(parsed, policy):
    """Packing, dynamic batching, or neither; arguments of TRL are passed on as it takes them."""
    grpo = {"learning_rate": "1e-5", "reward_weights": [1, 0.5], "use_peft": True, "lora_r": 4, "loss_type": "bnpo"}
    config = parsed({"policy": policy, "grpo": grpo}, "policy.dynamic_batching.train_mb_tokens=9")

    assert 9 == config.policy.dynamic_batching.train_mb_tokens
    assert {**grpo, "learning_rate": 1e-5, **GRPO} == config.grpo
    assert "o" == config.training.output_dir


@pytest.mark.parametrize(
    ("sections", "key", "says"),
    [
        ({"policy": {**PACKING, **DYNAMIC}}, "policy.dynamic_batching", "and policy.sequence_packing exclude"),
        ({"policy": {"sequence_packing": {"algorithm": "tetris"}}}, "policy.sequence_packing.algorithm", "is 'tetris'"),
        ({"policy": {"sequence_packing": {"train_mb_tokens": 0}}}, "policy.sequence_packing.train_mb_tokens", "is 0"),
        ({"policy": {"dynamic_batching": True}}, "policy.dynamic_batching", "has to be a section of keys"),
        ({"grpo": {"max_step": 3}}, "grpo.max_step", "did you mean max_steps"),
        ({"grpo": {"num_generations": 2.5}}, "grpo.num_generations", "is 2.5, but has to be a whole number"),
        ({"grpo": {"reward_weights": ["a"]}}, "grpo.reward_weights", "has to be a list of numbers"),
        ({"policy": DYNAMIC, "grpo": {"torch_compile": True}}, "grpo.torch_compile", "a program for each width"),
        ({"grpo": {"reward_funcs": None}}, "grpo.reward_funcs", "is not set: name a function"),
        ({"grpo": {"output_dir": None}}, "grpo.output_dir", "is not set: name a folder"),
        ({"grpo": {"eval_on_start": True}}, "grpo.eval_on_start", "but the run has no evaluation: set custom.val_"),
        ({"learning_rate": 1}, "learning_rate", "is not a key of the top level: write grpo.learning_rate"),
        ({"grpo": {"num_epochs": 2}}, "grpo.num_epochs", "is a key of axolotl: write grpo.num_train_epochs"),
        ({"packing_balance": "step"}, "packing_balance", "is unknown"),
        ({"training": {"seed": 1}}, "training", "belongs to packplan sft: write arguments of GRPOConfig"),
        ({"template": {"max_length": 9}}, "template.max_length", "is not used by packplan rl"),
        ({"global_max_length": 9}, "global_max_length", "is not used by packplan rl"),
        ({"custom": {"train_jsonl": None}}, "custom.train_jsonl", "is not set: name the data file"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(parsed, sections, key, says):
    """By its key alone, with what to do."""
    with pytest.raises(ConfigError) as raised:
        parsed(sections)

    (fault,) = raised.value.faults
    assert key == fault.path
    assert says in fault.reason


def test_a_number_in_place_of_a_section_is_refused(parsed):
    """By the section alone."""
    with pytest.raises(ConfigError, match=r"1 fault:\n  grpo is 3, but has to be a section of keys"):
        parsed({}, "grpo=3")

"""
A policy whose workers share its weights is the policy of one worker, and a run resumes from its
checkpoints as if it had never ended.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from packplan.app.wiring.stores import training_alone
from packplan.core.errors import ConfigError
from tests.e2e.test_rl import far, update_of_text, write_phases  # noqa: F401  # a fixture
from tests.nearness import FLOAT32, apart, norm
from tests.network import free_port
from tests.processes import finished
from tests.stored import asked

pytestmark = pytest.mark.slow


def packed(multiple: int = 1, **keys: object) -> dict:
    """Return a policy of packed rows whose sequences are padded to a multiple."""
    packing = {"enabled": True, "train_mb_tokens": 128, "sequence_length_round": multiple}
    return {"sequence_packing": packing, **keys}


@pytest.fixture(scope="session")
def four_heads(demo) -> Path:
    """Return a model whose layers four ranks can share, with the demo's tokenizer."""
    from transformers import AutoConfig, Qwen2ForCausalLM

    folder = demo / "models" / "qwen2 of four heads"
    shutil.copytree(demo / "models" / "qwen2", folder)
    config = AutoConfig.from_pretrained(folder)
    config.num_key_value_heads = 4
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


CLIPPED_TO = 0.01
"""Norm of gradients, below that of the rollouts."""

CASES = {
    2: {
        "fsdp2": ("qwen2", packed(sharding="fsdp2")),
        "tensor": ("qwen3", packed(2, tensor_parallel_size=2)),
    },
    4: {
        "all": ("qwen3", packed(8, sharding="fsdp2", context_parallel_size=2, tensor_parallel_size=2)),
        "tensor of four": ("qwen2 of four heads", packed(4, tensor_parallel_size=4)),
    },
}
"""Ranks -> model and policy by name; rows are padded to what `padded_length` says."""


@pytest.mark.parametrize("world_size", CASES)
@pytest.mark.usefixtures("four_heads")
def test_workers_that_share_weights_as_dtensors_give_what_one_gives(write_phases, demo, server, tmp_path, world_size):  # noqa: F811
    """
    Log-probabilities, loss, gradients that are clipped to a norm, and size; two workers hold at
    most 0.65 of the bytes each, and one loads what they wrote.
    """
    from tests.e2e import rl_rank

    cases = {}
    for name, (model, policy) in CASES[world_size].items():
        path = write_phases(name, policy)
        text = path.read_text().replace(str(demo / "models" / "qwen2"), str(demo / "models" / model))
        path.write_text(text.replace("1000000000.0", str(CLIPPED_TO)))
        cases[name] = str(asked(path, rl=True)), free_port()
    ranks = server.ranks(world_size, rl_rank.main, cases, str(tmp_path), folder=tmp_path)

    assert [0] * world_size == finished(ranks)

    for name, (model, policy) in CASES[world_size].items():
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        expected = update_of_text(demo, model)
        before = norm(expected["gradients"])
        assert before == pytest.approx(float(found["trained"]["grad_norm"][0]), rel=FLOAT32)
        expected["gradients"] = {key: one * CLIPPED_TO / before for key, one in expected["gradients"].items()}
        expected["gradient_scale"] *= CLIPPED_TO / before
        assert far(found, expected) < FLOAT32, name
        size = loads_on_one(tmp_path / name, demo / "models" / model, expected)
        assert size == pytest.approx(float(found["size"]), rel=FLOAT32)
        if "fsdp2" in policy.values():
            shares = found["bytes"] / torch.tensor(bytes_of_one(demo / "models" / model))
            assert shares.max() <= 0.65, shares


def loads_on_one(checkpoint: Path, model: Path, expected: dict) -> float:
    """
    Hold the weights and moments that several workers wrote against those of one, which has taken
    two updates with the same gradients; return the root mean square of the weights.
    """
    from transformers import AutoModelForCausalLM

    from packplan.adapters.workers.checkpoints import read_checkpoint

    policy = AutoModelForCausalLM.from_pretrained(model)
    before = {name: one.detach().clone() for name, one in policy.named_parameters()}
    with torch.no_grad():
        for one in policy.parameters():
            one.zero_()
    optimizer = torch.optim.AdamW(policy.parameters())
    read_checkpoint(checkpoint, policy, optimizer)
    states = {name: optimizer.state[one] for name, one in policy.named_parameters()}
    moments = {name: state["exp_avg"] / (1 - 0.9**2) for name, state in states.items()}
    assert all(torch.equal(before[name], one) for name, one in policy.named_parameters())
    assert apart(moments, expected["gradients"], scale=expected["gradient_scale"]) < FLOAT32
    assert {2.0} == {float(state["step"]) for state in states.values()}
    weights = torch.cat([one.detach().double().flatten() for one in policy.parameters()])
    return float(weights.square().mean().sqrt())


def test_a_model_that_cannot_be_shared_is_refused():
    """By key, with the reason; a layer that is tied, or does not divide, stays whole."""
    from packplan.adapters.workers.sharding import _plan

    def model(plan, **sizes):
        config = SimpleNamespace(**{"tie_word_embeddings": False, "vocab_size": 8, **sizes})
        return SimpleNamespace(tp_plan=plan, config=SimpleNamespace(get_text_config=lambda: config))

    plan = {"q": "colwise", "head": "colwise_gather_output", "norm": "replicated_with_grad_allreduce"}
    for one, says in (
        (model({}), "no tensor-parallel plan"),
        (model({"experts": "moe_tp_experts"}), "the styles moe_tp_experts, which are not proven"),
        (model(plan, num_key_value_heads=3), "does not divide the model's num_key_value_heads of 3"),
    ):
        with pytest.raises(ConfigError, match=rf"policy\.tensor_parallel_size: is 2, .*{says}"):
            _plan(one, 2)
    assert {"q": "colwise", "head": "colwise_gather_output"} == _plan(model(plan, num_key_value_heads=2), 2)
    for whole in ({"vocab_size": 7}, {"tie_word_embeddings": True}):
        assert {"q": "colwise"} == _plan(model(plan, **whole), 2)


def bytes_of_one(folder: Path) -> list[int]:
    """Return the bytes of weights, gradients and AdamW's states where one worker holds all."""
    from transformers import AutoModelForCausalLM

    weights = list(AutoModelForCausalLM.from_pretrained(folder).parameters())
    size = sum(one.nbytes for one in weights)
    return [size, size, 2 * size + 4 * len(weights)]


TIMES = {"generate_s", "logprob_s", "train_s"}

LAST = "training.resume_from_checkpoint=last"


def result(folder: Path) -> tuple[list[dict], dict[str, bytes]]:
    """Return what a run logged, beside seconds, and the weights at its end."""
    lines = [json.loads(line) for line in (folder / "rl.jsonl").read_text().splitlines()]
    weights = {path.name: path.read_bytes() for path in (folder / "policy").glob("*.safetensors")}
    assert weights
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines], weights


def test_a_run_resumes_bit_for_bit_at_any_step(write_rl, tmp_path):
    """
    With a reference model and several updates in a step. What was written after the checkpoint is
    removed; only the newest checkpoints stay.
    """
    from packplan.app.rl import __main__ as rl

    grpo = {"num_steps": 3, "save_every": 1, "kl_coefficient": 0.1, "num_prompts_per_step": 3}
    policy = packed(train_global_batch_size=7)
    run = str(write_rl(policy=policy, grpo=grpo, save_total_limit=3))
    assert 0 == rl.main([run])
    expected = result(tmp_path / "rl")
    assert 3 == len(expected[0])

    for step in (2, 1):
        with (tmp_path / "rl" / "rl.jsonl").open("a") as log:
            log.write('{"step": 4, "torn')
        (tmp_path / "rl" / ".checkpoint-4.tmp").mkdir()
        assert 0 == rl.main([run, f"training.resume_from_checkpoint={tmp_path / 'rl' / f'checkpoint-{step}'}"])
        assert expected == result(tmp_path / "rl")
    assert 0 == rl.main([run, LAST, "grpo.num_steps=4", "training.save_total_limit=2"])
    left = {path.name for path in (tmp_path / "rl").iterdir()}
    assert {"rl.jsonl", "policy", "checkpoint-3", "checkpoint-4", "train.lock"} == left
    assert expected[0] == result(tmp_path / "rl")[0][:3]


def test_a_killed_rank_leaves_a_run_that_resumes(write_rl, server, tmp_path):
    """
    The other rank ends with a reason. A torn checkpoint is not trusted; the end equals a run that
    was not killed, bit for bit, and one worker loads what two wrote.
    """
    from packplan.app.rl import __main__ as rl
    from tests.e2e import rl_rank

    def write(name):
        grpo = {"num_steps": 3, "save_every": 1, "num_generations_per_prompt": 2, "max_new_tokens": 4}
        return str(asked(write_rl(name, policy=packed(sharding="fsdp2"), grpo=grpo), rl=True))

    whole = server.ranks(2, rl.main, [write("whole")], folder=tmp_path / "whole logs")
    killed = server.ranks(2, rl_rank.killed_in_a_checkpoint, [write("killed")], 2, folder=tmp_path / "logs")
    assert [2, -9] == [each.wait() for each in killed]
    assert "training.resume_from_checkpoint=last goes on from" in killed[0].said
    assert ["checkpoint-1"] == [path.name for path in (tmp_path / "killed").glob("checkpoint-*")]
    assert (tmp_path / "killed" / ".checkpoint-2.tmp").is_dir()

    assert [0, 0] == finished(whole)
    resumed = server.ranks(2, rl.main, [write("killed"), LAST], folder=tmp_path / "logs again")
    assert [0, 0] == finished(resumed)

    expected = result(tmp_path / "whole")
    assert expected == result(tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed" / "policy")
    assert 0 == rl.main([write("killed"), LAST])
    assert expected == result(tmp_path / "killed")


def test_a_reward_that_fails_leaves_a_run_that_resumes(write_rl, tmp_path, monkeypatch, capsys):
    """
    One that raises, returns text, or no number; once it is mended, as if it had never failed. Here
    of low-rank adapters.
    """
    from packplan.app.rl import __main__ as rl

    module = tmp_path / "failing_rewards.py"
    module.write_text("CALLS, BAD = [], lambda: 1 / 0\ndef reward(answer, own):\n    CALLS.append(0)\n"
                      "    return BAD() if len(CALLS) > 16 and BAD else len(answer)\n")  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    import failing_rewards

    run = str(write_rl(grpo={"num_steps": 2, "save_every": 1, "reward": "failing_rewards:reward"}, tuner_type="lora"))
    for number, (bad, says) in enumerate({
        lambda: 1 / 0: "ZeroDivisionError", lambda: "good": "gives 'good'", lambda: float("nan"): "gives nan",
        lambda: sys.exit("bye"): "SystemExit: bye",
    }.items()):  # fmt: skip
        failing_rewards.BAD = bad
        assert 2 == rl.main([run, *([LAST] if number else [])])
        message = capsys.readouterr().err
        assert says in message
        assert (f"goes on from {tmp_path / 'rl' / 'checkpoint-1'}" in message) == (number == 0)
    failing_rewards.BAD = None
    assert 0 == rl.main([run, LAST])
    resumed = result(tmp_path / "rl")
    assert 0 == rl.main([run, "--overwrite"])
    assert result(tmp_path / "rl") == resumed


def test_only_a_whole_checkpoint_of_the_same_run_is_resumed(write_rl, tmp_path, capsys):
    """`last` passes over damaged ones; by name, they are refused; changed settings are, by key."""
    from packplan.app.rl import __main__ as rl

    folder = tmp_path / "rl"
    run = str(write_rl(grpo={"num_steps": 2, "save_every": 1}))
    assert 2 == rl.main([run, LAST])
    assert "finds no whole checkpoint" in capsys.readouterr().err
    with training_alone(folder):
        assert 2 == rl.main([run, "--overwrite"])
    assert "which another run trains into" in capsys.readouterr().err
    assert 0 == rl.main([run])
    assert 2 == rl.main([run, LAST, "grpo.num_steps=1"])
    assert "grpo.num_steps: is 1, but checkpoint-2 is of step 2" in capsys.readouterr().err
    for path, text in ((folder / "checkpoint-2" / "manifest.json", "{}"),
                       (next((folder / "checkpoint-2").glob("*.safetensors")), "other")):  # fmt: skip
        before = path.read_bytes()
        path.write_text(text)
        assert 2 == rl.main([run, f"training.resume_from_checkpoint={path.parent}"])
        assert "checkpoint-2, which" in capsys.readouterr().err
        path.write_bytes(before)
    changed = {"training.seed": 1, "grpo.num_prompts_per_step": 2, "grpo.num_generations_per_prompt": 2,
               "policy.train_global_batch_size": 8, "template.system": "Other."}  # fmt: skip
    assert 2 == rl.main([run, LAST, *[f"{key}={value}" for key, value in changed.items()]])
    message = capsys.readouterr().err
    assert all(f"{key}: " in message for key in {**changed, "custom.train_jsonl": 0} if key != "template.system")
    assert 2 == rl.main([run, LAST, "--overwrite"])
    assert 2 == rl.main([run])
    assert "resume with training.resume_from_checkpoint=last" in capsys.readouterr().err
    path.write_text("other")
    assert 0 == rl.main([run, LAST, "training.learning_rate=0.02"])
    message = capsys.readouterr().err
    assert "checkpoint-2 is passed over" in message
    assert "settings have changed since checkpoint-1: training.learning_rate (0.01, now 0.02)" in message
    (folder / "rl.jsonl").unlink()
    assert 2 == rl.main([run, LAST])
    assert "no lines of all steps" in capsys.readouterr().err

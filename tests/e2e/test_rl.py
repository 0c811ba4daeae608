"""`packplan rl`: TRL's trainer learns from text and images, in microbatches that change nothing."""

import json
import os
import re
import signal
import sys

import pytest
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from packplan.adapters.ranks.torch_group import OneRank
from packplan.app import rl
from packplan.app.opening import grpo
from packplan.app.opening.runs import read_rl_config
from packplan.core.fingerprint import json_digest
from tests.e2e.plugin_run import change_a_byte
from tests.hosts.pages import own_callbacks
from tests.processes import finished

pytestmark = pytest.mark.slow

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 120, "logprob_mb_tokens": 200}}

DYNAMIC = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 256, "sequence_length_round": 8}}


@pytest.fixture(autouse=True)
def _callbacks():
    with own_callbacks():
        yield


def train(path, *, quiet=True):
    """Train a run, and return its trainer."""
    return grpo.train(read_rl_config(path, ()), OneRank(), quiet=quiet)


def logged(folder) -> list[dict]:
    """Return what was logged of each step that drew completions."""
    state = json.loads((folder / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "reward" in entry]


def figures(trainer, *names) -> list[list[float]]:
    """Return these figures of each step."""
    return [[entry[name] for name in names] for entry in trainer.state.log_history if "grad_norm" in entry]


def test_all_modes_train_what_trl_does(write_rl):
    """Packed, dynamic and as TRL cuts, with a reference model and an old policy."""
    keys = {"beta": 0.1, "num_iterations": 2, "max_steps": 3, "per_device_train_batch_size": 16}
    plain, packed, dynamic = (
        train(write_rl(name, policy=policy, **keys))
        for name, policy in (("plain", {}), ("packed", PACKED), ("dynamic", DYNAMIC))
    )

    expected = figures(plain, "loss", "grad_norm")
    assert 3 == len(expected)
    for trainer in (packed, dynamic):
        assert expected == [pytest.approx(step, rel=1e-4, abs=1e-6) for step in figures(trainer, "loss", "grad_norm")]


def on_rank(*words):
    """Run the command as one rank."""
    with own_callbacks():
        return rl.main([*words])


@pytest.mark.parametrize("policy", [PACKED, DYNAMIC])
def test_the_metrics_of_packing_and_the_counts_of_positions_are_logged(policy, write_rl, caplog, monkeypatch):
    """
    At the end, of all steps: specification 004's four metrics, and what `unpad` left out; on a
    terminal too, there is no bar of weight files.
    """
    caplog.set_level("INFO")
    enable_progress_bar()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train(write_rl(policy=policy), quiet=False)

    assert not is_progress_bar_enabled()
    told = re.search(r"rank 0: utilisation (.+), waste (.+), balance (.+), efficiency (.+)", caplog.text)
    used, waste, balance, efficiency = map(float, told.groups())
    assert 1 == pytest.approx(used + waste, abs=1e-4)
    assert 0 < used <= efficiency
    assert balance <= 1
    counted = re.search(r"policy computed ([\d,]+) of ([\d,]+) positions", caplog.text)
    assert (policy is PACKED) == bool(counted)


def test_two_ranks_train_one_policy(server, write_rl, tmp_path):
    """Each draws for its own prompts; loss and reward are of both, and rank 0 saves the policy."""
    path = write_rl(policy=PACKED, use_cpu=True, reward_funcs="rewards_beside:of_words")
    path.with_name("rewards_beside.py").write_text("from packplan.app.rewards import character_overlap as of_words\n")

    assert [0, 0] == finished(server.ranks(2, on_rank, str(path), "--quiet", folder=tmp_path / "logs"))
    assert 2 == len(logged(tmp_path / "rl"))
    assert (tmp_path / "rl" / "model.safetensors").exists()


def test_a_run_goes_on_where_its_checkpoint_ends(write_rl, tmp_path):
    """With what was logged before."""
    path = write_rl(policy=PACKED, save_steps=2)
    train(path)
    state = tmp_path / "rl" / "checkpoint-2" / "trainer_state.json"
    noted = json.loads(state.read_text())
    noted["log_history"][0]["reward"] = 99
    del noted["stateful_callbacks"]["packplan_sha256"]
    noted["stateful_callbacks"]["packplan_sha256"] = json_digest(noted)
    state.write_text(json.dumps(noted))

    assert 0 == rl.main([str(path), "grpo.resume_from_checkpoint=last", "grpo.max_steps=3", "--quiet"])

    assert [1, 2, 3] == [entry["step"] for entry in logged(tmp_path / "rl")]
    assert 99 == logged(tmp_path / "rl")[0]["reward"]


def ending(completions, **_):
    """Reward alike, and send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)
    return [0.0 for _ in completions]


def test_sigterm_saves_a_checkpoint_and_a_changed_byte_of_it_is_refused(write_rl, tmp_path, capfd):
    """Before anything is loaded, by the name of the file; the state of the trainer too."""
    path = write_rl(policy=PACKED, reward_funcs="tests.e2e.test_rl:ending", max_steps=3)

    assert 143 == rl.main([str(path), "--quiet"])

    said = " ".join(capfd.readouterr().err.split())
    assert f"checkpoint is saved; grpo.resume_from_checkpoint: {tmp_path / 'rl' / 'checkpoint-1'} continues" in said
    assert not (tmp_path / "rl" / "model.safetensors").exists(), "no model of a run that is not over"
    for name, status in (("optimizer.pt", 2), ("trainer_state.json", 3)):
        held = (file := tmp_path / "rl" / "checkpoint-1" / name).read_bytes()
        change_a_byte(file)
        assert status == rl.main([str(path), "grpo.resume_from_checkpoint=last", "--quiet"])
        file.write_bytes(held)
        assert name in capfd.readouterr().err


def test_a_policy_that_sees_is_trained_with_adapters(write_rl, tmp_path):
    """Images reach every pass; placeholders of media are never drawn; adapters alone change."""
    keys = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"], "max_completion_length": 2}
    data = {"data": "colours.jsonl", "model": "qwen2_5_vl", "reward": "exact_match"}
    trainer = train(write_rl(policy=PACKED, **data, **keys))

    assert 2 == len(figures(trainer))
    never = trainer.generation_config.suppress_tokens
    assert [trainer.model.config.image_token_id, trainer.model.config.video_token_id] == never
    assert (tmp_path / "rl" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["grpo.reward_funcs=gone:reward"], "grpo.reward_funcs has gone:reward, which cannot be imported as module"),
        (["grpo.reward_funcs=tests.e2e.test_rl:boom"], "test_rl:boom, which failed: KeyError: 'answer'"),
        (["grpo.num_generations=3"], "grpo is refused by TRL: .* must be divisible by num_generations"),
        (["grpo.fsdp=full_shard auto_wrap"], "grpo.fsdp has no effect on a CPU, .* remove the key, or train on"),
        (["grpo.resume_from_checkpoint=last"], "has no checkpoint: remove the key to begin at step 1"),
        (["custom.train_jsonl={data}/colours.jsonl"], r"colours.jsonl, line \d+: the record has images, but the model"),
    ],
)
def test_what_cannot_run_is_refused(write_rl, demo, overrides, says, capfd):
    """With status 2, by its key, without a traceback."""
    words = [word.format(data=demo / "data") for word in overrides]

    assert 2 == rl.main([str(write_rl()), *words, "--quiet"])

    said = capfd.readouterr().err
    assert re.search(says, said)
    assert "Traceback" not in said


def boom(completions, **_):
    """Fail as a reward of a user's own may."""
    raise KeyError("answer")

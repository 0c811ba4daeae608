"""`packplan rl` has another engine answer, with the policy's weights, and refuses other ones."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from packplan.core.errors import ConfigError
from packplan.core.rl import Completion
from tests.contracts.test_server_engine import COMMAND, SERVER

pytestmark = pytest.mark.slow

SERVE = "import packplan.adapters; from transformers.cli.transformers import main; main()"
"""`transformers serve`; beside a torch without CUDA, torchvision needs what packplan declares."""


def test_transformers_serve_answers_each_step_with_its_weights(write_rl, tmp_path, monkeypatch):
    """
    The server starts again for each step's weights; answers are sampled, their lost tokens and lag
    are counted. Nothing of it is left.
    """
    from safetensors.torch import load_file

    from packplan.app.rl import __main__ as rl
    from packplan.app.rl import loop

    script = tmp_path / "serve.sh"
    script.write_text(
        f'cp -r "$1" "{tmp_path}/of-$(basename "$1")"\nexec "{sys.executable}" -c "{SERVE}" serve "$1" --port "$2"'
    )
    batches = []
    roll_out = loop._roll_out
    monkeypatch.setattr(loop, "_roll_out", lambda *a, **o: batches.append(roll_out(*a, **o)) or batches[-1])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    grpo = {
        "engine_command": f"sh {script} {{folder}} {{port}}",
        "num_steps": 2,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 3,
    }

    assert 0 == rl.main([str(write_rl(grpo=grpo))])

    entries = [json.loads(line) for line in (tmp_path / "rl" / "rl.jsonl").read_text().splitlines()]
    assert [(0, 0), (0, 0)] == [(entry["stale_answers"], entry["lag_max"]) for entry in entries]
    assert all(entry["engine_s"] > 0 and 0 <= entry["reencoded_answers"] <= 6 for entry in entries)
    for batch, rewards, _ in batches:
        answers = [
            tuple(row[mask > 0].tolist())
            for row, mask in zip(batch.tensor("input_ids"), batch.tensor("token_mask"), strict=True)
        ]
        assert 6 == len(rewards) == len(answers)
        assert max(Counter(answers).values()) < 3
        assert batch.tensor("engine_log_probabilities")[batch.tensor("token_mask") > 0].isnan().all()
    first, second = (load_file(tmp_path / f"of-engine-{step}" / "model.safetensors") for step in (0, 1))
    assert any(not torch.equal(weight, second[name]) for name, weight in first.items())
    assert {"checkpoint-2", "policy", "rl.jsonl", "train.lock"} == {path.name for path in (tmp_path / "rl").iterdir()}


def test_a_correction_needs_an_engine_that_gives_probabilities():
    """
    The policy's stand where single answers came without; that all do is refused if they are needed.
    """
    from packplan.adapters.microbatches import BatchedData
    from packplan.app.rl.loop import _drawn_with

    mask, old = torch.tensor([[0.0, 1, 1], [0, 1, 1]]), torch.full((2, 3), -1.0)

    def batch(second):
        fields = {"input_ids": torch.ones(2, 3, dtype=torch.long), "token_mask": mask}
        logs = torch.tensor([[0.0, torch.nan, torch.nan], [0.0, second, second]])
        return BatchedData.from_fields({**fields, "engine_log_probabilities": logs}, lengths=[3, 3])

    assert [[0, -1, -1], [0, -2, -2]] == _drawn_with(batch(-2.0), old, needed=True).tolist()
    assert [[0, -1, -1], [0, -1, -1]] == _drawn_with(batch(torch.nan), old, needed=False).tolist()
    with pytest.raises(ConfigError, match="importance_correction: needs the probabilities of draws, but the engine"):
        _drawn_with(batch(torch.nan), old, needed=True)


class ScriptedEngine:
    """Answers each prompt with the token of a rule."""

    def __init__(self, rule, *, is_exact=True):
        self._rule, self._is_exact = rule, is_exact

    def complete(self, prompts, keys, *, temperature, max_new_tokens):
        """Return the greedy token."""
        assert (0.0, 1) == (temperature, max_new_tokens)
        return [Completion(np.array([self._rule(prompt)]), None, 0, self._is_exact) for prompt in prompts]


def test_an_engine_with_other_weights_is_refused(demo):
    """
    Its most likely tokens are not near the policy's; those that text has lost are not compared.
    """
    from transformers import AutoModelForCausalLM

    from packplan.adapters.microbatches import BatchedData
    from packplan.adapters.workers.generation import require_policy_weights

    model = AutoModelForCausalLM.from_pretrained(demo / "models" / "qwen2")
    prompts = BatchedData.from_fields({"input_ids": torch.tensor([[30, 31, 32], [40, 0, 0]])}, lengths=[3, 1])

    def ranked(place):
        def token(prompt):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
            return int(logits.argsort(descending=True)[place])

        return token

    with torch.no_grad():
        require_policy_weights(ScriptedEngine(ranked(0)), model, prompts)
        require_policy_weights(ScriptedEngine(ranked(100), is_exact=False), model, prompts)
        with pytest.raises(ConfigError, match=r"grpo.engine_command: answers with other weights .* 0.25 allowed"):
            require_policy_weights(ScriptedEngine(ranked(100)), model, prompts)


@pytest.mark.parametrize(
    ("grpo", "training", "says"),
    [
        ({"engine_command": f"{COMMAND} x"}, {}, r"grpo.engine_command: reads \d+ tokens in a prompt of \d+"),
        ({"engine_command": "serve {folder}"}, {}, r"grpo.engine_command: is serve \{folder\}, without \{port\}"),
        ({"engine_command": "serve '{folder} {port}"}, {}, "grpo.engine_command: .*quotation"),
        ({"max_staleness": 1}, {}, "grpo.max_staleness: changes nothing while the policy answers itself"),
        ({"engine_command": COMMAND}, {"tuner_type": "lora"}, "training.tuner_type: is lora, but an engine gets"),
    ],
)
def test_what_no_engine_can_do_is_refused(write_rl, tmp_path, capsys, grpo, training, says):  # noqa: PLR0917
    """By its key, before the first step; no server is left."""
    import psutil

    from packplan.app.rl import __main__ as rl

    assert 2 == rl.main([str(write_rl(grpo=grpo, **training))])
    assert re.search(says, capsys.readouterr().err)
    assert not (tmp_path / "rl" / "rl.jsonl").exists()
    assert not [child for child in psutil.Process().children() if str(SERVER) in child.cmdline()]

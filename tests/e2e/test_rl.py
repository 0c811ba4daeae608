"""
Reinforcement learning gives the same in every mode, on any ranks and any engine; and the reward
rises.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from packplan.core.errors import ArgumentError, ConfigError
from tests.nearness import FLOAT32, apart, norm
from tests.network import free_port
from tests.processes import finished
from tests.stored import asked

pytestmark = pytest.mark.slow

PACKED = {
    "sequence_packing": {"enabled": True, "train_mb_tokens": 80, "logprob_mb_tokens": 120, "sequence_length_round": 1}
}

MODES = {
    "packed": PACKED,
    "rows of the budget": {"sequence_packing": {**PACKED["sequence_packing"], "row_width": "budget"}},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 128, "sequence_length_round": 8}},
    "plain": {"train_micro_batch_size": 3},
}


@pytest.fixture
def write_phases(write_rl):
    """
    Return a function that writes a run of one update on rollouts that are given, which leaves the
    weights.
    """

    def write(name, policy, **grpo):
        keys = {"kl_coefficient": 0.1, "temperature": 0.7, **grpo}
        if ":" not in grpo.get("loss", ""):
            keys = {"ratio_clip_max": 0.3, "normalisation": "sequence", **keys}
        return write_rl(name, policy=policy, grpo=keys, max_length=64, learning_rate=0.0, max_grad_norm=1e9)

    return write


def logged(folder: Path) -> list[dict]:
    """Return what a run logged."""
    return [json.loads(line) for line in (folder / "rl.jsonl").read_text().splitlines()]


def one_by_one(model, batch, compute) -> dict:
    """
    Compute the update sequence by sequence, with the plain model and the loss as its papers write
    it.

    Args:
        model: The plain model.
        batch: The rollouts.
        compute: Returns the model's outputs for the tokens of a rollout, given also its number.
    """
    from tests.e2e.rl_rank import LENGTHS

    old = torch.zeros(len(LENGTHS), max(LENGTHS))
    total = scale = gradient_scale = 0.0
    gradients = {}
    counted = [number for number in range(len(LENGTHS)) if batch.tensor("token_mask")[number, 1:].sum()]
    for number, length in enumerate(LENGTHS):
        ids = batch.tensor("input_ids")[number, :length]
        now = (compute(ids, number).logits[0] / 0.7).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        old[number, 1:length] = now.detach()
        noise = batch.tensor("noise")[number, 1:length]
        ratio = (now - (now.detach() + noise)).exp()
        advantage = batch.tensor("advantages")[number]
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        away = (now.detach() - noise) - now
        loss = -surrogate + 0.1 * (away.exp() - away - 1)
        mask = batch.tensor("token_mask")[number, 1:length]
        if number in counted:
            model.zero_grad()
            share = (loss * mask).double().sum() / mask.sum() / len(counted)
            share.backward()
            own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            total, gradient_scale = total + share.detach(), gradient_scale + norm(own)
            gradients |= {name: gradients.get(name, 0) + gradient for name, gradient in own.items()}
            scale += float((loss.detach().abs() * mask).sum() / mask.sum()) / len(counted)
    return {"old": old, "loss": total, "scale": scale, "gradients": gradients, "gradient_scale": gradient_scale}


def update_of_text(demo, name="qwen2") -> dict:
    """Compute the update of rollouts of text, sequence by sequence."""
    from transformers import AutoModelForCausalLM

    from tests.e2e.rl_rank import rollouts

    model = AutoModelForCausalLM.from_pretrained(demo / "models" / name)
    batch = rollouts(model.config.vocab_size)
    return one_by_one(model, batch, lambda ids, _: model(input_ids=ids[None], use_cache=False))


@pytest.fixture(scope="module")
def expected(demo) -> dict:
    """Return the update of rollouts of text, sequence by sequence."""
    return update_of_text(demo)


def far(found, expected) -> float:
    """
    Return the largest difference of log-probabilities, loss and gradients, on the scale of what
    each sequence adds.
    """
    loss = float((found["trained"]["loss"] - expected["loss"]).abs().max()) / expected["scale"]
    gradients = apart(found["gradients"], expected["gradients"], scale=expected["gradient_scale"])
    return max(loss, apart({"": found["old"]}, {"": expected["old"]}), gradients)


def test_all_modes_give_what_the_sequences_give_one_by_one(write_phases, expected):
    """
    Log-probabilities, loss and gradients of the same rollouts, up to rounding; packing computes
    least.
    """
    from tests.e2e.rl_rank import phases

    found = {mode: phases(str(write_phases(mode, policy))) for mode, policy in MODES.items()}

    assert all(far(each, expected) < FLOAT32 for each in found.values()), {
        m: far(f, expected) for m, f in found.items()
    }
    assert found["packed"]["share"] < found["dynamic"]["share"] < found["plain"]["share"]
    assert found["packed"]["share"] < 0.37


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_together_give_what_one_gives(write_phases, expected, server, tmp_path, world_size):
    """Data-parallel in every mode; rows shared by two ranks, and by two of four."""
    from tests.e2e import rl_rank

    shared = {
        "sequence_packing": {**PACKED["sequence_packing"], "sequence_length_round": 4},
        "context_parallel_size": 2,
    }
    cases = {"shared": str(asked(write_phases("shared", shared), rl=True))}
    if world_size == 2:
        cases |= {mode: str(asked(write_phases(mode, policy), rl=True)) for mode, policy in MODES.items()}
    cases = {name: (path, free_port()) for name, path in cases.items()}
    ranks = server.ranks(world_size, rl_rank.main, cases, str(tmp_path), folder=tmp_path)

    assert [0] * world_size == finished(ranks)

    for name in cases:
        assert far(torch.load(tmp_path / f"{name}.pt", weights_only=True), expected) < FLOAT32, name


VALUED = {
    "loss": "gspo", "baseline": "value", "value_clip": 0.3, "entropy_coefficient": 0.1,
}  # fmt: skip
"""A loss that reads whole sequences, entropies and a value head."""


@pytest.fixture(scope="module")
def valued(demo) -> Path:
    """Return a model with a value head beside it, which expects something."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    folder = demo / "models" / "qwen2 with values"
    shutil.copytree(demo / "models" / "qwen2", folder)
    weight = torch.linspace(-0.5, 0.5, AutoConfig.from_pretrained(folder).hidden_size)[None]
    save_file({"weight": weight, "bias": torch.tensor([0.1])}, folder / "value_head.safetensors")
    return folder


def values_one_by_one(folder: Path) -> torch.Tensor:
    """
    Compute the value before each token, sequence by sequence, from the plain model's last states.
    """
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from tests.e2e.rl_rank import LENGTHS, rollouts

    model = AutoModelForCausalLM.from_pretrained(folder)
    batch, head = rollouts(model.config.vocab_size), load_file(folder / "value_head.safetensors")
    found = torch.zeros(len(LENGTHS), max(LENGTHS))
    for number, length in enumerate(LENGTHS):
        states = model.model(input_ids=batch.tensor("input_ids")[number : number + 1, :length]).last_hidden_state
        found[number, 1:length] = (states @ head["weight"][0] + head["bias"])[0, :-1].detach()
    return found


def test_a_value_head_and_ratios_of_sequences_are_the_same_in_every_mode(write_phases, valued, server, tmp_path):
    """
    Values, loss, metrics and gradients, the head's too, on packed, dynamic and padded rows, and on
    two ranks that share rows, weights or layers.
    """
    from tests.e2e import rl_rank

    def written(name, policy):
        path = write_phases(name, policy, **VALUED)
        path.write_text(path.read_text().replace(str(valued).removesuffix(" with values"), str(valued)))
        return str(path)

    packing = {**PACKED["sequence_packing"], "sequence_length_round": 4}
    keys = {
        "shared": {"context_parallel_size": 2},
        "fsdp2": {"sharding": "fsdp2"},
        "tensor": {"tensor_parallel_size": 2},
    }
    cases = {
        name: (str(asked(Path(written(name, {"sequence_packing": packing, **own})), rl=True)), free_port())
        for name, own in keys.items()
    }
    ranks = server.ranks(2, rl_rank.main, cases, str(tmp_path), folder=tmp_path)
    found = {mode: rl_rank.phases(written(mode, policy)) for mode, policy in MODES.items()}
    assert [0, 0] == finished(ranks)
    found |= {name: torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in cases}

    values, first = values_one_by_one(valued), found["packed"]
    assert first["gradients"]["value_head.weight"].any()
    assert first["trained"]["loss/value_error"] > 0
    for mode, each in found.items():
        assert apart({"": each["values"]}, {"": values}) < FLOAT32, mode
        assert apart(each["gradients"], first["gradients"]) < FLOAT32, mode
        for name, metric in first["trained"].items():
            assert metric.item() == pytest.approx(each["trained"][name].ravel()[0].item(), rel=1e-5, abs=1e-5), (
                mode,
                name,
            )


def test_a_value_head_is_trained_and_saved_beside_its_policy(write_rl, tmp_path):
    """
    Which other tools read as before; its error and the entropy are logged.
    """
    from safetensors.torch import load_file

    from packplan.app.rl import __main__ as rl

    policy = {"sequence_packing": {"enabled": True, "train_mb_tokens": 200}}
    grpo = {"num_steps": 1, "num_generations_per_prompt": 1, "baseline": "value"}
    assert 0 == rl.main([str(write_rl(policy=policy, grpo=grpo))])

    (entry,) = logged(tmp_path / "rl")
    assert 0 < entry["loss/value_error"] < 1
    assert 0 < entry["loss/entropy"]
    assert load_file(tmp_path / "rl" / "policy" / "value_head.safetensors")["bias"].item() > 0  # rewards are
    assert not [name for name in load_file(tmp_path / "rl" / "policy" / "model.safetensors") if "value" in name]


def test_each_baseline_gives_its_own_advantages():
    """By hand, of two prompts with two answers of two tokens each, behind a prompt of one."""
    from packplan.app.rl.loop import _advantages
    from packplan.core.config import GrpoConfig

    rewards, mask = np.array([0.0, 2.0, 4.0, 4.0]), torch.tensor([[0.0, 1.0, 1.0]]).repeat(4, 1)
    values = np.tile(np.float32([9.0, 1.0, 2.0]), (4, 1))

    def found(baseline, *, scale=False, values=None, **grpo):
        config = GrpoConfig(baseline=baseline, scale_rewards=scale, num_generations_per_prompt=2, **grpo)
        fields = _advantages(config, rewards, mask, values)
        return {name: field.tolist() for name, field in fields.items()}

    assert {"advantages": [-1, 1, 0, 0]} == found("group")
    assert {"advantages": [-2, 2, 0, 0]} == found("leave_one_out")
    assert {"advantages": [-2.5, -0.5, 1.5, 1.5]} == found("batch")
    assert np.allclose(np.array([-2.5, -0.5, 1.5, 1.5]) / rewards.std(), found("batch", scale=True)["advantages"])
    td, returns = [[0, 1, reward - 2] for reward in rewards], [[0, 2, reward] for reward in rewards]
    assert {"advantages": td, "returns": returns} == found("value", values=values, gae_lambda=0)
    alone = [[0, reward - 1, reward - 2] for reward in rewards]
    assert alone == found("value", values=values, gae_lambda=1)["advantages"]
    tokens = np.array(alone)[:, 1:]
    scaled = np.array(found("value", values=values, gae_lambda=1, scale=True)["advantages"])[:, 1:]
    assert np.allclose((tokens - tokens.mean()) / tokens.std(), scaled, atol=1e-5)


class Answering:
    """
    Workers that answer prompts by a rule: answer g to a prompt of n tokens is n + g tokens of 100 n
    + g, of the log-probability -n.
    """

    num_workers = 2

    def __init__(self, version=0):
        self._version = version

    def run_all_workers_sharded_data(self, method, shards, /, **_):
        """Answer each shard."""
        import numpy as np

        assert method == "generate"
        results = []
        for shard in shards:
            own = shard.data.lengths.numpy()[:, None] + np.array([[0, 1]])
            tokens = shard.data.lengths.numpy()[:, None] * 100 + np.array([[0, 1]])
            results.append({
                "completions": np.repeat(tokens[..., None], 20, axis=2), "completion_lengths": own,
                "engine_log_probabilities": np.repeat(-(tokens // 100)[..., None], 20, axis=2).astype(np.float32),
                "versions": np.full(tokens.shape, self._version), "exact": tokens % 2 == 0, "rewards": tokens / 2,
            })  # fmt: skip
        return results


def test_answers_are_put_to_their_prompts_and_they_alone_are_trained(write_rl):
    """
    In the prompts' order, with their media, over two workers of which one has a prompt less; those
    of older weights are counted, or refused.
    """
    from packplan.adapters.microbatches import BatchedData
    from packplan.adapters.workers.media import MEDIA
    from packplan.app.rl import loop
    from packplan.app.wiring import training as wiring

    config = wiring.read_config(
        write_rl(grpo={"num_generations_per_prompt": 2}, policy={"generation_batch_size": 1}), rl=True
    )
    lengths = [3, 1, 4, 2, 6]
    ids = torch.tensor([[n] * n + [0] * (6 - n) for n in lengths])
    media = [{"pixel_values": torch.full((1,), n)} for n in lengths]
    fields = {"input_ids": ids, "answers": [""] * 5, "records": [""] * 5, MEDIA: media}
    asked = BatchedData.from_fields(fields, lengths=lengths)

    batch, rewards, figures = loop._roll_out(config, Answering(), asked, shards=2, step=0)

    rows = [(n, g) for n in lengths for g in (0, 1)]
    for place, (n, g) in enumerate(rows):
        size = 2 * n + g
        assert n == batch[MEDIA][place]["pixel_values"].item()
        expected = [n] * n + [100 * n + g] * (n + g)
        assert size == int(batch.lengths[place])
        assert expected == batch.tensor("input_ids")[place, :size].tolist()
        mask = batch.tensor("token_mask")[place]
        assert [0] * n + [1] * (n + g) + [0] * (len(mask) - size) == mask.tolist()
        assert (-n * mask).tolist() == batch.tensor("engine_log_probabilities")[place].tolist()
    assert [(100 * n + g) / 2 for n, g in rows] == rewards.tolist()
    assert {"stale_answers": 0, "lag_max": 0, "reencoded_answers": 5} == figures

    stale = attrs.evolve(config, grpo=attrs.evolve(config.grpo, max_staleness=2))
    *_, figures = loop._roll_out(stale, Answering(version=1), asked, shards=2, step=3)
    assert {"stale_answers": 10, "lag_max": 2, "reencoded_answers": 5} == figures
    with pytest.raises(ConfigError, match=r"grpo.max_staleness: is 2, but the engine's weights are 3 steps old"):
        loop._roll_out(stale, Answering(version=1), asked, shards=2, step=4)


@pytest.fixture
def write_answers(write_rl):
    """Return a function that writes a run of answers of several lengths."""

    def write(name, **policy):
        grpo = {"num_generations_per_prompt": 3, "max_new_tokens": 6, "temperature": 1.5}
        return str(asked(write_rl(name, policy=policy, grpo=grpo), rl=True))

    return write


def test_a_worker_scores_what_it_draws(write_answers, demo):
    """
    Answers end with the token that ends them, or at the limit. Rewards are those of their texts,
    log-probabilities those of the policy; a prompt has none.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from packplan.core.rl import REWARDS
    from tests.e2e import rl_rank

    model, tokenizer = (
        kind.from_pretrained(demo / "models" / "qwen2") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    lines = (demo / "data" / "repeat.jsonl").read_text().splitlines()
    turns = [json.loads(lines[index])["messages"] for index in rl_rank.ASKED for _ in range(3)]

    (found,) = rl_rank.answered(write_answers("one"))

    for row, logs, reward, messages in zip(found["rows"], found["logs"], found["rewards"], turns, strict=True):
        # ms-swift's template begins with a system prompt of its own.
        told = tokenizer(f"user\n{messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        prompt = row[: next(end for end in range(len(row)) if row[end - len(told) : end] == told)]
        answer = row[len(prompt) :]
        assert 6 == len(answer) or answer.index(tokenizer.eos_token_id) == len(answer) - 1
        text = tokenizer.decode(answer, skip_special_tokens=True)
        assert REWARDS["character_overlap"](text, messages[-1]["content"]) == reward
        with torch.no_grad():
            expected = (model(input_ids=torch.tensor([row])).logits[0, :-1] / 1.5).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        assert not logs[: len(prompt)].any()
        assert apart({"": logs[len(prompt) :]}, {"": expected[len(prompt) - 1 :]}) < FLOAT32


def test_answers_do_not_depend_on_workers_batches_or_order(write_answers, server, tmp_path):
    """
    Nor do rewards, at fixed weights. Another step, another generation and a prompt that comes again
    draw others.
    """
    from tests.e2e import rl_rank

    path = write_answers("whole")
    started = [
        server.ranks(
            size, rl_rank.keep, rl_rank.answered, path, str(tmp_path / f"{size}.pt"), folder=tmp_path / str(size)
        )
        for size in (2, 4)
    ]
    expected, other = rl_rank.answered(path, steps=(0, 1))
    batched = rl_rank.answered(write_answers("single", generation_batch_size=1), order=[4, 0, 2, 1, 3])
    assert [0] * 6 == finished([rank for ranks in started for rank in ranks])

    for found in (*batched, *(torch.load(tmp_path / f"{size}.pt")[0] for size in (2, 4))):
        assert expected["rows"] == found["rows"]
        assert expected["rewards"] == found["rewards"]
    rows = {tuple(row) for step in (expected, other) for row in step["rows"]}
    assert 2 * 15 == len(rows)


@pytest.mark.parametrize(("num_steps", "is_double"), [(1, False), (5, True)])
def test_updates_do_not_depend_on_workers(write_rl, server, tmp_path, num_steps, is_double):
    """
    A step in float32, and five in float64, move the weights alike on two workers, to 1e-5.
    """
    from tests.e2e import rl_rank

    policy = {"sequence_packing": {"enabled": True, "train_mb_tokens": 200}}
    grpo = {"num_steps": num_steps, "num_prompts_per_step": 3, "max_new_tokens": 6}
    paths = [
        str(asked(write_rl(name, policy=policy, grpo=grpo, learning_rate=1e-3), rl=True)) for name in ("one", "two")
    ]
    ranks = [
        rank
        for size, path in enumerate(paths, start=1)
        for rank in server.ranks(
            size,
            rl_rank.keep,
            partial(rl_rank.trained, is_double=is_double),
            path,
            f"{path}.pt",
            folder=tmp_path / str(size),
        )
    ]
    assert [0, 0, 0] == finished(ranks)

    one, two = (torch.load(f"{path}.pt") for path in paths)
    assert one["rewards"] == two["rewards"]
    assert num_steps == len(one["rewards"])
    assert apart(two["moved"], one["moved"]) < FLOAT32


def test_the_reward_rises(write_rl, tmp_path, capsys):
    """From one step to the next, by the command; what is logged says how much packing computed."""
    from packplan.app.rl import __main__ as rl

    packing = {"sequence_packing": {"enabled": True, "train_mb_tokens": 512}}
    grpo = {"num_steps": 10, "num_prompts_per_step": 8, "num_generations_per_prompt": 8, "max_new_tokens": 8}

    assert 0 == rl.main([str(write_rl(policy=packing, grpo=grpo))])

    entries = logged(tmp_path / "rl")
    rewards = [entry["reward"] for entry in entries]
    assert list(range(1, 11)) == [entry["step"] for entry in entries]
    assert statistics.fmean(rewards[-4:]) > 1.25 * statistics.fmean(rewards[:4])
    assert all(0 < entry["train"]["computed_share"] < 1 for entry in entries)
    assert all(entry["train"]["utilisation"] <= 1 and len(entry["train"]["chunks"]) == 1 for entry in entries)
    assert "step 10/10, 0 s left: reward" in capsys.readouterr().err
    assert (tmp_path / "rl" / "policy" / "model.safetensors").is_file()

    again = str(write_rl(policy=packing, grpo={**grpo, "num_steps": 1}))
    assert 2 == rl.main([again])
    assert "holds checkpoint-10, policy, rl.jsonl of an earlier run" in capsys.readouterr().err
    assert 0 == rl.main([again, "--overwrite"])
    assert 1 == len(logged(tmp_path / "rl"))


def test_a_step_of_several_updates_says_what_all_of_them_did(write_rl, tmp_path, monkeypatch):
    """
    One for each `train_global_batch_size` answers; ratios leave 1 after the first, and extremes are
    those of all.
    """
    from packplan.app.rl import __main__ as rl
    from packplan.app.rl import loop

    returned = {}
    plain = loop.run_on_all
    monkeypatch.setattr(
        loop, "run_on_all", lambda _, method, *a, **o: returned.setdefault(method, plain(_, method, *a, **o))
    )
    policy = {"sequence_packing": {"enabled": True, "train_mb_tokens": 200}, "train_global_batch_size": 6}
    assert 0 == rl.main([str(write_rl(policy=policy, grpo={"num_steps": 1}))])

    (entry,) = logged(tmp_path / "rl")
    assert 3 == len(entry["train"]["chunks"])
    assert 1 == len(entry["logprob"]["chunks"])
    (trained,) = returned["train"]
    assert trained["loss/ratio_min"].min() == entry["loss/ratio_min"] < 0.99
    assert trained["loss/ratio_max"].max() == entry["loss/ratio_max"] > 1.01
    assert trained["loss/ratio"].mean() == pytest.approx(entry["loss/ratio"])


def test_dynamic_batching_that_computes_more_than_padding_warns(write_rl, capsys):
    """Once in a run, with both numbers of positions, and the key that widths are rounded by."""
    from packplan.app.rl import __main__ as rl

    policy = {"dynamic_batching": {"enabled": True, "train_mb_tokens": 4096, "sequence_length_round": 64}}
    assert 0 == rl.main([str(write_rl(policy=policy, grpo={"num_steps": 2, "max_new_tokens": 4}))])

    key = r"policy.dynamic_batching.sequence_length_round \(64\)"
    says = rf"dynamic batching computes ([\d,]+) positions, .* longest ([\d,]+): lower {key}"
    printed = " ".join(capsys.readouterr().err.split())
    assert 1 == printed.count("dynamic batching computes")
    ((computed, padded),) = re.findall(says, printed)
    assert int(computed.replace(",", "")) > int(padded.replace(",", ""))


OWN_LOSSES = """
import torch

def cross_entropy(logits, data, *, num_sequences, num_tokens):
    wanted = data["input_ids"][:, 1:]
    each = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), wanted, reduction="none")
    loss = (each * data["token_mask"][:, 1:]).sum() / num_tokens
    return loss, {"worst_max": (each * data["token_mask"][:, 1:]).max()} if each.numel() else {}

def dpo_loss(logits, data, *, num_sequences, num_tokens):
    return logits.sum() * 0, {"rows": torch.tensor(float(len(logits)))}

def nan(logits, data, *, num_sequences, num_tokens):
    return logits.sum() * float("nan"), {}

def nothing(logits, data, *, num_sequences, num_tokens):
    return None


def short(logits):
    return None, {}
"""


def test_a_loss_of_ones_own_runs_unchanged(write_phases, tmp_path, monkeypatch):
    """
    It knows one sequence at a time; each mode gives the same loss, gradients and greatest metric;
    DPO is refused by name.
    """
    from packplan.app.rl import __main__ as rl
    from tests.e2e.rl_rank import phases

    (tmp_path / "my_losses.py").write_text(OWN_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    found = [
        phases(str(write_phases(f"own {mode}", MODES[mode], loss="my_losses:cross_entropy")))
        for mode in ("packed", "plain")
    ]

    for name in ("loss", "loss/worst_max"):
        assert found[0]["trained"][name].item() == pytest.approx(found[1]["trained"][name].item(), rel=FLOAT32)
    assert apart(found[0]["gradients"], found[1]["gradients"]) < FLOAT32
    for mode in ("packed", "dynamic"):
        path = write_phases(f"dpo {mode}", MODES[mode], loss="my_losses:dpo_loss")
        with pytest.raises(ArgumentError, match="the loss dpo_loss compares sequences"):
            phases(str(path))
        assert 2 == rl.main([str(path)])
    compared = phases(str(write_phases("dpo plain", {"train_micro_batch_size": 16}, loss="my_losses:dpo_loss")))
    assert 11 == compared["trained"]["loss/rows"].item()


def test_a_loss_that_is_none_ends_the_run(write_rl, tmp_path, monkeypatch, capsys):
    """No number, or nothing: no step is taken, nothing saved."""
    from packplan.app.rl import __main__ as rl

    (tmp_path / "my_losses.py").write_text(OWN_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    expected = {"nan": "loss is nan, so the policy was not updated", "nothing": "the loss nothing returned NoneType",
                "short": "grpo.loss: is my_losses:short, which does not take (logits, data"}  # fmt: skip
    for loss, says in expected.items():
        assert 2 == rl.main([str(write_rl(grpo={"loss": f"my_losses:{loss}"}))])
        assert says in capsys.readouterr().err
        assert not (tmp_path / "rl" / "policy").exists()


def test_a_learning_rate_that_ruins_the_policy_ends_the_run(write_rl, tmp_path, capsys):
    """At once, and nothing is saved, though all weights are finite."""
    from packplan.app.rl import __main__ as rl

    assert 2 == rl.main([str(write_rl(learning_rate=1e30, grpo={"num_steps": 1}))])
    assert "so the policy was not saved; lower training.learning_rate" in capsys.readouterr().err
    assert not (tmp_path / "rl" / "policy").exists()


@pytest.mark.parametrize(
    ("model", "policy", "grpo", "says"),
    [
        ({}, {"sequence_packing": {"enabled": True, "sequence_length_round": 4}, "context_parallel_size": 2}, {},
         "does not divide 1 workers"),
        ({}, {}, {"reward": "kindness"}, "grpo.reward: is kindness: neither one of"),
        ({}, {}, {"max_new_tokens": 120}, "repeat.jsonl, line 1: the prompt has .* tokens, and an answer may have 120"),
        ({"model": "qwen2", "attn_impl": "paged|sdpa"}, {"sequence_packing": {"enabled": True}}, {},
         r"may not pack under attn_impl paged\|sdpa"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(write_rl, demo, capsys, model, policy, grpo, says):  # noqa: PLR0917  # fixtures
    """With exit status 2, and what to do."""
    from packplan.app.rl import __main__ as rl

    overrides = [f"model.{key}={demo / 'models' / value if key == 'model' else value}" for key, value in model.items()]
    assert 2 == rl.main([str(write_rl(policy=policy, grpo=grpo)), *overrides])
    assert re.search(says, capsys.readouterr().err)

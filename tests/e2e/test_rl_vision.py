"""
Reinforcement learning of policies that see: images and videos stay with their sequences, in every
mode and on any ranks.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys

import pytest
import torch
import yaml

from packplan.adapters.workers.media import MEDIA, PolicyInputs, media_of, never_sample_placeholders
from packplan.core.errors import ConfigError
from packplan.core.rl import draw_keys
from packplan.core.shard import shard_dynamic, shard_packed
from tests.e2e.test_rl import MODES, PACKED, far, one_by_one
from tests.fakes import ScriptedGroup
from tests.nearness import FLOAT32, apart
from tests.network import free_port
from tests.processes import finished
from tests.stored import asked

pytestmark = pytest.mark.slow

SEES = "qwen2_5_vl"

DEEP = "qwen3_vl"
"""A model that adds features of images to several layers."""


@pytest.fixture
def write_phases(write_rl, demo):
    """Return a function that writes an update of a policy that sees, on rollouts that are given."""

    def write(name, policy, of=SEES):
        keys = {"kl_coefficient": 0.1, "ratio_clip_max": 0.3, "temperature": 0.7, "normalisation": "sequence"}
        path = write_rl(name, policy=policy, grpo=keys, max_length=64, learning_rate=0.0, max_grad_norm=1e9)
        return with_model(path, demo / "models" / of)

    return write


def with_model(path, folder, **custom):
    """Write another model, and keys of `custom`, into a run's YAML; return it."""
    document = yaml.safe_load(path.read_text())
    document["model"]["model"] = str(folder)
    document["custom"] |= custom
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def policies(demo):
    """Return the tiny models that see, as policies that never say placeholders."""
    from transformers import AutoModelForImageTextToText

    models = {of: AutoModelForImageTextToText.from_pretrained(demo / "models" / of).eval() for of in (SEES, DEEP)}
    for model in models.values():
        never_sample_placeholders(model)
    return models


@pytest.fixture(scope="module")
def batches(policies):
    """Return, for each model, rollouts of text, of images of several sizes, and of a video."""
    from tests.e2e.rl_rank import seeing_rollouts

    return {of: seeing_rollouts(model.config, model.config.text_config.vocab_size) for of, model in policies.items()}


@pytest.fixture(scope="module")
def expected(policies, batches):
    """
    Return, for each model, the update sequence by sequence, with positions by the model itself.
    """
    from packplan.adapters.loaders.positions import token_types

    def update(of):
        model, batch = policies[of], batches[of]

        def compute(ids, number):
            own = batch[MEDIA][number]
            types = {"mm_token_type_ids": token_types(model.config, ids[None])} if own else {}
            return model(input_ids=ids[None], use_cache=False, **own, **types)

        return answers_of(one_by_one(model, batch, compute), batch)

    return {of: update(of) for of in policies}


def answers_of(found, batch) -> dict:
    """Return results with log-probabilities of answers alone: prompts have placeholders."""
    return {**found, "old": found["old"] * (batch.tensor("token_mask") > 0)}


def test_all_modes_give_what_the_sequences_give_one_by_one(write_phases, batches, expected):
    """
    Log-probabilities, loss and gradients, those of the vision tower too, with images of several
    sizes, text alone and a video.
    """
    from tests.e2e.rl_rank import phases

    found = {mode: phases(str(write_phases(mode, policy))) for mode, policy in MODES.items()}

    distances = {mode: far(answers_of(each, batches[SEES]), expected[SEES]) for mode, each in found.items()}
    assert max(distances.values()) < FLOAT32, distances
    assert float(expected[SEES]["gradients"]["model.visual.patch_embed.proj.weight"].norm()) > 0


def test_ranks_together_give_what_one_gives(write_phases, batches, expected, server, tmp_path):
    """
    Ranks that share each row, and ranks that share weights, with microbatches of their own of which
    some have no image.
    """
    from tests.e2e import rl_rank

    rounded = {**PACKED["sequence_packing"], "sequence_length_round": 4}
    shared = {"sequence_packing": rounded, "context_parallel_size": 2}
    runs = {
        "shared": (shared, SEES),
        "shared deep": (shared, DEEP),
        "sharded": ({**PACKED, "sharding": "fsdp2"}, SEES),
    }
    cases = {name: (str(asked(write_phases(name, *run), rl=True)), free_port()) for name, run in runs.items()}
    ranks = server.ranks(2, rl_rank.main, cases, str(tmp_path), folder=tmp_path)

    assert [0, 0] == finished(ranks)

    for name, (_, of) in runs.items():
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert far(answers_of(found, batches[of]), expected[of]) < FLOAT32, name


def test_answers_are_drawn_as_from_each_prompt_alone(policies, batches):
    """
    Their log-probabilities, drawn in a batch with padding on the left, are those of each row by
    itself with the model's own positions: media are in the order of the rows.
    """
    from packplan.adapters.answers import generate
    from packplan.adapters.loaders.positions import token_types

    keys = draw_keys(seed=1, step=0, num=4, prompts=[p for p in range(6) for _ in range(2)], generations=[0, 1] * 6)
    for of, model in policies.items():
        prompts = batches[of].select([10, 2, 9, 3, 6, 10])
        inputs = PolicyInputs.from_model(model).prompts(prompts)
        found = generate(model, inputs, keys=keys, temperature=0.7, padding=0, ends=[1])

        for place, (tokens, length) in enumerate(zip(found.tokens, found.lengths.tolist(), strict=True)):
            number = place // 2
            prompt, own = prompts.tensor("input_ids")[number, : prompts.lengths[number]], prompts[MEDIA][number]
            ids = torch.cat([prompt, tokens[:length]])[None]
            types = {"mm_token_type_ids": token_types(model.config, ids)} if own else {}
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False, **own, **types).logits[0, len(prompt) - 1 : -1] / 0.7
            alone = logits.log_softmax(-1).gather(1, tokens[:length, None])[:, 0]
            assert apart({"": found.log_probabilities[place, :length]}, {"": alone}) < FLOAT32


def test_placeholders_are_never_sampled(policies):
    """At a high temperature too; a sampled one would have no image."""
    model = policies[SEES]
    ids = torch.full((1, 3), 30)

    with torch.no_grad():
        likely = (model(input_ids=ids).logits[0, -1] / 5).softmax(-1)

    placeholders = [model.config.image_token_id, model.config.video_token_id]
    assert [0.0, 0.0] == likely[placeholders].tolist()
    assert 1.0 == pytest.approx(float(likely.sum()))


@pytest.mark.parametrize("cut", [shard_packed, shard_dynamic])
def test_media_follow_their_sequences_and_are_sent_once(batches, cut):
    """
    To the worker of each, also as filler; answers of one prompt share its pixels, here and when
    they are pickled.
    """
    batch = batches[SEES]
    answers = batch.select(torch.arange(len(batch)).repeat_interleave(4))
    sharding = cut(answers.lengths.numpy(), shards=3, batch_size=44, max_tokens_per_microbatch=70)

    for worker, held in zip(sharding, answers.shard(sharding), strict=True):
        indices = [int(index) for part in worker for index in part.indices]
        assert all(held.data[MEDIA][slot] is batch[MEDIA][index // 4] for slot, index in enumerate(indices))
        once = {index // 4: batch[MEDIA][index // 4] for index in indices}
        pixels = sum(part.numel() * 4 for own in once.values() for name, part in own.items() if "pixel" in name)
        assert pixels < len(pickle.dumps(held.data[MEDIA])) < pixels + 20_000


def test_ranks_that_share_a_step_run_the_tower_in_every_row(write_phases):
    """
    On text too, as often as on images and videos together: under sharded weights a rank that skips
    it would block the others. No cached token runs it again.
    """
    from packplan.adapters.microbatches import BatchedData
    from packplan.app.wiring import training as wiring

    config = wiring.read_config(write_phases("text", PACKED), rl=True)
    samples = wiring.open_samples(config)["train"]
    worker = wiring.open_policy(
        config, ScriptedGroup(world_size=2), samples, wiring.decide_attention(config, isolated=False)
    )
    passes = []
    worker._model.model.visual.register_forward_hook(lambda *_: passes.append(1))
    text = BatchedData.from_fields({"input_ids": torch.full((2, 5), 30)}, lengths=[5, 3])
    (shard,) = text.shard(shard_packed([5, 3], shards=1, batch_size=2, max_tokens_per_microbatch=8))

    worker.log_probabilities(shard)
    assert 2 == len(passes)

    worker._model.generate(**worker._inputs.prompts(text), max_new_tokens=3, pad_token_id=0)
    assert 4 == len(passes)


@pytest.fixture
def pictures(demo):
    """Return a file of four of the demo's pictures, beside them."""
    path = demo / "data" / "four.jsonl"
    path.write_text("".join((demo / "data" / "colours.jsonl").read_text().splitlines(keepends=True)[:4]))
    return path


def test_the_command_trains_a_policy_that_sees(write_rl, demo, pictures, tmp_path, monkeypatch):
    """Work counts the patches of each answer's picture, and what is saved sees too."""
    from packplan.app.rl import __main__ as rl
    from packplan.app.rl import loop
    from packplan.app.wiring import training as wiring
    from packplan.app.wiring.works import trained_work

    cuts, plain = [], loop._figures
    monkeypatch.setattr(loop, "_figures", lambda sharding: cuts.append(sharding) or plain(sharding))
    packing = {"sequence_packing": {"enabled": True, "train_mb_tokens": 512}}
    path = with_model(write_rl(policy=packing), demo / "models" / SEES, train_jsonl=str(pictures))

    assert 0 == rl.main([str(path)])

    entries = [json.loads(line) for line in (tmp_path / "rl" / "rl.jsonl").read_text().splitlines()]
    assert [1, 2] == [entry["step"] for entry in entries]
    assert all(entry["grad_norm"] > 0 for entry in entries)
    config = wiring.read_config(path, rl=True)
    work, _ = trained_work(config)
    samples = wiring.open_samples(config)["train"]
    patches = [int(samples.prompt(index)["image_grid_thw"].prod()) for index in range(4)]
    answers = config.grpo.num_generations_per_prompt
    media = answers * work.vision.estimate_image_flops([1] * 4, patches).sum()
    assert 4 == len(cuts)
    for cut in cuts:
        assert work.sample_flops(cut.lengths).sum() + media == pytest.approx(cut.works.sum())
    assert (tmp_path / "rl" / "policy" / "processor_config.json").is_file()


def test_what_cannot_see_is_refused_before_the_first_step(write_rl, demo, pictures, tmp_path, capsys):
    """A model of text, and one without a processor of images; with the key that has to change."""
    from packplan.app.rl import __main__ as rl

    lacks = tmp_path / "lacks"
    shutil.copytree(demo / "models" / SEES, lacks, ignore=shutil.ignore_patterns("*processor*"))
    expected = {
        demo / "models" / "qwen2": "four.jsonl, line 1: the record has images, but the model reads text only: "
        "name a model that sees in model.model",
        lacks: "model.model: has no processor of images: copy its processor_config.json",
    }
    for folder, says in expected.items():
        path = with_model(write_rl(), folder, train_jsonl=str(pictures))
        assert 2 == rl.main([str(path)])
        assert says in capsys.readouterr().err
        assert not (tmp_path / "rl" / "rl.jsonl").exists()


def test_an_engine_of_text_is_refused_for_a_policy_that_sees(write_rl, demo, pictures, capsys):
    """It would answer without having seen them."""
    from packplan.app.rl import __main__ as rl

    command = f"{sys.executable} {{folder}} {{port}}"
    path = with_model(write_rl(grpo={"engine_command": command}), demo / "models" / SEES, train_jsonl=str(pictures))

    assert 2 == rl.main([str(path)])
    assert "grpo.engine_command: answers text, but the model reads images" in capsys.readouterr().err


def test_media_that_cannot_be_joined_are_refused():
    """Tiles in lists, and inputs for each token that an answer would lack, by the model's key."""
    for encoded in ({"pixel_values": [torch.zeros(1)]}, {"token_type_ids": torch.zeros(1)}):
        with pytest.raises(ConfigError, match=r"model\.model: takes"):
            media_of({"input_ids": [1], **encoded})

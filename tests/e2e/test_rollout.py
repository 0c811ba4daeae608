"""
Dynamic packing in training: every sample to one rank and worker, ranks that end together, rewards
that rise.
"""

from __future__ import annotations

import json
import logging
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from packplan.core.errors import ConfigError, DataSetError
from tests.processes import finished
from tests.stored import asked

pytestmark = pytest.mark.slow

LENGTHS = np.random.default_rng(1).integers(1, 110, 300).tolist()


class Numbers:
    """A stream of numbered samples, in an order of each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def samples(self, shard, num_shards):
        order = np.random.default_rng(self.epoch).permutation(len(LENGTHS))
        for index in order[shard::num_shards].tolist():
            yield f"line {index}", {"number": index, "length": LENGTHS[index]}


def packs_of(epoch: int, *, world_size: int, workers: int, **options) -> tuple[list, Any]:
    """Return the packs that the loaders of all ranks give in an epoch, and their counts."""
    from torch.utils.data import DataLoader

    from packplan.adapters.trainer.dynamic_dataset import DynamicDataset, Ended, StreamCounts
    from packplan.core.stream import CarryOptions

    items = []
    for rank in range(world_size):
        chosen = CarryOptions(packing_length=100, packing_buffer=16, **options)
        dataset = DynamicDataset(Numbers(), chosen, rank=rank, world_size=world_size)
        dataset.set_epoch(epoch)
        items += list(DataLoader(dataset, batch_size=None, num_workers=workers))
    packs = [item.samples for item in items if not isinstance(item, Ended)]
    return packs, sum((item.counts for item in items), StreamCounts())


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (3, 0), (2, 2)])
def test_every_sample_goes_to_one_rank_and_one_worker(world_size, workers):
    """Exactly once, or it is counted; the same epoch gives the same packs, another one others."""
    from packplan.adapters.trainer.dynamic_dataset import StreamCounts

    kept = {"world_size": world_size, "workers": workers, "drop_last": False, "allow_single_long": True}
    packs, counts = packs_of(0, **kept)

    assert dict.fromkeys(range(300), 1) == Counter(sample["number"] for pack in packs for sample in pack)
    assert all(sum(sample["length"] for sample in pack) <= 100 or len(pack) == 1 for pack in packs)
    num_long = sum(length >= 100 for length in LENGTHS)
    filled = sum(min(100, sum(sample["length"] for sample in pack)) for pack in packs)
    expected = {"long": num_long, "filled_tokens": filled, "tokens": sum(LENGTHS)}
    assert StreamCounts(samples=300, packs=len(packs), **expected) == counts
    assert packs_of(0, **kept)[0] == packs != packs_of(1, **kept)[0]

    dropping = {"world_size": world_size, "workers": workers, "allow_single_long": False, "min_fill_ratio": "0.9"}
    packs, counts = packs_of(0, **dropping)
    trained = [sample["length"] for pack in packs for sample in pack]
    assert num_long == counts.skipped
    assert 300 == len(trained) + counts.skipped + counts.dropped
    skipped_tokens = sum(length for length in LENGTHS if length >= 100)
    assert sum(LENGTHS) == sum(trained) + skipped_tokens + counts.dropped_tokens
    assert 0 < counts.dropped_packs <= counts.dropped


def test_what_was_emitted_is_not_held():
    """A stream of any length needs the memory of its buffer."""
    import weakref

    from packplan.adapters.trainer.dynamic_dataset import DynamicDataset
    from packplan.core.stream import CarryOptions

    living: weakref.WeakSet = weakref.WeakSet()

    class Token:
        """Lives as long as its sample; a set asks for a hash, which a dict has not."""

    def marked(sample):
        token = Token()
        living.add(token)
        return {**sample, "token": token}

    class Counted(Numbers):
        def samples(self, shard, num_shards):
            return ((record, marked(sample)) for record, sample in super().samples(shard, num_shards))

    dataset = DynamicDataset(Counted(), CarryOptions(packing_length=100, packing_buffer=16), rank=0, world_size=1)
    most = max(len(living) for _ in dataset)

    assert most <= 2 * 16 + 1


def write_turns(path: Path, *records: list[tuple[str, str]]) -> str:
    """Write records of turns, each with its role; return the path."""
    rows = [{"messages": [{"role": role, "content": said} for role, said in turns]} for turns in records]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def write_rollout(write_run, text_jsonl):
    """Return a function that writes a run of the rollout variant on text."""

    def write(custom: dict | None = None, name: str = "run", **training) -> Path:
        # Some records are longer than the packs of the run named `long`.
        keys = {
            "max_steps": 6,
            "effective_batch_size": 2,
            "packing_buffer": 8,
            "packing_mode": "dynamic",
            "lr_scheduler_type": "constant",
        }
        return write_run(
            "qwen2", name=name, template={"max_length": 50 if name == "long" else 160}, training={**keys, **training},
            custom={"train_jsonl": str(text_jsonl), "trainer_variant": "rollout", **(custom or {})},
        )  # fmt: skip

    return write


def run(path):
    from packplan.adapters.ranks.torch_group import OneRank
    from packplan.app.sft import stream as rollout
    from packplan.app.wiring import training as wiring

    return rollout.run(wiring.read_config(path), OneRank())


COUNTS = (
    "epoch_samples", "epoch_packs", "epoch_long_samples", "epoch_skipped_samples", "epoch_dropped_samples",
    "epoch_left_over_packs",
)  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_trained_epoch_after_epoch(write_rollout, text_jsonl, monkeypatch, workers):
    """
    Packs of the data as they are, in an order of each epoch; evaluation unpacked; epochs say what
    became of samples.
    """
    from packplan.adapters.trainer.stream import StreamTrainer

    trained: dict[float, list] = {}
    step = StreamTrainer.training_step

    def noted(trainer, model, inputs, *arguments, **options):
        trained.setdefault(trainer._epoch, []).append(inputs["sample_lengths"])
        return step(trainer, model, inputs, *arguments, **options)

    monkeypatch.setattr(StreamTrainer, "training_step", noted)
    path = write_rollout({"val_jsonl": str(text_jsonl)}, dataloader_num_workers=workers, max_steps=11,
                         eval_strategy="epoch", packing_min_fill_ratio="0.5")  # fmt: skip
    steps, terminated, history = run(path)

    assert (11, False) == (steps, terminated)
    logged = [entry for entry in history if "loss" in entry]
    assert 11 == len(logged)
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert all(0.5 <= entry["fill"] <= 1 and entry["samples_per_pack"] > 1 for entry in logged)
    ends = [entry for entry in history if "epoch_samples" in entry]
    assert ends
    for number, entry in enumerate(ends):
        assert number + 1 == entry["epoch"]
        assert 30 == entry["epoch_samples"]
        assert entry["epoch_long_samples"] / entry["epoch_packs"] == entry["epoch_long_pack_share"]
        assert all(type(entry[name]) is int for name in COUNTS)
        in_epoch = sum(step["epoch"] == number for step in logged)
        assert entry["epoch_packs"] == 2 * in_epoch + entry["epoch_left_over_packs"]
    assert [entry["epoch"] for entry in history if "eval_loss" in entry][: len(ends)] == [
        entry["epoch"] for entry in ends
    ]
    assert trained[0] != trained[1]


@pytest.mark.parametrize(("allowed", "says"), [(True, "a pack of its own"), (False, "skipped; training.packing_allow")])
def test_long_samples_are_logged_one_by_one(write_rollout, text_jsonl, caplog, allowed, says):
    """
    With their record, their length and the limit; the steps' fill and the epoch's count them as
    full.
    """
    logging.getLogger("packplan").propagate = True
    with caplog.at_level(logging.INFO, logger="packplan"):
        _, _, history = run(write_rollout(max_steps=40, packing_allow_single_long=allowed, packing_buffer=2,
                                          packing_drop_last=False, effective_batch_size=1, name="long"))  # fmt: skip
    lines = [line for line in caplog.messages if says in line]
    num_long = next(entry for entry in history if "epoch_samples" in entry)
    assert allowed == (num_long["epoch_long_pack_share"] > 0)
    fills = [entry["fill"] for entry in history if "loss" in entry and not entry["epoch"]]
    assert statistics.fmean(fills) == pytest.approx(num_long["epoch_fill_mean"])
    assert num_long["epoch_packs"] == len(fills)

    assert num_long["epoch_long_samples" if allowed else "epoch_skipped_samples"] > 0
    assert len(lines) >= num_long["epoch_long_samples" if allowed else "epoch_skipped_samples"]
    assert all(f"{text_jsonl}, line " in line and "where a pack holds 50" in line for line in lines)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_its_steps_end_says_what_it_lost(write_rollout, caplog, workers):
    """
    With every loss, and at the end, although no epoch ended: each sample that came is in one of the
    numbers. A warning, once.
    """
    logging.getLogger("packplan").propagate = True
    keys = {"max_steps": 5, "packing_allow_single_long": False, "packing_min_fill_ratio": "0.97", "packing_buffer": 4,
            "dataloader_num_workers": workers, "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 3, "eval_packing": True, "effective_batch_size": 1}  # fmt: skip
    with caplog.at_level(logging.INFO):
        _, _, history = run(write_rollout(name="long", **keys))

    logged = [entry for entry in history if "loss" in entry]
    names = ["stream_samples", "stream_long_samples", "stream_skipped_samples", "stream_dropped_samples"]
    assert all(name in entry for entry in logged for name in names)
    assert all((values := [entry[name] for entry in logged]) == sorted(values) for name in names)
    (end,) = (line for line in caplog.messages if line.startswith("the stream has ended: "))
    came, trained, dropped, packs, _, _, skipped, waiting, long = map(int, re.findall(r"\d+", end))
    assert came == trained + dropped + skipped + waiting
    assert min(dropped, packs, skipped, trained) > 0 == long
    assert sum(entry["samples_per_pack"] for entry in logged) == trained
    assert [came, long, skipped, dropped] == [logged[-1][name] for name in names]
    assert end.endswith(
        "training.packing_drop_last: false, lower training.packing_min_fill_ratio, or raise training.packing_buffer"
    )
    assert 1 == sum(line.startswith("the stream drops more than 0.01 of its tokens") for line in caplog.messages)
    assert "packing forces training.per_device_train_batch_size from 2 to 1" in caplog.text
    assert "packing forces training.per_device_eval_batch_size from 3 to 1" in caplog.text


def test_the_line_of_an_epoch_has_its_epoch(write_rollout):
    """How many are done then, as in a run of a plan; also where no loss was logged in it."""
    _, _, history = run(write_rollout(max_steps=12, logging_steps=100))

    ends = [entry["epoch"] for entry in history if "epoch_samples" in entry]
    assert len(ends) > 1
    assert list(range(1, len(ends) + 1)) == ends


def test_an_epoch_without_a_step_ends_training(write_rollout):
    """Instead of going round for ever; the reason is said, and the status tells."""
    with pytest.raises(DataSetError, match="after 0 of 6 steps: an epoch had no whole step"):
        run(write_rollout(effective_batch_size=500))


def test_the_last_message_is_what_is_answered(write_rollout, tmp_path):
    """Where there are several turns, all before it are the prompt, word for word as in training."""
    from packplan.app.wiring import training as wiring

    turns = [("user", "first"), ("assistant", "red"), ("user", "second"), ("assistant", "blue")]
    path = write_turns(tmp_path / "turns.jsonl", turns)
    samples = wiring.open_samples(wiring.read_config(write_rollout({"train_jsonl": path})))["train"]

    prompt, whole = samples.prompt(0)["input_ids"], samples.encode(0)["input_ids"]

    assert whole[: len(prompt)] == prompt
    assert samples.template.tokenizer.decode(prompt).endswith(
        "<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "blue" == samples.answer(0)
    assert samples.template.tokenizer.decode(samples.encode(0, answer="green")["input_ids"]).count("red") == 1


REWARDS = """
number = 5
def boom(completion, answer): raise KeyError("gone")
def nothing(completion, answer): return None
def nan(completion, answer): return float("nan")
def one(completion): return 1.0
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("number", "no function"),
        ("boom", r"fails on an answer to .*line \d+: KeyError"),
        ("nothing", "fails on an answer to .*TypeError"),
        ("nan", "gives nan for an answer to"),
        ("one", "fails on an answer to .*positional argument"),
    ],
)
def test_a_reward_of_ones_own_that_fails_is_named(write_rollout, tmp_path, monkeypatch, name, says):
    """With the record, and as the user's to fix."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigError, match=f"custom.rollout_reward.*{says}"):
        run(write_rollout({"rollout_reward": f"my_rewards:{name}", "rollout_max_new_tokens": 4}))


def test_a_mix_is_trained_in_its_shares(write_rollout, text_jsonl, tmp_path, monkeypatch):
    """Ratios of the mix, packed after it; another draw each epoch."""
    from packplan.adapters.trainer import rollouts

    other = tmp_path / "other.jsonl"
    other.write_text("".join(text_jsonl.read_text().splitlines(keepends=True)[:20]))
    mix = tmp_path / "mix.yaml"
    mix.write_text(
        yaml.safe_dump({"sources": [{"jsonl": str(text_jsonl), "ratio": 2}, {"jsonl": str(other), "ratio": 1}]})
    )
    taken = []
    plain = rollouts.RecordStream.indices

    def noted(stream, shard, num_shards):
        taken.append(plain(stream, shard, num_shards))
        return taken[-1]

    monkeypatch.setattr(rollouts.RecordStream, "indices", noted)
    path = write_rollout({"fusion_config": str(mix)}, max_steps=12)
    document = yaml.safe_load(path.read_text())
    del document["custom"]["train_jsonl"]
    path.write_text(yaml.safe_dump(document))
    run(path)

    assert len(taken) > 1
    for indices in taken:
        assert [30, 15] == [sum(index < 30 for index in indices), sum(index >= 30 for index in indices)]
        assert 45 == len(set(indices))
    assert taken[0] != taken[1]


def test_the_reward_rises(write_rollout):
    """The best of the model's own answers are trained, and its next answers are better."""
    custom = {"rollout_reward": "character_overlap", "rollout_completions": 8, "rollout_max_new_tokens": 8}
    _, _, history = run(write_rollout(custom, max_steps=10, effective_batch_size=4, learning_rate="5e-3"))

    rewards = [entry["reward"] for entry in history if "reward" in entry]
    kept = [entry["reward_kept"] for entry in history if "reward" in entry]
    assert 10 == len(rewards)
    assert all(best >= mean for best, mean in zip(kept, rewards, strict=True))
    assert statistics.fmean(rewards[-4:]) > 1.15 * statistics.fmean(rewards[:4])


def test_ranks_rewards_are_weighted_by_their_answers(server, write_rollout, tmp_path):
    """
    The mean of all answers of both ranks, of which one has two prompts and the other one; a step
    that used no new answers has no reward.
    """
    from packplan.app import sft

    turns = ([("user", "say"), ("assistant", "a " * number)] for number in (1, 2, 8))
    custom = {"train_jsonl": write_turns(tmp_path / "prompts.jsonl", *turns),
              "rollout_reward": "tests.fakes:words_of_answer", "rollout_keep": 4,
              "rollout_max_new_tokens": 4}  # fmt: skip
    run_yaml = write_rollout(custom, name="long", max_steps=2, packing_buffer=99, packing_drop_last=False)

    assert [0, 0] == finished(server.ranks(2, sft.main, [str(asked(run_yaml))], folder=tmp_path / "logs"))
    lines = map(json.loads, (tmp_path / "long" / "logging.jsonl").read_text().splitlines())
    first, second = ({name: line[name] for name in line if "reward" in name} for line in lines if "loss" in line)
    assert pytest.approx({"reward": 11 / 3, "reward_kept": 11 / 3}) == first
    assert not second


def test_a_model_that_sees_answers_too(write_run, demo):
    """Prompts with images: generation goes past the hooks of training."""
    custom = {"train_jsonl": str(demo / "data" / "messages.jsonl"), "trainer_variant": "rollout",
              "rollout_reward": "exact_match", "rollout_max_new_tokens": 8}  # fmt: skip
    keys = {"max_steps": 2, "packing_mode": "dynamic", "packing_buffer": 4, "packing_min_fill_ratio": "0.4"}
    path = write_run("qwen3_vl", custom=custom, training=keys, template={"max_length": 400})

    steps, _, history = run(path)

    assert 2 == steps
    assert all(0 <= entry["reward"] <= 1 for entry in history if "reward" in entry)


def test_two_ranks_with_unequal_data_end_together(server, write_rollout, tmp_path):
    """
    One rank's samples are short, the other's long: it has more packs; both run the same steps.
    """
    from packplan.app import sft

    turns = ([("user", "say"), ("assistant", "blue " * (3 + 20 * (n % 3 == 0)))] for n in range(60))
    path = write_turns(tmp_path / "unequal.jsonl", *turns)
    run_yaml = write_rollout({"train_jsonl": path}, max_steps=25, use_cpu=True)

    assert [0, 0] == finished(server.ranks(2, sft.main, [str(asked(run_yaml))], folder=tmp_path / "logs"))
    lines = [json.loads(line) for line in (tmp_path / "run" / "logging.jsonl").read_text().splitlines()]
    assert 25 == sum("loss" in line for line in lines)
    ends = [line for line in lines if "epoch_samples" in line]
    assert len(ends) > 1
    assert all(60 == line["epoch_samples"] for line in ends)
    assert all(line["epoch_packs"] >= line["epoch_left_over_packs"] >= 0 for line in ends)


def test_what_needs_a_plan_refuses_a_stream(write_rollout, capsys):
    """`packplan plan build` and `packplan check`; the records can still be looked through."""
    from packplan.app import check
    from packplan.app.plan import __main__ as plan

    path = str(write_rollout())

    for main, arguments in ((plan.main, ["build", path]), (check.main, [path])):
        assert 2 == main(arguments)
        assert "there is no plan" in capsys.readouterr().err
    assert 0 == plan.main(["build", path, "--list-failures"])


def test_prompts_are_answered_where_the_model_is(write_rollout):
    """Without a word on loader workers, of which ms-swift starts one."""
    from packplan.app.wiring import training as wiring

    path = write_rollout({"rollout_reward": "exact_match"})
    document = yaml.safe_load(path.read_text())
    del document["training"]["dataloader_num_workers"]
    path.write_text(yaml.safe_dump(document))
    config = wiring.read_config(path)

    from packplan.app.planning.schedule import batch_of

    batch = batch_of(config, world_size=1)
    assert 0 == wiring.open_arguments(config, batch.size, batch.accumulation).dataloader_num_workers


@pytest.mark.covers
@pytest.mark.parametrize(
    ("custom", "training", "says"),
    [
        ({}, {"max_steps": -1}, "training.max_steps: is not set"),
        ({}, {"packing": False}, "training.packing: is false"),
        ({}, {"packing_mode": "static"}, "training.packing_mode: is static, which is Stage-1's"),
        ({}, {"resume_from_checkpoint": "last"}, "a stream starts again"),
        ({"fusion_config": "mix.yaml"}, {}, "both name the data"),
        ({"rollout_reward": "exact_match"}, {"dataloader_num_workers": 2}, "in processes without the model"),
        ({"rollout_keep": 9}, {}, "is more than custom.rollout_completions"),
        ({"rollout_completions": 0}, {}, "custom.rollout_completions: is 0"),
        ({"rollout_temperature": 0}, {}, "custom.rollout_temperature"),
        (
            {"trainer_variant": "sft", "rollout_reward": "exact_match"},
            {"packing_buffer": 512},
            "is of the rollout variant",
        ),
        ({"rollout_reward": "kindness"}, {}, "neither one of word_overlap"),
        ({"rollout_reward": "packplan.core.rl.rewards:kindness"}, {}, "has no attribute 'kindness'"),
    ],
)
def test_what_does_not_go_together_is_refused(write_rollout, custom, training, says):
    """By key."""
    with pytest.raises(ConfigError, match=says):
        run(write_rollout(custom, **training))

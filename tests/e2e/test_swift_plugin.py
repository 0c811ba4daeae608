"""Planned packs inside ms-swift's own commands: the plan's packs, its steps, the losses of `packplan sft`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

import packplan as pp
from packplan.app import plugin
from packplan.app.wiring.conversion import convert_source, run_text
from tests.e2e import plugin_run, rank_main
from tests.processes import finished

pytestmark = pytest.mark.slow

LENGTH = {"qwen2": 256, "qwen2_5_vl": 512}
"""Model -> packing length."""

PLAIN = (
    "--torch_dtype float32 --fp16 false --bf16 false --report_to none --check_model false --use_cpu true --dataset_shuffle false "
    "--add_version false --split_dataset_ratio 0 --dataset_num_proc 1 --dataloader_num_workers 0 "
    "--gradient_checkpointing false --logging_steps 1 --learning_rate 1e-3 --packing true "
    "--per_device_train_batch_size 1 --lora_dropout 0"
)


@pytest.fixture(scope="module")
def records(demo, tmp_path_factory) -> Path:
    """A folder with records for each model, and pairs."""
    folder = tmp_path_factory.mktemp("records")
    images = sorted((demo / "data" / "images").glob("train_*"), key=lambda image: image.stat().st_size)[:3]
    kinds = {name: (folder / f"{name}.jsonl").open("w") for name in (*LENGTH, "pairs")}
    for number in range(23):
        record = {
            "messages": [
                {"role": "user", "content": f"what is {number}?"},
                {"role": "assistant", "content": "blue circle " * (1 + number % 7)},
            ]
        }
        kinds["qwen2"].write(json.dumps(record) + "\n")
        rejected = {"rejected_response": "red square " * (1 + number % 3)}
        kinds["pairs"].write(json.dumps(record | rejected) + "\n")
        if number % 2:
            record["messages"][0]["content"] = f"<image>what is {number}?"
            record["images"] = [str(images[number % len(images)])]
        kinds["qwen2_5_vl"].write(json.dumps(record) + "\n")
    for file in kinds.values():
        file.close()
    return folder


@pytest.fixture
def words(demo, records, tmp_path):
    """Return a function that gives the words of a command for a tiny model."""
    assert 0 == plugin.main(["swift", "-o", str(tmp_path / "plugin.py")])

    def make(of: str, more: str, *, data: str = "", plugged: bool = True) -> list[str]:
        template = "qwen2_5" if of == "qwen2" else of
        given = f"--model {demo / 'models' / of} --model_type {of} --template {template} --max_length {LENGTH[of]} "
        given += f"--dataset {records / f'{data or of}.jsonl'} --output_dir {tmp_path / 'out'} {PLAIN} {more}"
        return given.split() + (["--external_plugins", str(tmp_path / "plugin.py")] if plugged else [])

    return make


@pytest.fixture
def train(server, tmp_path):
    """Return a function that trains a command on some ranks, and returns what each rank did."""

    def run(words: list[str], *, command: str = "sft", ranks: int = 1) -> list[dict]:
        if ranks == 1:
            started = [server.start(plugin_run.main, command, words, str(tmp_path), log=tmp_path / "rank0.log")]
        else:
            started = server.ranks(ranks, plugin_run.main, command, words, str(tmp_path), folder=tmp_path)
        assert [0] * ranks == finished(started)
        return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    return run


def schedule_of(rank: dict, of: str, **options) -> tuple[pp.Plan, pp.EpochSchedule]:
    """Return the plan of the rows that ms-swift has, and its schedule."""
    found = pp.plan([sum(map(len, row)) for row in rank["rows"]], LENGTH[of])
    return found, found.schedule(seed=42, **options)


def assert_planned(did: list[dict], found: pp.Plan, schedule: pp.EpochSchedule) -> None:
    """Each rank's microbatches are those of the schedule, with all sequences of their rows."""
    for rank, one in enumerate(did):
        steps = schedule.steps(rank=rank)
        planned = [
            (step.number, sorted(tokens for pack in batch for index in found.packs[pack] for tokens in one["rows"][index]))
            for step in steps
            for batch in step.batches
        ]
        assert planned == [(step, sorted(sequences)) for step, sequences in one["trained"]]


def losses(history: list[dict]) -> list[float]:
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tuner", ["full", "lora"])
@pytest.mark.parametrize("of", LENGTH)
def test_packs_and_losses_are_the_plan_s(of, tuner, ranks, words, train, server, tmp_path):  # noqa: PLR0917  # fixtures
    """On any ranks, every microbatch is the schedule's, and every step's loss that of `packplan sft`."""
    more = f"--tuner_type {tuner} --num_train_epochs 2 --save_strategy no --gradient_accumulation_steps {2 // ranks}"
    did = train(words(of, more), ranks=ranks)

    found, schedule = schedule_of(did[0], of, world_size=ranks, packs_per_step=2, epochs=2)
    assert_planned(did, found, schedule)
    assert (schedule.packs_per_epoch > len(found.packs)) == (ranks == 2), "a tail that is filled up"
    told = (tmp_path / "rank0.log").read_text()
    assert f"{schedule.total_steps} in all on {ranks} rank" in told
    assert found.checksum[:12] in told

    run, out = tmp_path / "run.yaml", tmp_path / "ours"
    run.write_text(run_text(convert_source(["swift", "sft", *words(of, more, plugged=False)]), output=str(run)))
    document = yaml.safe_load(run.read_text())
    document["training"] |= {"packing_min_fill_ratio": 0, "packing_balance": "none", "output_dir": str(out)}
    run.write_text(yaml.safe_dump(document))
    assert [0] * ranks == finished(server.ranks(ranks, plugin_run.ours, str(run), str(out), folder=out))
    expected = losses(rank_main.seen(out, ranks)[0]["history"])
    assert expected == pytest.approx(losses(did[0]["history"]), abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_both_halves_of_a_pair_are_in_one_pack(ranks, words, train):
    """And the first loss of DPO is that of a model that prefers neither."""
    did = train(words("qwen2", "--rlhf_type dpo --tuner_type lora --save_strategy no", data="pairs"), command="rlhf", ranks=ranks)

    found, schedule = schedule_of(did[0], "qwen2", world_size=ranks)
    assert_planned(did, found, schedule)
    assert losses(did[0]["history"])[0] == pytest.approx(math.log(2), abs=1e-5)


def test_texts_are_planned_too(words, train):
    """`swift pt`, whose rows are learned whole."""
    did = train(words("qwen2", "--tuner_type full --save_strategy no"), command="pt")

    assert_planned(did, *schedule_of(did[0], "qwen2"))

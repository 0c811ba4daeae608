"""Planned packs inside ms-swift's commands: packs, steps and losses, and resumed runs."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import packplan as pp
from packplan.adapters.swift.command import refuse_untested_version
from packplan.adapters.swift.packs import AddRowFacts, PlannedPacks
from packplan.adapters.swift.training import unpad_models
from packplan.app import plugin
from packplan.core.align import align_plan
from packplan.core.errors import ConfigError
from tests.e2e import plugin_run, rank_main
from tests.e2e.swift_plans import LENGTH, NUM, PLAIN, Ran
from tests.processes import Started, finished, is_whole, wait_for

# isort: split

pytestmark = pytest.mark.slow

ONE = "--save_strategy no --gradient_accumulation_steps 1 --num_train_epochs 1"


@pytest.fixture
def words(demo, records, tmp_path):
    """Return a function that gives the words of a command for a tiny model."""
    path = tmp_path / "plugin.py"
    assert 0 == plugin.main(["swift", "-o", str(path)])

    def make(of: str, more: str, *, data: str = "", plugins: tuple[Path, ...] = (path,)) -> list[str]:
        template = "qwen2_5" if of == "qwen2" else of
        given = f"--model {demo / 'models' / of} --model_type {of} --template {template} --max_length {LENGTH[of]} "
        given += f"--dataset {records / f'{data or of}.jsonl'} --output_dir {tmp_path / 'out'} {PLAIN} {more}"
        return [*given.split(), *(["--packing", "true", "--external_plugins", *map(str, plugins)] if plugins else [])]

    return make


Train = Callable[..., Ran]


@pytest.fixture
def start(server, tmp_path) -> Callable[..., tuple[Ran, list[Started]]]:
    """Return a function that starts a command on some ranks."""

    def begin(
        words: list[str], *, command: str = "sft", ranks: int = 1, name: str = "ran"
    ) -> tuple[Ran, list[Started]]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        if ranks > 1:
            return Ran(folder), server.ranks(ranks, plugin_run.main, command, words, str(folder), folder=folder)
        return Ran(folder), [server.start(plugin_run.main, command, words, str(folder), log=folder / "rank0.log")]

    return begin


@pytest.fixture
def train(start) -> Train:
    """Return a function that trains a command on some ranks."""

    def run(words: list[str], **options) -> Ran:
        ran, started = start(words, **options)
        assert [0] * len(started) == finished(started)
        return ran

    return run


@pytest.mark.parametrize(("of", "tuner", "ranks", "row_ranks"), [("qwen2", "full", 2, 1), ("qwen2_5_vl", "lora", 1, 2)])
def test_packs_and_losses_are_the_plan_s(of, tuner, ranks, row_ranks, words, train, server, records, tmp_path):  # noqa: PLR0917  # fixtures
    """
    Every microbatch is the schedule's; losses of steps and evaluations are `packplan sft`'s, also
    where two ranks share each row.
    """
    more = f"--tuner_type {tuner} --num_train_epochs 2 --save_strategy no --gradient_accumulation_steps {2 // ranks}"
    more += f" --val_dataset {records / f'{of}.jsonl'} --eval_strategy epoch"
    ran = train(words(of, f"{more} --sequence_parallel_size {row_ranks}"), ranks=ranks * row_ranks)

    found = ran.plan(LENGTH[of])
    schedule = found.schedule(world_size=ranks, packs_per_step=2, epochs=2, seed=42)
    ran.assert_planned(found, schedule)
    assert (schedule.packs_per_epoch > len(found.packs)) == (ranks == 2), "a tail that is filled up"
    named = {1: "packplan", 2: "packplan_rows"}  # the fastest one on a CPU
    assert named[row_ranks] == (ran.folder / "attention").read_text()
    told = (ran.folder / "rank0.log").read_text()
    assert f"{schedule.total_steps} in all on {ranks} {'rank' if row_ranks == 1 else 'group'}" in told
    assert found.checksum[:12] in told

    ours = losses(trained_by_us(words(of, f"{more} --packing true", plugins=()), server, tmp_path, ranks=ranks))
    assert [schedule.total_steps, 2] == [*map(len, ours.values())]
    for key, values in losses(ran.history).items():  # ms-swift evaluates once more at the end
        assert ours[key] == pytest.approx(values[: len(ours[key])], abs=1e-5)


def losses(history: list[dict]) -> dict[str, list[float]]:
    """Return the losses of steps and of evaluations."""
    return {key: [entry[key] for entry in history if key in entry] for key in ("loss", "eval_loss")}


@pytest.mark.parametrize(
    ("of", "tuner", "ranks", "row_ranks"),
    [("qwen2_5_vl", "lora", 1, 2), ("qwen2", "full", 2, 1)],
)
def test_both_halves_of_a_pair_are_in_one_pack(of, tuner, ranks, row_ranks, words, train):  # noqa: PLR0917  # fixtures
    """
    And DPO's losses are those of the pairs alone, padded, as ms-swift trains them, also where two
    ranks share each row.
    """
    data = f"{of}_pairs"
    more = f"--rlhf_type dpo --tuner_type {tuner} --num_train_epochs 3 --save_strategy no --packing_length 1024"
    own = f"{more} --gradient_accumulation_steps 8 --sequence_parallel_size {row_ranks}"
    ran = train(words(of, own, data=data), command="rlhf", ranks=ranks * row_ranks)

    found = ran.plan(1024)
    schedule = found.schedule(world_size=ranks, packs_per_step=8 * ranks, epochs=3, seed=42)
    assert 3 == schedule.total_steps, "all pairs in each step"
    assert max(map(len, found.packs)) > 2, "packs of several pairs"
    ran.assert_planned(found, schedule)
    if ranks == 1:
        alone = words(of, f"{more} --gradient_accumulation_steps {NUM}", data=data, plugins=())
        losses = train(alone, command="rlhf", name="alone").losses
        assert losses == pytest.approx(ran.losses, abs=1e-5)
        assert losses[-1] < math.log(2) - 1e-3, "it has learned"


def test_classifiers_learn_from_packs_as_from_samples(words, train, records):
    """Where packs have equally many samples: ms-swift averages the means of packs."""
    record = {"messages": [{"role": "user", "content": "is it blue?"}]}
    lines = [json.dumps(record | {"label": number % 3 % 2}) for number in range(12)]
    (records / "labels.jsonl").write_text("".join(f"{line}\n" for line in lines))
    more = "--tuner_type full --task_type seq_cls --num_labels 2 --num_train_epochs 3 --save_strategy no"
    ran = train(words("qwen2", f"{more} --gradient_accumulation_steps 4", data="labels"))
    alone = train(words("qwen2", f"{more} --gradient_accumulation_steps 12", data="labels", plugins=()), name="alone")

    found = ran.plan(LENGTH["qwen2"])
    assert {3} == set(map(len, found.packs))
    ran.assert_planned(found, found.schedule(packs_per_step=4, epochs=3, seed=42))
    assert alone.losses == pytest.approx(ran.losses, abs=1e-5)
    assert ran.losses[-1] < ran.losses[0]


SCRIPT = """
per_node=1
NPROC_PER_NODE=$per_node \\
swift sft \\
    --model {demo}/models/qwen2 --model_type qwen2 --template qwen2_5 \\
    --tuner_type full --dataset '{records}/qwen2.jsonl#20' --max_length 256 \\
    --per_device_train_batch_size 2 --learning_rate 1e-5 --warmup_ratio 0.05 \\
    --gradient_accumulation_steps $(expr 2 / $per_node) \\
    --eval_steps 200 --save_steps 200 --logging_steps 5 --save_only_model true --num_train_epochs 1 \\
    --output_dir output/run --padding_free true \\
    --torch_dtype float32 --fp16 false --bf16 false --use_cpu true --report_to none --check_model false \\
    --dataset_num_proc 1 --dataloader_num_workers 0
"""
"""`examples/train/padding_free/sft.sh` of ms-swift, without what needs a GPU."""


def test_a_script_of_ms_swift_s_examples_trains_packs_as_it_is(demo, records, tmp_path, server, start, monkeypatch):  # noqa: PLR0917  # fixtures
    """Planned before by the words that its shell makes, and trained by the plugin."""
    monkeypatch.chdir(tmp_path)
    text = "swift() { printf '%s\\n' \"$@\"; }\n" + SCRIPT.format(demo=demo, records=records)
    task, *words = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.split("\n")[
        :-1
    ]

    built = server.packplan("plan", "build", "swift", task, *words, env={"NPROC_PER_NODE": 1})
    assert 0 == built.wait(), built.said
    assert 0 == plugin.main(["swift", "-o", "plugin.py"])
    _, (trained,) = start([*words, "--external_plugins", "plugin.py"], command=task)
    assert 0 == trained.wait(), trained.said

    assert "planned packs replace --padding_free: --per_device_train_batch_size 2 counts packs" in trained.said
    told = r"\d+ steps? an epoch, \d+ in all on 1 rank|plan [0-9a-f]{12}"
    assert set(re.findall(told, built.printed + built.said)) == set(re.findall(told, trained.said)) != set()


@pytest.mark.parametrize("more", ["", "--truncation_strategy split --max_length 30 --packing_length 256"])
def test_texts_are_planned_too(more, words, train):
    """`swift pt`, whose rows are learned whole, or split into several."""
    ran = train(words("qwen2", f"--tuner_type full {ONE} {more}"), command="pt")

    found = ran.plan(LENGTH["qwen2"])
    ran.assert_planned(found, found.schedule(seed=42))
    assert (len(ran.rows()) > NUM) == bool(more)


def test_a_batch_may_hold_several_packs(words, train):
    """On two ranks; the last batch of an epoch has fewer."""
    ran = train(words("qwen2", f"--tuner_type full --per_device_train_batch_size 4 {ONE}"), ranks=2)

    found = ran.plan(LENGTH["qwen2"])
    aligned = align_plan(found.raw, world_size=2, batch_size=4)
    schedule = pp.EpochSchedule.from_plan(aligned, gradient_accumulation_steps=1, num_train_epochs=1, seed=42)
    rows = [[tokens for pack in batch for index in found.packs[pack] for tokens in ran.rows()[index]]
            for batch in schedule.batches(0, rank=0)]  # fmt: skip
    assert [(step, sorted(row)) for step, row in enumerate(rows, start=1)] == ran.trained(0)
    assert len({len(batch) for batch in schedule.batches(0, rank=0)}) == 2


@pytest.mark.parametrize(("of", "before", "after"), [("qwen2_5_vl", 1, 1), ("qwen2", 2, 1)])
def test_a_killed_run_goes_on_where_it_was(of, before, after, words, start, train, tmp_path):  # noqa: PLR0917  # fixtures
    """Also on other ranks. On as many, each loss is that of a run that was not killed."""
    more = (
        "--tuner_type full --num_train_epochs 4 --save_steps 3 --dataloader_num_workers 1 --gradient_accumulation_steps"
    )
    ran, started = start(words(of, f"{more} {2 // before}"), ranks=before)
    state = tmp_path / "out" / "checkpoint-3" / "trainer_state.json"
    wait_for(lambda: is_whole(state) or not started[0].process.is_alive(), "no checkpoint")
    for process in started:
        process.process.kill()
        process.process.join()
    rest = train(
        words(of, f"{more} {2 // after} --resume_from_checkpoint {state.parent}"), ranks=after, name="rest"
    )  # fmt: skip

    found = ran.plan(LENGTH[of])
    options = {"packs_per_step": 2, "epochs": 4, "seed": 42}
    whole = found.schedule(world_size=before, **options)
    rest.assert_planned(found, attrs.evolve(found.schedule(world_size=after, **options), start=whole.progress_at(3)))
    for rank in range(before):
        done = [one for one in ran.trained(rank) if one[0] <= 3]
        assert [one for one in ran.planned(found, whole, rank) if one[0] <= 3] == done
    if before == after:
        unbroken = train(words(of, f"{more} 2 --output_dir {tmp_path / 'unbroken'}"), name="unbroken")
        assert unbroken.losses == rest.losses


UNPLANNED = {
    "kto": (2, "--tuner_type full"),
    "rm": (1, "--tuner_type full"),
    "simpo": (1, "--tuner_type lora"),
    "gkd": (2, "--tuner_type lora --teacher_model {teacher} --teacher_model_type qwen2 --max_completion_length 4"),
    "grpo": (2, "--tuner_type full --reward_funcs codes --beta 0.04 --num_generations 2 --max_completion_length 4"),
    "ppo": (
        4,
        (
            "--tuner_type full --reward_model {judge} --reward_model_type qwen2 --max_completion_length 4 "
            "--num_ppo_epochs 1 --num_sample_generations 0 --num_train_epochs 0.4"
        ),
    ),
}
"""Types of `swift rlhf` that train their own batches -> number of models that run, arguments."""

_REWARD = """
from swift.rewards import ORM, orms


class Codes(ORM):
    def __call__(self, completions, **_):
        return [float(sum(map(ord, one)) % 17) for one in completions]


orms["codes"] = Codes
"""

_DIFFERING = ("time", "speed", "runtime", "per_second", "memory", "flos", "eps", "logits")
"""Parts of the names of logged values that differ: of time, and of means over padding too."""


@pytest.mark.parametrize(
    "kinds",
    [
        ("kto", "rm", "simpo", "ppo"),
        pytest.param(("gkd", "grpo"), marks=pytest.mark.skipif(not find_spec("msgspec"), reason="ms-swift imports it")),
    ],
)
def test_other_types_train_the_same_without_padding(kinds, words, demo, server, records, tmp_path):  # noqa: PLR0917  # fixtures
    """Each loss, gradient norm and reward that ms-swift logs is that of its own command."""
    question = {"role": "user", "content": "what is it?"}
    answers = ["blue circle " * (1 + 3 * number % 7) for number in range(8)]
    rows = [
        {"messages": [{**question, "content": f"is it {answer}?"}, {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    for number, row in enumerate(rows):
        row |= {"rejected_response": "red square " * (1 + number % 5), "label": number % 3 > 0}
    (records / "rlhf.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "codes.py").write_text(_REWARD)
    made = {
        "teacher": other_model(demo, tmp_path / "teacher"),
        "judge": other_model(demo, tmp_path / "judge", labels=1),
    }
    common = f"{ONE} --max_steps 2 --per_device_train_batch_size 4"
    commands = [
        words("qwen2", f"{common} --rlhf_type {kind} {UNPLANNED[kind][1].format(**made)}", data="rlhf", plugins=())
        for kind in kinds
    ]

    out, log = tmp_path / "logs.json", tmp_path / "log"
    plugins = [str(tmp_path / name) for name in ("codes.py", "plugin.py")]
    assert [0] == finished([server.start(plugin_run.both, commands, plugins, str(out), log=log)])
    for kind, (plain, plugged) in zip(kinds, json.loads(out.read_text()), strict=True):
        kept = [[{name: value for name, value in entry.items() if not any(part in name for part in _DIFFERING)}
                 for entry in entries] for entries in (plain, plugged)]  # fmt: skip
        assert len(kept[0]) == len(kept[1]) > 0, kind
        for due, found in zip(*kept, strict=True):
            assert found == pytest.approx(due, rel=2e-4, abs=1e-5, nan_ok=True), kind
    told = log.read_text()
    assert [UNPLANNED[kind][0] for kind in kinds] == [int(num) for num in re.findall(r"(\d) models? will", told)]
    real_of = re.findall(r"rank 0 computed ([\d,]+) of ([\d,]+) positions", told)
    assert len(kinds) == len(real_of)
    assert all(int(real.replace(",", "")) < int(padded.replace(",", "")) for real, padded in real_of)


def test_split_weights_are_refused_where_padding_is_left_out():
    """A model is asked with all of its weights."""
    with pytest.raises(ConfigError, match="--fsdp: splits the weights"):
        unpad_models(SimpleNamespace(), SimpleNamespace(is_fsdp_enabled=True))


def other_model(demo, folder: Path, *, labels: int = 0) -> Path:
    """Write a tiny model with other weights; with *labels*, one that gives rewards."""
    kind = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(demo / "models" / "qwen2", num_labels=labels or 2)
    shutil.copytree(demo / "models" / "qwen2", folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    kind.from_config(config).save_pretrained(folder)
    return folder


REFUSED = {
    "--streaming true --max_steps 3": "--streaming: gives no lengths before training",
    "--use_ray true": "--use_ray: starts processes",
    "--packing false": "--packing: is false",
}
"""Arguments -> the beginning of the message by which they are refused."""


def test_what_stands_against_a_plan_is_refused_by_flag(words, server, tmp_path):
    """Before a model is loaded or a row is read; several at once."""
    commands = [("sft", [*words("qwen2", f"--tuner_type full {ONE}"), *more.split()]) for more in REFUSED]
    commands.append(("sft", words("qwen2", f"--tuner_type full {ONE} --group_by_length true --use_ray true")))
    commands.append(("rlhf", words("qwen2", f"--rlhf_type kto {ONE}", data="qwen2_pairs")))
    both = "--packing false --sequence_parallel_size 2 --use_ray true"
    commands.append(("rlhf", [*words("qwen2", f"--rlhf_type kto {ONE}", data="qwen2_pairs"), *both.split()]))

    assert [0] == finished([
        server.start(plugin_run.refused, commands, str(tmp_path / "messages.json"), log=tmp_path / "log")
    ])  # fmt: skip
    *single, several, kind, own = json.loads((tmp_path / "messages.json").read_text())
    for says, message in zip(REFUSED.values(), single, strict=True):
        assert says in message
    assert "has 2 faults" in several
    assert "--rlhf_type: is kto" in kind
    assert "--use_ray: starts processes" in own
    assert "--sequence_parallel_size: lets ranks share rows" in own
    assert not (tmp_path / "out").exists()


def test_a_plan_other_than_the_planned_one_is_refused(words, server, tmp_path):
    """Whatever changed of the data or the arguments."""
    given = words("qwen2", f"--tuner_type full --max_length 100 --packing_length 300 {ONE} --packing true", plugins=())
    path = tmp_path / "planned.py"
    written = server.packplan("plugin", "swift", "-o", path, "swift", "sft", *given)
    assert 0 == written.wait(), written.said

    out, given = tmp_path / "messages.json", [*given, "--external_plugins", str(path)]
    commands = [("sft", given), ("sft", [*given, "--max_length", "90"])]
    (started,) = ran = [server.start(plugin_run.refused, commands, str(out), log=tmp_path / "log")]
    assert [0] == finished(ran)
    planned, changed = json.loads(out.read_text())
    assert not planned, "trained, without the rows that ms-swift leaves out"
    assert "ms-swift left out" in started.said
    assert re.search(r"the plan is \w{12}, but \w{12} was planned", changed)


def test_ranks_with_other_rows_are_refused(words, server, tmp_path):
    """All of them, before they train."""
    given = words("qwen2", f"--tuner_type full {ONE}")
    started = server.ranks(2, plugin_run.main, "sft", given, str(tmp_path), "fewer", folder=tmp_path)
    assert [1, 1] == [rank.wait() for rank in started]
    assert all("the ranks have different packs or rows" in rank.said for rank in started)
    assert not list(tmp_path.glob("trained*"))


def test_another_version_is_refused_unless_asked(tmp_path):
    """With both versions; the plugin that `--any-version` writes tries it."""
    with pytest.raises(ConfigError, match=r"ms-swift: 4\.7\.0 is not a version that .* \(4\.6\.0\)"):
        refuse_untested_version("4.7.0")

    assert 0 == plugin.main(["swift", "--any-version", "-o", str(tmp_path / "any.py")])
    assert "install(any_version=True)" in (tmp_path / "any.py").read_text()


def test_rows_that_ms_swift_leaves_out_are_counted(words, train, records, tmp_path):
    """And none is trained in their place."""
    given = words("qwen2", f"--tuner_type full --max_length 100 --packing_length 300 {ONE}")
    ran = train(given)

    left_out = NUM - len(ran.rows())
    assert 0 < left_out < NUM
    assert f"ms-swift left out {left_out} of {NUM} rows of training" in (ran.folder / "rank0.log").read_text()
    found = ran.plan(300)
    ran.assert_planned(found, found.schedule(seed=42))


def test_rows_that_give_nothing_to_train_are_refused(words, server, tmp_path):
    """With the reason, and no traceback; questions alone, whose answers were cut, too."""
    one = f"--tuner_type full {ONE}"
    commands = [
        ("sft", words("qwen2", f"{one} --max_length 20")),
        ("sft", words("qwen2", f"{one} --max_length 20 --truncation_strategy right")),
    ]
    out, log = tmp_path / "messages.json", tmp_path / "log"
    assert [0] == finished([server.start(plugin_run.refused, commands, str(out), log=log)])
    rows, answers = json.loads(out.read_text())
    assert rows.startswith("packplan: no row is left to train")
    assert answers.startswith(f"packplan: none of {NUM} samples has a supervised token")
    assert f"ms-swift left out {NUM} of {NUM} rows" in log.read_text()


def test_a_row_that_changes_is_no_other_row(words, server, tmp_path):
    """Training stops at a row that is not as it was measured, or cannot be encoded any more."""
    given = words("qwen2", f"--tuner_type full {ONE}")
    started = [
        server.start(plugin_run.changed, given, str(tmp_path / name), fault, log=tmp_path / name)
        for name, fault in [("longer.log", "longer"), ("gone.log", "gone")]
    ]
    longer, gone = [process.wait() for process in started]
    assert longer
    assert gone
    assert "sample 4 (row 4) is not the one that was planned: length planned" in (tmp_path / "longer.log").read_text()
    assert "row 4 of the data set was measured, but cannot be encoded now" in (tmp_path / "gone.log").read_text()


def test_losses_do_not_depend_on_the_ranks(words, train, records):
    """Of a step and of an evaluation, that ms-swift computes itself and multiplies by the ranks."""
    more = f"--tuner_type full --enable_dft_loss true --val_dataset {records / 'qwen2.jsonl'} --max_steps 1"
    more += " --eval_steps 1 --eval_strategy steps --save_strategy no --gradient_accumulation_steps"
    found = []
    for ranks in (1, 2):
        ran = train(words("qwen2", f"{more} {2 // ranks}"), ranks=ranks, name=f"ran{ranks}")
        found.append([*map(sum, losses(ran.history).values())])

    assert found[0] == pytest.approx(found[1], abs=1e-6)


def trained_by_us(given: list[str], server, tmp_path: Path, *, ranks: int) -> list[dict]:
    """Train the same packs by `packplan sft`, with what a command says, and return its log."""
    run, out = tmp_path / "run.yaml", tmp_path / "ours"
    said = {flag[2:]: value for flag, value in pairwise(given) if flag.startswith("--")}
    kept = said.keys() & {"tuner_type", "eval_strategy"}
    sees = said["model_type"].endswith("vl")  # what ms-swift then freezes
    document = {
        "model": {"model": said["model"], "model_type": said["model_type"], "torch_dtype": "float32"},
        "template": {"template": said["template"], "max_length": int(said["max_length"])},
        "custom": {"train_jsonl": said["dataset"], "val_jsonl": said.get("val_dataset")},
        "training": {
            **{name: yaml.safe_load(said[name]) for name in kept}, "output_dir": str(out),
            "num_train_epochs": float(said.get("num_train_epochs", 3)),
            "gradient_accumulation_steps": int(said["gradient_accumulation_steps"]), "learning_rate": 1e-3,
            "freeze_vit": sees, "freeze_aligner": sees, "lora_dropout": 0, "save_strategy": "no", "logging_steps": 1,
            "use_cpu": True, "report_to": [], "gradient_checkpointing": False, "packing_min_fill_ratio": 0,
            "packing_balance": "none",
        },
    }  # fmt: skip
    run.write_text(yaml.safe_dump(document))
    assert [0] * ranks == finished(server.ranks(ranks, plugin_run.ours, str(run), str(out), folder=out))
    return rank_main.seen(out, ranks)[0]["history"]


ENCODED = [
    {"input_ids": [1, 2, number], "labels": [-100, 2 * number, -100 * number], "lengths": [3]} for number in (0, 1)
]


def test_rows_are_known_by_what_they_teach():
    """Their encoded tokens and labels, which ms-swift drops; others have another digest."""

    def packs_of(encoded):
        template = SimpleNamespace(encode=lambda row, return_length: dict(encoded[row["number"]]), max_length=9)  # noqa: ARG005  # ms-swift's name
        rows = [AddRowFacts(template).preprocess({"number": number}) for number in range(len(encoded))]
        return PlannedPacks(template, Dataset.from_list(rows))

    found = packs_of(ENCODED)

    assert [2, 1] == found.facts.num_supervised.tolist()
    assert {"number", "lengths"} == set(found[0][0])
    assert found.facts.digest == packs_of(ENCODED).facts.digest
    assert found.facts.digest != packs_of(ENCODED[::-1]).facts.digest
    assert found.facts.digest != packs_of([ENCODED[0], ENCODED[1] | {"labels": [-100, 2, -99]}]).facts.digest

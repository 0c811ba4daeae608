"""Planned packs inside ms-swift's commands: packs, steps and losses, and resumed runs."""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import packplan as pp
from packplan.adapters.swift.command import refuse_untested_version
from packplan.adapters.swift.packs import PlannedPacks, RowFactsPreprocessor, take_bad_rows
from packplan.app import plugin
from packplan.core.align import align_plan
from packplan.core.errors import ConfigError
from tests.e2e import plugin_run, rank_main
from tests.e2e.plugin_run import LENGTH, NUM, PLAIN, Ran, write_records
from tests.e2e.ready import IN_CI, IS_CI
from tests.processes import finished
from tests.records import chat, write_lines

# isort: split

pytestmark = pytest.mark.slow

FULL = "--tuner_type full --save_strategy no"

ONE = f"{FULL} --gradient_accumulation_steps 1 --num_train_epochs 1"

EPOCHS = "--val_dataset {val} --eval_strategy epoch"

TWICE = f"--num_train_epochs 2 --save_steps 2 {EPOCHS}"

TOGETHER = "--gradient_accumulation_steps 2 --sequence_parallel_size 2"

RESUMED = "--tuner_type full --gradient_accumulation_steps 2 --dataloader_num_workers 1"

LAST = "--resume_from_checkpoint {{runs}}/{}/out/checkpoint-2"

DPO = "--rlhf_type dpo --num_train_epochs 3 --save_strategy no --packing_length 1024"

KTO = f"{FULL} --rlhf_type kto --num_train_epochs 3 --packing_length 4096"

LABELS = f"{FULL} --task_type seq_cls --num_labels 2 --num_train_epochs 3"

LONG = (
    "sft",
    "qwen2_5_vl",
    f"{EPOCHS} --packing_length 76 --gradient_accumulation_steps 64 --num_train_epochs 2 --save_strategy no",
)
"""All packs in one step, of which five are longer than the packing length."""

NOT_BY_DEGREE = {
    "dpo-by-degree": ("rlhf", "qwen2_pairs", f"{DPO} --tuner_type full", ["ConfigError", "--rlhf_type"]),
    "kto-by-degree": ("rlhf", "rlhf", KTO, ["ConfigError", "--rlhf_type"]),
    "rm-by-degree": ("rlhf", "qwen2_pairs", f"{ONE} --rlhf_type rm --packing false", ["ConfigError", "--rlhf_type"]),
    "labels-by-degree": ("sft", "labels", LABELS, ["ConfigError", "--task_type"]),
    "flags-by-degree": ("sft", "qwen2", f"{ONE} --enable_channel_loss true --per_device_train_batch_size 2 {TOGETHER}",
                        ["ConfigError", "--sequence_parallel_size", "--per_device_train_batch_size",
                         "--enable_channel_loss"]),
}  # fmt: skip
"""Run -> words, class and keys of the error, where long packs are to be shared."""

STOPPED = f"{TWICE} --tuner_type full --gradient_accumulation_steps 1"

STOPS = {
    "stopped": "",
    "stopped-resumed": "--resume_from_checkpoint {runs}/stopped/out/checkpoint-3",
    "stopped-damaged": "--resume_from_checkpoint {runs}/stopped-damaged/checkpoint-2",
    "ruined": "",
}
"""Run of `two-ranks` that gets SIGTERM in its third step, or whose weights are ruined -> words."""

ON_TWO_RANKS = {
    "two-ranks": ("sft", "qwen2", STOPPED),
    **{name: ("sft", "qwen2", f"{STOPPED} {more}") for name, more in STOPS.items()},
    "shared": ("sft", "qwen2_5_vl", f"{TWICE} {TOGETHER}"),
    "shared-resumed": ("sft", "qwen2_5_vl", f"{TWICE} {TOGETHER} {LAST.format('shared')}"),
    "pairs-shared": ("rlhf", "qwen2_5_vl_pairs", f"{DPO} --gradient_accumulation_steps 8 --sequence_parallel_size 2"),
    "labels-shared": ("sft", "labels", f"{LABELS} --gradient_accumulation_steps 4 --sequence_parallel_size 2"),
    "several": ("sft", "qwen2", f"{ONE} --per_device_train_batch_size 4"), "fewer": ("sft", "qwen2", ONE),
}  # fmt: skip
"""Run -> command, data, which name the model, and words."""

JUDGE = "--reward_model {runs}/judge --reward_model_type qwen2 --max_completion_length 4"

UNPLANNED = {
    "kto": (2, "--tuner_type full"), "rm": (1, "--tuner_type full"), "simpo": (1, "--tuner_type lora"),
    "ppo": (4, f"{JUDGE} --tuner_type full --num_ppo_epochs 1 --num_sample_generations 0 --num_train_epochs 0.4"),
}  # fmt: skip
"""Types of `swift rlhf` that train their own batches -> number of models that run, arguments."""

if find_spec("msgspec"):  # which ms-swift imports for these
    UNPLANNED |= {
        "gkd": (2, "--teacher_model {runs}/teacher --teacher_model_type qwen2 --max_completion_length 4"),
        "grpo": (2, "--tuner_type full --reward_funcs codes --beta 0.04 --num_generations 2 --max_completion_length 4"),
    }

OTHERS = {
    kind: ("rlhf", "rlhf", f"{ONE} --max_steps 2 --per_device_train_batch_size 4 --rlhf_type {kind} {words}")
    for kind, (_, words) in UNPLANNED.items()
}

ALONE = {
    "pairs-shared": ("rlhf", "qwen2_5_vl_pairs", f"{DPO} --gradient_accumulation_steps {NUM // 2 + 1}"),
    "pairs": ("rlhf", "qwen2_pairs", f"{DPO} --tuner_type full --gradient_accumulation_steps {NUM}"),
    "labels": ("sft", "labels", f"{LABELS} --gradient_accumulation_steps 12"),
    "kto-packs": ("rlhf", "rlhf", f"{KTO} --gradient_accumulation_steps 1 --per_device_train_batch_size 8"),
    **OTHERS,
}
"""The same without the plugin, of samples alone."""

REFUSED = {
    "several-flags": ("sft", "qwen2", f"{ONE} --streaming true --max_steps 3 --group_by_length true --use_ray true",
                      ["ConfigError", "--group_by_length", "--streaming", "--use_ray"]),
    "no-packs": ("sft", "qwen2", f"{ONE} --packing false", ["ConfigError", "--packing"]),
    "rm-packed": ("rlhf", "qwen2_pairs", f"{ONE} --rlhf_type rm", ["ConfigError", "--rlhf_type"]),
    "kto-shared": ("rlhf", "qwen2_pairs", f"{ONE} --rlhf_type kto --packing false --sequence_parallel_size 2",
                   ["ConfigError", "--sequence_parallel_size"]),
    "left-out": ("sft", "qwen2", f"{ONE} --max_length 100", ["DataSetError", ""]),
    "broken": ("sft", "broken", ONE, ["ConfigError", "--dataset"]),
    "no-label": ("sft", "qwen2", f"{ONE} --max_length 20 --truncation_strategy right", ["ArgumentError", "host"]),
    "not-finite": ("sft", "qwen2", f"{ONE} --tuner_type full --learning_rate 1e30", ["RunError", "not_finite"]),
    "unlike": ("sft", "qwen2", ONE, ["MismatchError", "unlike_alone"]),
    "longer": ("sft", "changed_vl", f"{ONE} --max_length 900", ["StaleError", "changed_row"]),
    "gone": ("sft", "changed_vl", f"{ONE} --max_length 900", ["DataSetError", ""]),
}  # fmt: skip
"""Run -> words, class and keys of the error; rows of some change after they were measured."""

PLUGGED = {
    "pairs": ("rlhf", "qwen2_pairs", f"{DPO} --tuner_type full --gradient_accumulation_steps 8"),
    "labels": ("sft", "labels", f"{LABELS} --gradient_accumulation_steps 4"),
    "kto-packs": ("rlhf", "rlhf", f"{KTO} --gradient_accumulation_steps 8"),
    "split": ("pt", "qwen2", f"{ONE} --truncation_strategy split --max_length 30 --packing_length 256"),
    "long-whole": LONG, "resumed": ("sft", "qwen2", f"{TWICE} {RESUMED} {LAST.format('two-ranks')}"), **OTHERS,
    **{name: words for name, (*words, _) in REFUSED.items()},
}  # fmt: skip

STORED = {
    "pairs-stored": PLUGGED["pairs"],
    "images-stored": ("sft", "qwen2_5_vl", f"{FULL} --gradient_accumulation_steps 3 {EPOCHS}"),
}
"""Runs whose lengths `plan build` stores before they train."""

OTHER_WORDS = ("--system", "Be brief.", "--max_steps", "1", "--max_length", "4000")
"""Words that make rows longer, so that stored lengths do not fit."""

SCRIPT = """
swift() {{ printf '%s\\n' "$@"; }}
per_node=1
NPROC_PER_NODE=$per_node \\
swift sft \\
    --model {demo}/models/qwen2 --model_type qwen2 --template qwen2_5 \\
    --tuner_type full --dataset '{runs}/qwen2.jsonl#20' --max_length 256 \\
    --per_device_train_batch_size 2 --learning_rate 1e-5 --warmup_ratio 0.05 \\
    --gradient_accumulation_steps $(expr 2 / $per_node) \\
    --eval_steps 200 --save_steps 200 --logging_steps 5 --save_only_model true --num_train_epochs 1 \\
    --output_dir {runs}/output --padding_free true \\
    --torch_dtype float32 --fp16 false --bf16 false --use_cpu true --report_to none --check_model false \\
    --dataset_num_proc 1 --dataloader_num_workers 0
"""
"""`examples/train/padding_free/sft.sh` of ms-swift, without what needs a GPU, as printed."""

REWARD = """
from swift.rewards import ORM, orms


class Codes(ORM):
    def __call__(self, completions, **_):
        return [float(sum(map(ord, one)) % 17) for one in completions]


orms["codes"] = Codes
"""


@pytest.fixture(scope="module")
def ran(demo, server, tmp_path_factory) -> Callable[[str], Ran]:
    """Run all commands, in few processes, and return what gives a run by its name."""
    runs = tmp_path_factory.mktemp("runs")
    write_records(runs, demo)
    write_others(runs, demo)
    few, most = ["--allow-left-out", "5"], ["--allow-left-out", "90"]
    assert 0 == plugin.main(["swift", *few, "-o", str(runs / "plugin.py")])
    assert 0 == plugin.main(["swift", "--sequence-parallel-size", "auto", "-o", str(runs / "shares.py")])

    def words(name: str, data: str, more: str, *plugins: str) -> list[str]:
        of = "qwen2_5_vl" if "_vl" in data else "qwen2"
        packing = "" if name in OTHERS or not plugins else "--packing true"
        loaded = " ".join(["--external_plugins", str(runs / "codes.py"), *(str(runs / name) for name in plugins)])
        given = f"--model {demo / 'models' / of} --model_type {of} --template {'qwen2_5' if of == 'qwen2' else of} "
        given += f"--max_length {LENGTH[of]} --dataset {{data}} --output_dir {runs / name / 'out'} {PLAIN} {packing} "
        files = {"data": runs / f"{data}.jsonl", "val": runs / f"{data}_val.jsonl"}
        return f"{given} {loaded} {more}".format(runs=runs, **files).split()

    def started(folder: str, table: dict, *plugins: str) -> list:
        return [
            (f"{folder}{name}", task, words(name, data, more, *plugins)) for name, (task, data, more) in table.items()
        ]

    written = words("planned", "qwen2", f"{ONE} --max_length 100 --packing_length 300 --packing true")
    trained = [*written, "--external_plugins", str(runs / "planned.py")]
    planned = [
        ("written", "plugin", ["swift", *most, "-o", str(runs / "planned.py"), "swift", "sft", *written]),
        ("planned", "sft", trained),
        ("replanned", "sft", [*trained, "--max_length", "90"]),
    ]
    kto = ["rlhf", *words("kto-built", *PLUGGED["kto-packs"][1:], "plugin.py")]
    text = SCRIPT.format(demo=demo, runs=runs)
    task, *given = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True).stdout.splitlines()
    script = [("built", "plan", ["build", "swift", task, *given]),
              ("script", task, [*given, "--external_plugins", str(runs / "plugin.py")]),
              ("kto-built", "plan", ["build", "swift", *kto])]  # fmt: skip
    for name, (task, data, more) in STORED.items():
        given = words(name, data, more, "plugin.py")
        script += [(f"{name}-built", "plan", ["build", "swift", task, *given]), (name, task, given),
                   (f"{name}-other", task, [*given, *OTHER_WORDS])]  # fmt: skip
    task, data, more = PLUGGED["resumed"]
    given = words("resumed-stored", data, more, "plugin.py")
    script += [("resumed-built", "plan", ["build", "swift", task, *given]), ("resumed-stored", task, given)]
    two = server.ranks(2, plugin_run.main, started("", ON_TWO_RANKS, "plugin.py"), str(runs), folder=runs)
    assert [0, 0] == finished(two)
    # On GPUs, accelerate does so.
    gloo = '\nimport deepspeed\n\ndeepspeed.init_distributed("gloo", auto_mpi_discovery=False)\n'
    (runs / "shares.py").write_text((runs / "shares.py").read_text() + gloo)
    stages = ("zero3", *["zero2"] * IS_CI)
    sharded = {f"long-{stage}": (*LONG[:2], f"{LONG[2]} --deepspeed {stage}") for stage in stages}
    sharing = {"long": LONG} | sharded | {name: words for name, (*words, _) in NOT_BY_DEGREE.items()}
    two = server.ranks(2, plugin_run.main, started("", sharing, "shares.py"), str(runs), folder=runs)
    start = partial(server.start, plugin_run.main)
    assert [0] * 3 == finished([*two, start(planned, str(runs), log=runs / "planned.log")])
    one = [*started("alone-", ALONE), *started("", PLUGGED, "plugin.py"), *script]
    assert [0] == finished([start(one, str(runs), log=runs / "one.log")])
    return lambda name: Ran(runs / name)


def write_others(runs: Path, demo: Path) -> None:
    """Write data of other tasks, models with other weights, and a function that gives rewards."""
    (runs / "codes.py").write_text(REWARD)
    model, images = demo / "models" / "qwen2", (demo / "data" / "images").glob("train_*")
    for name, kind, labels in [("teacher", AutoModelForCausalLM, 2), ("judge", AutoModelForSequenceClassification, 1)]:
        torch.manual_seed(7)
        shutil.copytree(model, runs / name, ignore=shutil.ignore_patterns("*.safetensors*"))
        kind.from_config(AutoConfig.from_pretrained(model, num_labels=labels)).save_pretrained(runs / name)
    asked = {"role": "user", "content": "is it blue?"}
    write_lines(runs / "labels.jsonl", [{"messages": [asked], "label": n % 3 % 2} for n in range(12)])
    rows = [
        chat({**asked, "content": f"is it {answer}?"}, {"role": "assistant", "content": answer},
             rejected_response="red square " * (1 + number % 5), label=number % 3 > 0)
        for number, answer in enumerate("blue circle " * (1 + 3 * number % 7) for number in range(8))
    ]  # fmt: skip
    write_lines(runs / "rlhf.jsonl", rows)
    seen = [{**asked, "content": "<image>?"}, {"role": "assistant", "content": "a dot"}]
    changed = [{"messages": rows[0]["messages"]}, chat(*seen, images=[shutil.copy(min(images), runs)])]
    write_lines(runs / "changed_vl.jsonl", changed)
    (runs / "broken.jsonl").write_text(f"{json.dumps(rows[0])}\n{{\n")


@pytest.mark.parametrize(("name", "of", "ranks"), [("two-ranks", "qwen2", 2), ("shared", "qwen2_5_vl", 1)])
def test_packs_and_losses_are_the_plan_s(name, of, ranks, ran, write_run, server, tmp_path):  # noqa: PLR0917  # fixtures
    """
    Every microbatch is the schedule's; losses of steps and evaluations are `packplan sft`'s, also
    where two ranks share each row.
    """
    run, data = ran(name), str(ran("").folder / of)

    found = run.plan(LENGTH[of])
    schedule = found.schedule(world_size=ranks, packs_per_step=2, epochs=2, seed=42)
    run.assert_planned(found, schedule)
    assert (schedule.packs_per_epoch > len(found.packs)) == (ranks == 2), "a tail that is filled up"
    named = {2: "packplan", 1: "packplan_rows"}  # the fastest one on a CPU
    assert named[ranks] == (run.folder / "attention").read_text()
    assert f"{schedule.total_steps} in all on {ranks} {'rank' if ranks > 1 else 'group'}" in run.said
    assert found.checksum[:12] in run.said

    frozen = dict.fromkeys(("freeze_vit", "freeze_aligner"), of.endswith("vl"))  # as ms-swift does by default
    keys = {
        "tuner_type": "lora" if of.endswith("vl") else "full", "eval_strategy": "epoch", "num_train_epochs": 2,
        "gradient_accumulation_steps": 2 // ranks, "learning_rate": 1e-3, "lora_dropout": 0, "use_cpu": True,
        "packing_min_fill_ratio": 0, "packing_balance": "none", **frozen,
    }  # fmt: skip
    path = write_run(
        of, model={"torch_dtype": "float32"}, template={"system": None, "max_length": LENGTH[of]},
        custom={"train_jsonl": f"{data}.jsonl", "val_jsonl": f"{data}_val.jsonl"}, training=keys,
    )  # fmt: skip
    assert [0] * ranks == finished(server.ranks(ranks, plugin_run.ours, str(path), str(tmp_path), folder=tmp_path))
    ours = losses(rank_main.seen(tmp_path, ranks)[0]["history"])
    assert [schedule.total_steps, 2] == [*map(len, ours.values())]
    assert not [name for entry in run.history for name in entry if "samples_per_second" in name]  # it would count packs
    for key, values in losses(run.history).items():  # ms-swift evaluates once more at the end
        assert ours[key] == pytest.approx(values[: len(ours[key])], abs=1e-5)


def losses(history: list[dict]) -> dict[str, list[float]]:
    """Return the losses of steps and of evaluations."""
    return {key: [entry[key] for entry in history if key in entry] for key in ("loss", "eval_loss")}


@pytest.mark.parametrize(
    ("name", "of", "before", "after"), [("shared-resumed", "qwen2_5_vl", 1, 1), ("resumed", "qwen2", 2, 1)]
)
def test_a_run_goes_on_where_it_was(name, of, before, after, ran):
    """Also on other ranks. On as many, each loss is that of the run that it goes on with."""
    whole, rest = ran("shared" if before == after else "two-ranks"), ran(name)

    found = whole.plan(LENGTH[of])
    options = {"packs_per_step": 2, "epochs": 2, "seed": 42}
    start = found.schedule(world_size=before, **options).progress_at(2)
    rest.assert_planned(found, attrs.evolve(found.schedule(world_size=after, **options), start=start))
    assert "packplan: training continues after step 2" in rest.said
    assert whole.losses[2] == pytest.approx(rest.losses[2], abs=1e-5)
    assert before != after or losses(whole.history) == losses(rest.history)


def test_sigterm_saves_a_checkpoint_from_which_the_run_goes_on(ran):
    """Of all ranks, though only one has got it; losses are those of a run that was not stopped."""
    whole, first, rest = ran("two-ranks"), ran("stopped"), ran("stopped-resumed")

    folder = first.folder / "out" / "checkpoint-3"
    said = f"SIGTERM: a checkpoint is saved at step 3 of {len(whole.losses)}; resume_from_checkpoint {folder} continues"
    assert said in " ".join(first.said.split())
    assert {143} == {json.loads((first.folder / f"error{rank}.json").read_text())[-1] for rank in range(2)}
    stopped = losses(json.loads((folder / "trainer_state.json").read_text())["log_history"])["loss"]
    assert "packplan: training continues after step 3" in rest.said
    assert 3 == len(stopped) < len(whole.losses)
    assert whole.losses[:3] == stopped
    assert whole.losses == rest.losses, "with those of the checkpoint's log"


def test_a_changed_byte_is_found_before_a_resume_loads_weights(ran):
    """On all ranks, by the name of the file."""
    damaged = ran("stopped-damaged")

    assert [["ArgumentError", "host"]] * 2 == [
        json.loads((damaged.folder / f"error{rank}.json").read_text()) for rank in range(2)
    ]
    said = "checkpoint-2 cannot be resumed from: its optimizer.pt is damaged, since its digest differs from the saved"
    assert said in " ".join(damaged.said.split())
    assert (ran("stopped-resumed").folder / "loaded0").exists()
    assert not (damaged.folder / "loaded0").exists()


def test_weights_that_are_nan_are_not_saved(ran):
    """On all ranks; the checkpoint before stays, and no folder is begun."""
    run = ran("ruined")

    assert [["RunError", "not_finite"]] * 2 == [
        json.loads((run.folder / f"error{rank}.json").read_text()) for rank in range(2)
    ]
    assert "of the trained weights after optimizer step 4" in " ".join(run.said.split())
    assert ["checkpoint-2"] == [path.name for path in (run.folder / "out").glob("checkpoint-*")]


def test_the_log_has_the_fill_and_tokens_of_each_step(ran):
    """In `logging.jsonl`, over both ranks; at an epoch's end, of all its packs."""
    run = ran("two-ranks")

    lines = [json.loads(line) for line in (run.folder / "out" / "logging.jsonl").read_text().splitlines()]
    logged, found = [line for line in lines if "loss" in line], run.plan(LENGTH["qwen2"])
    schedule = found.schedule(world_size=2, packs_per_step=2, epochs=2, seed=42)
    tokens = found.packs.loads(found.lengths)
    ranks = zip(*(schedule.steps(rank=rank) for rank in range(2)), strict=True)
    fills = [sum(int(tokens[pack]) for step in both for (pack,) in step.batches) / 512 for both in ranks]
    assert fills == pytest.approx([line["fill"] for line in logged])
    assert all(min(line["tokens_per_second"], line["work"], line["work_imbalance"]) > 0 for line in logged)
    assert 2 == len([line for line in lines if "epoch_fill_mean" in line])


@pytest.mark.parametrize("name", ["long", pytest.param("long-zero2", marks=IN_CI), "long-zero3"])
def test_long_packs_take_two_ranks_and_short_ones_a_rank_each(name, ran):
    """
    By an option of the plugin, with adapters, and images beside text: losses and evaluations are
    those of one rank with whole rows, also under ZeRO, and the table says what a rank computes.
    """
    run, whole = ran(name), ran("long-whole")
    assert ("zero" in name) == ((run.folder / "wrapper").read_text() == "DeepSpeedEngine")

    found = run.plan(76)
    schedule = found.schedule(world_size=2, packs_per_step=128, epochs=2, seed=42, degrees="auto")
    assert {1, 2} == set(schedule.pack_degrees(0).tolist())
    assert schedule.packs_per_epoch == schedule.num_epoch_slots(0), "no pack repeats"
    run.assert_planned(found, schedule)
    due = losses(whole.history)
    assert [2, 3] == [*map(len, due.values())], "ms-swift evaluates once more at the end"
    for key, values in losses(run.history).items():
        assert due[key] == pytest.approx(values, abs=1e-5)
    assert "16 slots an epoch; no rank computes more than 75 tokens at once" in run.said


@pytest.mark.parametrize(("name", "attention"), [("pairs-shared", "packplan_rows"), ("pairs", "packplan")])
def test_both_halves_of_a_pair_are_in_one_pack(name, attention, ran):
    """
    And DPO's losses are those of the pairs alone, padded, as ms-swift trains them, also where two
    ranks share each row.
    """
    run, alone = ran(name), ran(f"alone-{name}")
    assert attention == (run.folder / "attention").read_text(), "of the reference model, where there is one"

    found = run.plan(1024)
    schedule = found.schedule(packs_per_step=8, epochs=3, seed=42)
    assert 3 == schedule.total_steps, "all pairs in each step"
    assert max(map(len, found.packs)) > 2, "packs of several pairs"
    run.assert_planned(found, schedule)
    assert alone.losses == pytest.approx(run.losses, abs=1e-5)
    assert alone.losses[-1] < math.log(2) - 1e-3, "it has learned"


def test_a_run_that_began_without_stored_lengths_goes_on_without_them(ran):
    """Its checkpoint knows rows by their tokens, and stored lengths know them by their records."""
    run = ran("resumed-stored")

    assert "the checkpoint was trained with other lengths" in " ".join(run.said.split())
    assert ran("resumed").trained() == run.trained() != []


def test_rows_of_stored_lengths_teach_the_same(ran):
    """Losses of DPO are those of rows that ms-swift has measured."""
    assert ran("pairs-stored").trained() == ran("pairs").trained()
    assert ran("pairs-stored").losses == ran("pairs").losses


def test_kto_learns_from_a_pack_as_from_its_batch(ran):
    """Its loss compares the completions of a batch, also with those of other prompts."""
    run = ran("kto-packs")

    (pack,) = run.plan(4096).packs.tolist()
    assert 8 == len(pack)
    run.assert_planned(found := run.plan(4096), found.schedule(packs_per_step=1, epochs=3, seed=42))
    assert ran("alone-kto-packs").losses == pytest.approx(run.losses, abs=1e-5)
    assert set(re.findall(r"plan +([0-9a-f]{12})", ran("kto-built").said)) == {found.checksum[:12]}
    assert run.losses[-1] < run.losses[0] - 1e-3, "it has learned"


@pytest.mark.parametrize("name", ["labels", "labels-shared"])
def test_classifiers_learn_from_packs_as_from_samples(name, ran):
    """
    Where packs have equally many samples: ms-swift averages the means of packs, also where two
    ranks share each row.
    """
    run = ran(name)

    found = run.plan(LENGTH["qwen2"])
    assert {3} == set(map(len, found.packs))
    run.assert_planned(found, found.schedule(packs_per_step=4, epochs=3, seed=42))
    assert ran("alone-labels").losses == pytest.approx(run.losses, abs=1e-5)
    assert run.losses[-1] < run.losses[0]


def test_a_script_of_ms_swift_s_examples_trains_packs_as_it_is(ran):
    """Planned before by the words that its shell makes, and trained by the plugin."""
    trained = ran("script").said

    assert "planned packs replace --padding_free: --per_device_train_batch_size 2 counts packs" in trained
    told = r"\d+ steps? an epoch, \d+ in all on 1 rank|plan +[0-9a-f]{12}"
    built, trained = (
        {" ".join(one.split()) for one in re.findall(told, text)} for text in (ran("built").said, trained)
    )
    assert built == trained
    assert len(trained) == 2


@pytest.mark.parametrize("name", STORED)
def test_stored_lengths_are_taken_where_they_fit(name, ran):
    """
    The plan that `plan build` printed is trained, and no row is encoded before its step; under
    another system prompt, ms-swift measures all rows again.
    """
    run, other = ran(name), ran(f"{name}-other")

    trained, *_ = re.findall(r"plan +([0-9a-f]{12})", ran(f"{name}-built").said)
    assert [trained] == re.findall(r"plan +([0-9a-f]{12})", run.said)
    assert "no row is measured" in run.said
    assert not (run.folder / "encoded0").exists()
    assert run.trained() != []
    assert "all rows are measured again" in other.said
    assert "--system was" in other.said
    assert (other.folder / "encoded0").exists()


@pytest.mark.parametrize(("name", "length", "more"), [("split", 256, True), ("planned", 300, False)])
def test_rows_are_planned_as_ms_swift_gives_them(name, length, more, ran):
    """Texts of `swift pt` split into several; no row in the place of one that is left out."""
    run = ran(name)

    found, change = run.plan(length), len(run.rows()) - NUM
    run.assert_planned(found, found.schedule(seed=42))
    assert change
    assert more == (change > 0) == (f"warning: ms-swift leaves out {-change} of {NUM} rows of training" not in run.said)


def test_a_batch_may_hold_several_packs(ran):
    """On two ranks; the last batch of an epoch has fewer."""
    run = ran("several")

    found = run.plan(LENGTH["qwen2"])
    aligned = align_plan(found.raw, world_size=2, batch_size=4)
    schedule = pp.EpochSchedule.from_plan(aligned, gradient_accumulation_steps=1, num_train_epochs=1, seed=42)
    rows = [[tokens for pack in batch for index in found.packs[pack] for tokens in run.rows()[index]]
            for batch in schedule.batches(0, rank=0)]  # fmt: skip
    assert [(step, sorted(row)) for step, row in enumerate(rows, start=1)] == run.trained(0)
    assert len({len(batch) for batch in schedule.batches(0, rank=0)}) == 2


DIFFERING = ("time", "speed", "runtime", "per_second", "memory", "flos", "eps", "logits")
"""Parts of the names of logged values that differ: of time, and of means over padding too."""


@pytest.mark.parametrize("kind", UNPLANNED)
def test_other_types_train_the_same_without_padding(kind, ran):
    """Each loss, gradient norm and reward that ms-swift logs is that of its own command."""
    run = ran(kind)

    kept = [[{name: value for name, value in entry.items() if not any(part in name for part in DIFFERING)}
             for entry in one.history] for one in (ran(f"alone-{kind}"), run)]  # fmt: skip
    assert len(kept[0]) == len(kept[1]) > 0
    for due, found in zip(*kept, strict=True):
        assert found == pytest.approx(due, rel=2e-4, abs=1e-5, nan_ok=True)
    assert [str(UNPLANNED[kind][0])] == re.findall(r"(\d) models? will", run.said)
    ((real, padded),) = re.findall(r"rank 0 computed ([\d,]+) of ([\d,]+) positions", run.said)
    assert int(real.replace(",", "")) < int(padded.replace(",", ""))


@pytest.mark.parametrize("name", [*REFUSED, *NOT_BY_DEGREE, "fewer", "replanned"])
def test_what_cannot_be_trained_as_planned_is_refused(name, ran):
    """
    By flag, before a row is read; rows that are left out, a broken line, and rows that changed, on
    any rank, before they are trained; a pack whose samples see each other, before the first step.
    """
    changed = ["DataSetError", ""] if name == "replanned" else ["MismatchError", "ranks_disagree"]
    due = (REFUSED | NOT_BY_DEGREE).get(name, [changed])[-1]
    folder = ran(name).folder

    errors = [json.loads(path.read_text()) for path in folder.glob("error*.json")]
    assert [due] * (2 if name in {"fewer", *NOT_BY_DEGREE} else 1) == errors
    assert due[0] != "ConfigError" or not [*folder.glob("rows*")]
    said = {
        "replanned": "since --max_length was 100, now 90: run packplan plugin swift again",
        "left-out": "13 records: MaxLengthError: ",
    }
    assert said.get(name, "") in ran(name).said
    assert name in {"gone", "longer", "not-finite"} or not [*folder.glob("trained*")]


def test_another_version_is_refused(tmp_path):
    """Options of the plugin are written into it."""
    with pytest.raises(ConfigError, match=r"is 4\.7\.0, .* only with 4\.6\.0:"):
        refuse_untested_version("4.7.0")

    assert 0 == plugin.main(["swift", "--any-version", "--no-check", "-o", str(tmp_path / "any.py")])
    assert "install(any_version=True, check=False)" in (tmp_path / "any.py").read_text()


def test_at_most_so_many_ranks_share_a_pack(tmp_path, capsys):
    """A power of two, beside `auto`; the plugin says it."""
    most, auto = ["--max-sequence-parallel-size", "4"], ["--sequence-parallel-size", "auto"]
    assert 0 == plugin.main(["swift", *auto, *most, "-o", str(tmp_path / "four.py")])
    assert "install(degrees=4)" in (tmp_path / "four.py").read_text()

    for words in (most, [*auto, most[0], "3"]):
        assert 2 == plugin.main(["swift", *words, "-o", str(tmp_path / "refused.py")])
        assert "--max-sequence-parallel-size is" in capsys.readouterr().err
    assert not (tmp_path / "refused.py").exists()


ENCODED = [
    {"input_ids": [1, 2, number], "labels": [-100, 2 * number, -100 * number], "lengths": [3]} for number in (0, 1)
]


def test_rows_are_known_by_what_they_teach():
    """Their encoded tokens and labels, which ms-swift drops; others have another digest."""

    def packs_of(encoded):
        template = SimpleNamespace(encode=lambda row, return_length: dict(encoded[row["number"]]), max_length=9)  # noqa: ARG005  # ms-swift's name
        rows = [RowFactsPreprocessor(template).preprocess({"number": number}) for number in range(len(encoded))]
        return PlannedPacks(template, take_bad_rows(Dataset.from_list(rows))[0])

    found = packs_of(ENCODED)

    assert [2, 1] == found.facts.num_supervised.tolist()
    assert {"number", "lengths"} == set(found[0][0])
    assert found.facts.digest == packs_of(ENCODED).facts.digest
    assert found.facts.digest != packs_of(ENCODED[::-1]).facts.digest
    assert found.facts.digest != packs_of([ENCODED[0], ENCODED[1] | {"labels": [-100, 2, -99]}]).facts.digest

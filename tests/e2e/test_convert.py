"""
A converted run against ms-swift itself: the same settings, the same loss of the first step, the
same losses of samples in packs.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

from packplan.adapters.conversion.table import TABLE, stored_arguments
from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.trainer.loader import LENGTHS
from packplan.app import convert
from packplan.app.plan.stored import inspect_plan
from packplan.app.planning.deadline import Deadline
from packplan.app.planning.schedule import batch_of
from packplan.app.planning.split import plan_split
from packplan.app.sft.prepare import prepare
from packplan.app.wiring import stores
from packplan.app.wiring import training as wiring
from packplan.app.wiring.conversion import convert_source, run_text
from packplan.app.wiring.gather import gather
from packplan.core.conversion import DIFFERENT
from packplan.core.errors import ConfigError
from tests.e2e import swift_run
from tests.processes import finished
from tests.swift_commands import COMMANDS, YAML
from tools.configuration import arguments_table

NUM_RECORDS = 16
"""As many as the accumulation of the examples: the first step holds all of them, in any order."""

PLAIN = "--torch_dtype float32 --fp16 false --bf16 false --report_to none --gradient_checkpointing false \
--dataloader_num_workers 0 --max_length 512"

ALLOWED = {
    "output_dir": "ms-swift adds a version to it",
    "run_name": "it is named after output_dir",
    "logging_dir": "it is below output_dir",
    "logging_nan_inf_filter": "a loss that is no number is shown as it is",
    "disable_tqdm": "progress is shown on a terminal alone",
    "use_cpu": "it is set where there is no GPU",
    "dataloader_pin_memory": "it follows use_cpu",
    "accelerator_config": "this project's loaders dispatch nothing",
    "ddp_find_unused_parameters": "every batch uses every weight",
    "fsdp": "an empty list and nothing are the same",
    "tuner_backend": "it is of the model, which is made before",
    "check_model": "it asks a hub",
    "dataloader_prefetch_factor": "it is of workers",
    "warmup_steps": "the same number, as a whole one or not",
}
"""Settings that may differ from ms-swift's, and why."""


LOSSES = {
    "examples/train/tuners/lora/train.sh": "qwen2",
    "examples/train/full/train.sh": "qwen3",
    "examples/train/tuners/dora/train.sh": "qwen2",
    "examples/train/multimodal/ocr.sh": "qwen2_5_vl",
}
"""Example whose losses are compared -> model."""

SETTINGS = [
    ("examples/train/tuners/lora/train.sh", "qwen2", "--router_aux_loss_coef 1e-3 --enable_dft_loss true"),
    ("examples/train/full/train.sh", "qwen3", "--split_dataset_ratio 0.2"),
    ("examples/train/multimodal/ocr.sh", "qwen2_5_vl", "--vit_lr 1e-5"),
]
"""Examples whose settings are compared, their models, and what is said beside."""

ON_CPU = ["--use_cpu", "true", "--check_model", "false"]

THREE = "--learning_rate 1e-2 --logging_steps 1 --save_strategy no --max_steps 3"

STEPS = {
    "--tuner_type llamapro --llamapro_num_new_blocks 1": "qwen3",
    "--init_weights olora --lora_dropout 0": "qwen2",
    "--tuner_type full --enable_dft_loss true": "qwen2",
}
"""Arguments whose steps are compared -> model; none of them draws weights at random."""

SAVED = "examples/train/tuners/lora/train.sh"
"""Example whose arguments are saved."""


@pytest.fixture(scope="module")
def command(demo, tmp_path_factory):
    """
    Return a function that gives an example's words behind `swift sft`, for a tiny model and few
    records.
    """
    folder = tmp_path_factory.mktemp("command")

    def words(example: str, *, of: str, more: str = "") -> list[str]:
        script = COMMANDS[example].replace("\\\n", " ").partition("swift sft")[2]
        given: dict[str, list[str]] = {}
        for word in shlex.split(f"{script} {PLAIN} {more}"):
            if word.startswith("--"):
                values = given[word.replace("train_type", "tuner_type")] = []
            else:
                values.append(word)
        given |= {
            "--model": [str(demo / "models" / of)], "--model_type": ["qwen2_5_vl" if of.endswith("vl") else of],
            "--template": ["qwen2_5" if of == "qwen2" else of], "--dataset": [str(records(demo, folder, of))],
            "--output_dir": [str(folder / "swift")],
        }  # fmt: skip
        unread = ("--model_author", "--model_name")
        return [word for name in given if name not in unread for word in (name, *given[name])]

    return words


def records(demo: Path, folder: Path, of: str) -> Path:
    """Write records for a model, and return their file."""
    path = folder / f"{of}.jsonl"
    images = sorted((demo / "data" / "images").glob("train_*"), key=lambda image: image.stat().st_size)[:3]
    with path.open("w") as file:
        for number in range(NUM_RECORDS):
            answer = {"role": "assistant", "content": "blue circle " * (1 + number % 5)}
            record = {"messages": [{"role": "user", "content": f"what is {number}?"}, answer]}
            if of.endswith("vl") and number % 2:
                record["messages"][0]["content"] = f"<image>what is {number}?"
                record["images"] = [str(images[number % len(images)])]
            file.write(json.dumps(record) + "\n")
    return path


@pytest.fixture(scope="module")
def of_swift(server, command, tmp_path_factory):
    """
    Ask ms-swift, in one process, for all that is compared with it; return a function that waits for
    it to end, and gives the file of an answer.
    """
    folder = tmp_path_factory.mktemp("of_swift")
    one = ["--max_steps", "1", *ON_CPU, "--save_strategy", "no"]
    asked = [("settings", example, command(example, of=of, more=more)) for example, of, more in SETTINGS]
    asked += [("losses", example, [*command(example, of=of), *one]) for example, of in LOSSES.items()]
    asked.append(("save", SAVED, command(SAVED, of="qwen2")))
    asked += [("steps", name, [*command(SAVED, of=of, more=f"{THREE} {name}"), *ON_CPU]) for name, of in STEPS.items()]
    outs = {(name, example): folder / str(number) for number, (name, example, _) in enumerate(asked)}
    questions = [(name, words, str(outs[name, example])) for name, example, words in asked]
    started = server.start(swift_run.several, questions, log=folder / "swift.log",
                           env={"MODELSCOPE_CACHE": folder / "cache"})  # fmt: skip

    def answer(name: str, example: str) -> Path:
        assert [0] == finished([started])
        return outs[name, example]

    return answer


def converted(words: list[str], folder: Path, *, name: str = "run") -> Path:
    """Convert a command, and return the run's YAML."""
    path = folder / f"{name}.yaml"
    path.write_text(run_text(convert_source(["swift", "sft", *words]), output=str(path)))
    return path


UNPACKED = ["--packing", "false"]
"""Behind a command whose model and data are here: it keeps ms-swift's batches."""


def as_plain(value):
    """Return a setting as it is compared: by what it says, not by its type."""
    value = getattr(value, "value", value)
    return json.loads(json.dumps(value, default=lambda other: getattr(other, "value", str(other))))


@pytest.mark.parametrize(("example", "of", "more"), SETTINGS)
def test_settings_are_those_that_ms_swift_resolves(  # noqa: PLR0917  # fixtures
    of_swift, tmp_path, command, example, of, more
):
    """
    From the same command line, every training argument and what is frozen: but for those that have
    a reason.
    """
    words = command(example, of=of, more=more)
    config = stores.read_config(converted([*words, *UNPACKED], tmp_path))
    batch = batch_of(config, world_size=1)
    ours = wiring.open_arguments(config, batch.size, batch.accumulation)
    theirs = json.loads(of_swift("settings", example).read_text())

    differing = {
        name: (as_plain(getattr(ours, name, None)), value)
        for name, value in theirs["training"].items()
        if name not in ALLOWED and as_plain(getattr(ours, name, None)) != value
    }
    if not config.custom.val_jsonl:
        differing.pop("eval_steps", None)  # of no evaluation
    assert {} == differing
    assert theirs["own"]["max_length"] == config.packing_length
    assert theirs["own"]["loss_scale"] == config.template.loss_scale
    seen = of.endswith("vl")
    for part in ("freeze_llm", "freeze_vit", "freeze_aligner"):
        assert (theirs["own"][part] and seen) == getattr(config.training, part)
    names = {field.name for field in dataclasses.fields(ours)}
    assert names >= set(theirs["training"]) - {"logging_dir"}


@pytest.mark.parametrize("example", LOSSES)
def test_the_first_step_and_every_sample_have_ms_swift_s_loss(of_swift, tmp_path, command, example):
    """Packing off, the first step's, within 1e-5; in packs, each sample's."""
    words = command(example, of=LOSSES[example])
    path = converted([*words, "--packing", "true"], tmp_path)
    quick = ["training.max_steps=1", "training.logging_steps=1", "training.save_strategy=no"]

    off = converted([*words, *UNPACKED], tmp_path, name="off")
    unpacked = stores.read_config(off, [*quick, f"training.output_dir={tmp_path / 'off'}"])
    trained = prepare(unpacked, OneRank()).trainer
    trained.train()
    step = next(entry["loss"] for entry in trained.history if "loss" in entry)
    whole = "training.use_logits_to_keep=false"
    packed = stores.read_config(path, [*quick, whole, f"training.output_dir={tmp_path / 'on'}"])
    trainer = prepare(packed, OneRank()).trainer
    ours = losses_in_packs(trainer)

    theirs = json.loads(of_swift("losses", example).read_text())
    assert abs(theirs["step"] - step) < 1e-5
    assert NUM_RECORDS == len(theirs["alone"]) == len(ours)
    assert max(abs(loss - ours[key]) for key, loss in theirs["alone"].items()) < 1e-5


@pytest.mark.parametrize("more", STEPS)
def test_each_step_is_ms_swift_s(of_swift, tmp_path, command, more):
    """With the samples of its steps, so also what a step changes."""
    words = command(SAVED, of=STEPS[more], more=f"{THREE} {more}")
    config = stores.read_config(converted([*words, *UNPACKED], tmp_path), [f"training.output_dir={tmp_path / 'out'}"])
    trainer = prepare(config, OneRank()).trainer
    trainer.train()

    theirs = json.loads(of_swift("steps", more).read_text())
    ours = [entry["loss"] for entry in trainer.history if "loss" in entry]
    assert 3 == len(theirs) == len(set(theirs))
    assert theirs == pytest.approx(ours, abs=1e-5)


def losses_in_packs(trainer) -> dict[str, float]:
    """Return the mean loss of each sample of packs, by its tokens."""
    found = {}
    with torch.no_grad(), trainer.media_hook():
        model = trainer.model.eval()
        for inputs in trainer.get_eval_dataloader(trainer.train_dataset):
            logits, labels, _ = trainer.logits_and_labels(model, dict(inputs))
            start = 0
            for length in inputs[LENGTHS]:
                stop = start + length
                tokens = inputs["input_ids"][0, start:stop].tolist()
                rows, targets = logits[0, start : stop - 1].float(), labels[0, start + 1 : stop]
                loss = torch.nn.functional.cross_entropy(rows, targets, ignore_index=-100)
                found[",".join(map(str, tokens))] = float(loss)
                start = stop
    return found


def test_the_table_is_that_of_the_installed_ms_swift():
    """`make reference` writes it."""
    assert TABLE.read_text(encoding="utf-8") == arguments_table()
    assert len(stored_arguments() or ()) > 300


def test_the_commands_of_the_examples_convert_or_are_refused(tmp_path, monkeypatch, capsys):
    """Full, LoRA, many GPUs, DeepSpeed, images, tools, streams, Megatron: a line for each."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.chdir(tmp_path)
    outcomes = {}
    for number, (example, text) in enumerate([*COMMANDS.items(), *YAML.items()]):
        source = tmp_path / f"{number}{Path(example).suffix}"
        source.write_text(text)
        status = convert.main([str(source), "-o", f"run{number}.yaml", "--json"])
        printed = capsys.readouterr()
        if status:
            assert (2, True) == (status, "megatron sft trains with Megatron-LM" in printed.err)
            outcomes[example] = "refused"
            continue
        lines = json.loads(printed.out)["lines"]
        outcomes[example] = [line["argument"] for line in lines if line["verdict"] in DIFFERENT]
        given = text.count(" --") if source.suffix == ".sh" else len(yaml.safe_load(text))
        assert given == sum(line["argument"].startswith("--") for line in lines)
        strict = convert.main([str(source), "-o", f"strict{number}.yaml", "--strict"])
        assert (2 if outcomes[example] else 0) == strict
        assert bool(outcomes[example]) != (tmp_path / f"strict{number}.yaml").exists()
        capsys.readouterr()

    length, precision = "(default) max_length", "(default) bf16, fp16"
    assert {
        "examples/train/full/train.sh": [length, precision],
        "examples/train/tuners/lora/train.sh": [length, precision],
        "examples/train/tuners/dora/train.sh": [length, precision],
        "examples/train/multi-gpu/ddp/train.sh": [length],
        "examples/train/tuners/qlora/train.sh": [length, precision],
        "examples/train/streaming/streaming.sh": [length, precision],
        "examples/train/packing/llm.sh": [],
        "examples/train/packing/qwen2_5_vl.sh": [],
        "examples/train/multimodal/ocr.sh": ["--gradient_accumulation_steps 16", "CUDA_VISIBLE_DEVICES=0,1"],
        "examples/train/agent/qwen2_5.sh": [],
        "examples/train/agent/loss_scale/train.sh": [],
        "examples/train/full/dft.sh": [],
        "examples/yaml/deepspeed/sft.yaml": [],
        "examples/megatron/sft.sh": "refused",
    } == outcomes


def test_a_command_may_name_a_yaml_and_change_it(tmp_path, command):
    """Its own arguments come after those of the file, and the file's variables before its own."""
    words = command("examples/train/tuners/lora/train.sh", of="qwen2")
    model, data = (words[words.index(name) + 1] for name in ("--model", "--dataset"))
    path = tmp_path / "sft.yaml"
    head = f"model: {model}\nmodel_type: qwen2\ntemplate: qwen2_5\n"
    more = "packing: false\nseed: 1\nlora_rank: 4\nENV: {NPROC_PER_NODE: 2, A: 1}\n"
    path.write_text(f"{head}dataset: [{data}]\n{more}")

    made = convert_source([f"A=2 swift sft {path} --seed 7"])
    alone = convert_source([str(path)])

    assert {"seed": 7, "lora_rank": 4}.items() <= made.conversion.document["training"].items()
    assert {"seed": 1, "gradient_accumulation_steps": 8}.items() <= alone.conversion.document["training"].items()
    assert "A=2 torchrun --nproc-per-node 2 -m packplan.app.sft" == made.start
    assert "A=1 torchrun --nproc-per-node 2 -m packplan.app.sft" == alone.start


ACCELERATE = {
    "sharded.json": {
        "distributed_type": "FSDP", "num_machines": 1, "num_processes": 2, "mixed_precision": "no",
        "fsdp_config": {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": False,
            "fsdp_transformer_layer_cls_to_wrap": "Qwen2DecoderLayer", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": True, "fsdp_activation_checkpointing": True,
        },
    },
    "older.json": {
        "distributed_type": "FSDP", "num_machines": 1, "num_processes": 2, "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_min_num_params": 9, "fsdp_backward_prefetch": "BACKWARD_POST", "fsdp_forward_prefetch": True,
            "fsdp_use_orig_params": False, "fsdp_sync_module_states": True, "fsdp_offload_params": False,
            "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True,
        },
    },
}  # fmt: skip
"""File -> configuration of accelerate that shards weights."""


@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerate_would_shard_as_the_run_does(tmp_path, monkeypatch, name):
    """From its own variables, field by field."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils import dataclasses as accelerate_dataclasses
    from accelerate.utils.launch import prepare_multi_gpu_env

    from packplan.adapters.trainer.arguments import TrainingArguments

    monkeypatch.setattr(accelerate_dataclasses, "is_cuda_available", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    path = tmp_path / name
    path.write_text(json.dumps(ACCELERATE[name]))
    told, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(path), "x.py"]))
    made = convert_source([f"accelerate launch --config_file {path} swift/cli/sft.py --model m --dataset a.jsonl"])
    keys = made.conversion.document["training"]

    with monkeypatch.context() as patched:
        for variable, value in prepare_multi_gpu_env(told).items():
            if variable.startswith("FSDP_"):
                patched.setenv(variable, value)
        theirs = FullyShardedDataParallelPlugin()
    for variable in ("FSDP_CPU_RAM_EFFICIENT_LOADING", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.setenv(variable, "")  # the arguments set them, and this test ends with them as they were
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, check_model=False, report_to=[], gradient_accumulation_steps=1,
        gradient_checkpointing=False, fsdp=keys["fsdp"], fsdp_config=dict(keys["fsdp_config"]),
    )  # fmt: skip
    ours = FullyShardedDataParallelPlugin(**arguments.fsdp_plugin_args)

    fields = {field.name for field in dataclasses.fields(theirs)} - {"param_init_fn"}
    fields -= {"reshard_after_forward"} if theirs.fsdp_version == 1 else set()  # its sharding_strategy
    assert {name: str(getattr(theirs, name)) for name in fields} == {name: str(getattr(ours, name)) for name in fields}
    assert "torchrun --nproc-per-node 2 -m packplan.app.sft" == made.start
    assert not made.conversion.different or {"not supported"} == {line.verdict for line in made.conversion.different}


@pytest.mark.parametrize(
    ("script", "start", "keys"),
    [
        ("deepspeed --hostfile hosts swift/cli/sft.py", "torchrun --nproc-per-node 2 --nnodes 2 --master-addr a", {}),
        ("accelerate launch --config_file c.yaml swift/cli/sft.py", "torchrun --nproc-per-node 4", {}),
        ("CUDA_VISIBLE_DEVICES=4,5,6 swift sft", "CUDA_VISIBLE_DEVICES=4,5 torchrun --nproc-per-node 2",
         {"gradient_accumulation_steps": 8}),
        ("CUDA_VISIBLE_DEVICES=4,5,6 NPROC_PER_NODE=1 swift sft", "CUDA_VISIBLE_DEVICES=4,5,6 packplan sft",
         {"gradient_accumulation_steps": 16}),
        ("CUDA_VISIBLE_DEVICES=4,5 swift sft --gradient_accumulation_steps 3", "CUDA_VISIBLE_DEVICES=4 packplan sft",
         {"gradient_accumulation_steps": 3}),
        ("swift sft --gradient_accumulation_steps 4 --fsdp f.json", "packplan sft",
         {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}),
    ],
)  # fmt: skip
def test_files_beside_a_script_are_read(tmp_path, monkeypatch, script, start, keys):
    """Those of launchers and of FSDP, which say how many ranks there are, and how they share."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2 # the other\n")
    (tmp_path / "c.yaml").write_text("num_processes: 4\ndistributed_type: MULTI_GPU\n")
    (tmp_path / "f.json").write_text('{"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}')
    (tmp_path / "x.sh").write_text(f"{script} --model m --dataset a.jsonl")

    made = convert_source(["x.sh"])
    training = made.conversion.document["training"]

    assert made.start.removesuffix(" -m packplan.app.sft") == start
    assert keys == {key: training[key] for key in keys}
    devices = [line for line in made.conversion.lines if line.argument.startswith("CUDA_VISIBLE_DEVICES")]
    assert [line.verdict for line in devices] == (["changed"] if "CUDA" in script else [])
    program = script.split()[0]
    if program in {"deepspeed", "accelerate"}:
        assert [program] == [line.argument.split()[0] for line in made.conversion.lines if program in line.argument]


def test_data_that_the_script_exports_are_trained(tmp_path, monkeypatch):
    """In place of the cached ones, which are not read."""
    monkeypatch.chdir(tmp_path)
    export = (
        "swift export --model m --dataset a.jsonl --split_dataset_ratio 0.1 --to_cached_dataset true --output_dir c"
    )
    train = "swift sft --model m --cached_dataset c/train --cached_val_dataset c/val --max_length 8"
    (tmp_path / "x.sh").write_text(f"{export}\n{train}")
    (tmp_path / "y.sh").write_text(f"{export}\n{train} --dataset a.jsonl --cached_dataset d/train")

    made = convert_source(["x.sh"])

    assert {"dataset": ["a.jsonl"], "split_dataset_ratio": 0.1} == made.conversion.document["custom"]
    told = {line.argument.split()[0]: line.verdict for line in made.conversion.lines}
    assert ("not needed here", "not needed here") == (told["--cached_dataset"], told["--cached_val_dataset"])
    with pytest.raises(ConfigError, match="is given 2 times"):
        convert_source(["y.sh"])


def test_pretraining_encodes_plain_texts_as_ms_swift_does(demo, tmp_path):
    """Without a chat, and every token of them is trained."""
    from swift import get_model_processor, get_template

    model, text = demo / "models" / "qwen2", "blue circle on a red square"
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "assistant", "content": text}]}) + "\n")
    words = ["--model", str(model), "--model_type", "qwen2", "--template", "qwen2_5", "--dataset", str(data)]
    words += ["--fp16", "false", "--bf16", "false"]
    path = tmp_path / "run.yaml"
    path.write_text(run_text(convert_source(["swift", "pt", *words, "--packing", "true"]), output=str(path)))
    config = stores.read_config(path, [f"training.output_dir={tmp_path / 'out'}"])
    ours = prepare(config, OneRank()).trainer.train_dataset[0].samples[0]

    _, processor = get_model_processor(str(model), load_model=False, model_type="qwen2")
    template = get_template(processor, template_type="qwen2_5", use_chat_template=False, loss_scale="all")
    template.set_mode("train")
    theirs = template.encode({"messages": [{"role": "assistant", "content": text}]})

    assert theirs["input_ids"] == list(ours["input_ids"])
    assert theirs["labels"] == list(ours["labels"])
    assert template.tokenizer(text).input_ids == theirs["input_ids"][: len(template.tokenizer(text).input_ids)]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("x.sh", "deepspeed --hostfile gone swift/cli/sft.py --model m --dataset a", "the launcher reads its ranks"),
        ("x.json", "{", "is no valid JSON"),
        ("x.json", "[1]", "has to hold arguments and their values"),
        ("x.sh", "NPROC_PER_NODE=gpu swift sft --model m --dataset a", "NPROC_PER_NODE: is gpu, but has to be"),
        ("x.sh", "NPROC_PER_NODE=$(nproc) swift sft --model m --dataset a", "NPROC_PER_NODE: is computed by"),
        ("args.json", '{"swift_version": "4", "rlhf_type": "dpo"}', "is of swift rlhf"),
    ],
)
def test_files_that_are_no_commands_are_refused(tmp_path, name, text, says):
    """One message each, nothing executed, nothing written."""
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(ConfigError, match=re.escape(says)):
        convert_source([str(path)])

    assert [path] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gone.sh"], "is no file, and no command of ms-swift"),
        (["."], "is a folder without args.json"),
        (["swift", "sft", "gone.yaml"], "cannot be read"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path, monkeypatch, words, says):
    """A script, the arguments of a run, the file that a command names."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=says):
        convert_source(words)


@pytest.fixture
def scenes(demo, tmp_path):
    """Return a command over the demo's records, whose model is here."""
    return ["swift", "sft", "--model", str(demo / "models" / "qwen2_5_vl"), "--model_type", "qwen2_5_vl",
            "--template", "qwen2_5_vl", "--dataset", str(demo / "data" / "train.jsonl"), "--max_length", "1024",
            "--output_dir", str(tmp_path / "out"), "--fp16", "false", "--bf16", "false"]  # fmt: skip


def view_of(path, *overrides):
    """Plan a run, and return its plan of training in numbers."""
    config = stores.read_config(path, overrides)
    split = gather(config).splits["train"]
    plan_split(split, group=OneRank(), deadline=Deadline(0))
    return inspect_plan(config, "train", world_size=1)


def test_a_step_of_packs_holds_the_samples_of_ms_swift_s(scenes, tmp_path, capsys):
    """
    Where lengths can be measured, and where they are stored; both numbers of steps are told, and
    are those of the plans.
    """
    unsaid, plain, again = (tmp_path / f"{name}.yaml" for name in ("unsaid", "plain", "again"))
    assert 0 == convert.main(["-o", str(unsaid), "--", *scenes])
    said = capsys.readouterr().out
    assert 0 == convert.main(["-o", str(plain), "--", *scenes, *UNPACKED])
    packs, samples = view_of(unsaid), view_of(plain, f"training.output_dir={tmp_path / 'plain'}")
    Path(scenes[scenes.index("--dataset") + 1]).rename(tmp_path / "train.jsonl")
    capsys.readouterr()
    try:
        assert 0 == convert.main(["-o", str(again), "--", *scenes])
    finally:
        (tmp_path / "train.jsonl").rename(scenes[scenes.index("--dataset") + 1])

    told = re.search(r"a step ([\d.]+) where ms-swift's holds 16: (\d+) steps become (\d+)", said)
    assert told is not None
    per_step = packs.plan_summary.samples_per_pack * packs.schedule.gradient_accumulation_steps
    assert abs(float(told[1]) - per_step) < 0.051
    assert 16 * 2 / 3 <= per_step <= 16 * 4 / 3
    assert (samples.schedule.total_steps, packs.schedule.total_steps) == (int(told[2]), int(told[3]))
    assert packs.schedule.total_steps <= 1.5 * samples.schedule.total_steps
    assert told[0] in capsys.readouterr().out


def test_packs_that_nobody_asked_for_are_refused_strictly(scenes, tmp_path, capsys):
    """The report comes all the same; a command that says whether it packs has no such change."""
    path = tmp_path / "run.yaml"

    assert 2 == convert.main(["--strict", "-o", str(path), "--", *scenes])

    said = capsys.readouterr()
    assert "(this project) packing: training.packing: true" in said.err
    assert "--max_length 1024" in said.out
    assert not path.exists()
    assert 0 == convert.main(["--strict", "-o", str(path), "--", *scenes, *UNPACKED])


def test_a_step_that_no_packs_fill_stays_as_it_is(scenes):
    """One pack would hold more samples than it has."""
    made = convert_source([*scenes, "--gradient_accumulation_steps", "1"]).conversion

    assert (False, ()) == (made.document["training"]["packing"], made.different)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--cached_dataset c", "--cached_dataset c: name the data that it was made of in dataset"),
        ("--dataset a.jsonl --sequence_parallel_size 8", "--sequence_parallel_size 8: a step there holds 16 samples"),
        ("--dataset a.jsonl --lora_rank 0", "--lora_rank 0: is 0, but has to be at least 1"),
    ],
)
def test_the_report_is_printed_where_there_is_no_run(tmp_path, capsys, arguments, says):
    """With a line for each argument; what is refused is an argument of the command."""
    path = tmp_path / "run.yaml"
    words = ["swift", "sft", "--model", "m", "--max_length", "8", *arguments.split()]

    assert 2 == convert.main(["-o", str(path), "--", *words])
    said = capsys.readouterr()
    assert 2 == convert.main(["--json", "-o", str(path), "--", *words])

    assert says in said.err
    assert "1 fault:" in said.err
    assert "no run: " in said.out
    assert len(words[2:]) // 2 == len(re.findall(r"^\w.*  --", said.out, re.MULTILINE))
    assert json.loads(capsys.readouterr().out)["output"] is None
    assert not path.exists()


@pytest.mark.parametrize(
    ("model", "family"),
    [("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4"), ("Qwen/Qwen3-Omni-30B-A3B-Instruct", "qwen3_omni")],
)
def test_a_model_that_the_page_of_models_refuses_is_said_to_be(tmp_path, monkeypatch, model, family):
    """Also where it is not on this machine."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))

    lines = convert_source(["swift", "sft", "--model", model, "--dataset", "a.jsonl"]).conversion.lines

    packing = next(line for line in lines if line.argument == "(this project) packing")
    assert f"training.packing: false, training.packing_drop_last: false; {family} does not pack" in packing.reason


@pytest.mark.parametrize(
    ("given", "argument", "candidates"),
    [
        ("", "--model_type", ["qwen3", "qwen3_emb"]),
        ("--model_type qwen3", "--template", ["qwen3", "qwen3_nothinking"]),
    ],
)
def test_a_model_that_ms_swift_knows_as_several_names_them(demo, tmp_path, given, argument, candidates):
    """And the argument that chooses, before anything is written."""
    (tmp_path / "data.jsonl").write_text("{}")
    words = ["--model", str(demo / "models" / "qwen3"), "--dataset", str(tmp_path / "data.jsonl"), *given.split()]

    with pytest.raises(ConfigError) as error:
        convert_source(["swift", "sft", *words])

    (fault,) = error.value.faults
    assert (argument, True) == (fault.path, f"add {argument} and one of " in fault.reason)
    assert set(candidates) <= set(re.findall(r"\w+", fault.reason.partition("one of ")[2]))
    assert "not known" not in str(error.value)


def test_a_run_that_exists_is_not_written_over(tmp_path, monkeypatch, capsys, command):
    """Written again it is the same; anything else of that name is kept."""
    monkeypatch.chdir(tmp_path)
    words = ["--", "swift", "sft", *command("examples/train/tuners/lora/train.sh", of="qwen2")]
    assert 0 == convert.main(words)
    assert 0 == convert.main(words)
    (tmp_path / "run.yaml").write_text("mine")
    assert 2 == convert.main(words)

    said = capsys.readouterr()
    assert "run.yaml exists and holds something else" in said.err
    assert "start it with: packplan sft run.yaml" in said.out
    assert "mine" == (tmp_path / "run.yaml").read_text()


def test_an_old_run_s_args_json_converts(of_swift, command):
    """What ms-swift saved of its arguments gives the run that the command itself gives."""
    words = command(SAVED, of="qwen2")

    from_args = convert_source([str(of_swift("save", SAVED))]).conversion.document
    from_command = convert_source(["swift", "sft", *words]).conversion.document

    for key in ("learning_rate", "tuner_type", "gradient_accumulation_steps", "packing", "fp16", "bf16"):
        assert from_command["training"][key] == from_args["training"][key]
    assert from_command["template"]["max_length"] == from_args["template"]["max_length"]
    assert from_command["custom"] == from_args["custom"]

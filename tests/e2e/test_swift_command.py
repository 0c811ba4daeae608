"""A plan for ms-swift's command: its rows, lengths, packs and steps."""

import base64
import json
import re
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from datasets import Dataset, load_from_disk
from swift.pipelines import export_main
from swift.template.templates.qwen import Qwen2VLTemplate
from transformers import AutoTokenizer

from packplan.adapters.samples.data_set import FileRecords
from packplan.adapters.samples.dataset_rows import DatasetRowsFile
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.swift.command import open_pipeline, read_command
from packplan.adapters.swift.packs import PlannedPacks
from packplan.adapters.swift.plugin import _PlannedPipeline
from packplan.adapters.swift.training import make_schedule
from packplan.app import export, plugin
from packplan.app.opening.command_rows import take_stored_lengths
from packplan.app.opening.commands import resolve_command
from packplan.app.opening.stores import artefacts_folder
from packplan.app.plan.__main__ import main as plan
from packplan.app.planning.schedule import zero_stage
from packplan.core.errors import ConfigError, DataSetError
from tests.records import chat, write_lines

NUM_ROWS = 40

MAX_LENGTH, PACKING_LENGTH = 800, 200

LONGER = 3
"""Rows of more tokens than `MAX_LENGTH`, which ms-swift leaves out."""

TASKS = {
    "text": ("sft", "qwen2", ""),
    "images": ("sft", "qwen2_5_vl", ""),
    "pairs": ("rlhf", "qwen2", "--rlhf_type dpo"),
}
"""Kind of data -> command of ms-swift, model, and what the command says beside."""

OTHERS = {
    "labels": ("sft", "qwen2", "--task_type seq_cls --num_labels 2"),
    "embedding": ("sft", "qwen2", "--task_type embedding"),
}
"""The same for other tasks, whose rows are encoded in full."""

SCHEDULE = {
    "per_device_train_batch_size": 5, "gradient_accumulation_steps": 1, "num_train_epochs": 2, "seed": 7,
    "dataloader_drop_last": True,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _own_caches(tmp_path_factory):
    """Keep caches in the test."""
    variables = {"NPROC_PER_NODE": "2", "NNODES": "1", "MODELSCOPE_CACHE": str(tmp_path_factory.mktemp("modelscope"))}
    with pytest.MonkeyPatch.context() as patch:
        for name, text in variables.items():
            patch.setenv(name, text)
        yield


@pytest.fixture(scope="module")
def command(demo, tmp_path_factory):
    """Return a function that gives the words of a command, for a kind of data."""
    folder = tmp_path_factory.mktemp("commands")
    images = sorted((demo / "data" / "images").glob("train_*"))[:4]

    def write(kind: str, more: str = "", *, bad: bool = False) -> list[str]:
        (task, model, said), records = (TASKS | OTHERS)[kind], []
        for number in range(NUM_ROWS):
            words, asked, few = 1000 if number < LONGER else 1 + number % 9, f"what is {number}?", number % 3
            keys = {
                "text": {}, "images": {}, "pairs": {"rejected_response": "red square " * (2 + number % 5)},
                "labels": {"label": number % 2},
                "embedding": {"positive_messages": [[user("blue " * (1 + few))]],
                              "negative_messages": [[user(f"{number} red")]] * (number % 4)},
            }[kind]  # fmt: skip
            if kind == "images" and few:
                asked += "<image>" * few * (number % 2)  # without tags, ms-swift puts the images first
                is_bad = bad and number == NUM_ROWS - 2
                keys = {"images": ["absent.png" if is_bad else str(images[(number + one) % 4]) for one in range(few)]}
            answers = [] if kind in OTHERS else [{"role": "assistant", "content": "blue circle " * words}]
            records.append(chat(user(asked), *answers, **keys))
        name = f"{kind}{abs(hash((more, bad)))}"
        data = write_lines(folder / f"{name}.jsonl", records)
        schedule = " ".join(f"--{flag} {value}" for flag, value in SCHEDULE.items())
        return (
            f"swift {task} --model {demo / 'models' / model} --model_type {model} --dataset {data} {said} {schedule} "
            f"--template {'qwen2_5' if model == 'qwen2' else model} --packing true --max_length {MAX_LENGTH} "
            f"--packing_length {PACKING_LENGTH} --torch_dtype bfloat16 --output_dir {folder / name} {more}"
        ).split()

    return write


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def export_by_swift(words: list[str], to: Path, *more: str) -> Dataset:
    """Export the rows of a command by ms-swift itself, and return them with their lengths."""
    kept = ("--model", "--model_type", "--template", "--dataset", "--max_length", "--torch_dtype")
    return export_alone([word for flag in kept for word in (flag, value(words, flag))] + [*more], to)


def export_alone(asked: list[str], to: Path) -> Dataset:
    """The same for other words; ms-swift has other media tokens than the tiny model."""
    tokenizer = AutoTokenizer.from_pretrained(value(asked, "--model"))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("image", "video"):
            patch.setattr(Qwen2VLTemplate, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>"))
        export_main([*asked, "--to_cached_dataset", "true", "--output_dir", str(to)])
    return load_from_disk(to / "train")


@pytest.fixture
def run(capsys):
    """Return a function that runs a command of a plan, and returns what it prints."""

    def call(name: str, *words: str, status: int = 0):
        few = ["--allow-left-out", "10"]
        if name == "cached-dataset":
            assert status == export.main([*few, f"--{name}", *words])
        else:
            assert status == plan([name, *(few if name == "build" else ()), *words])
        return capsys.readouterr()

    return call


@pytest.mark.parametrize(("kind", "more"), [*((kind, "") for kind in TASKS), ("text", "--truncation_strategy left")])
def test_a_cached_data_set_is_ms_swift_s_and_its_packs_are_the_plan_s(command, tmp_path, run, kind, more):
    """Rows and lengths are `swift export`'s; the plugin's packs and steps `plan show` prints."""
    words, ours = command(kind, more), tmp_path / "ours"
    mode = "rlhf" if kind == "pairs" else "train"

    built = run("cached-dataset", str(ours), *words).err
    assert "in full" not in built, "as fast as a YAML"
    expected = export_by_swift(words, tmp_path / "theirs", "--template_mode", mode, *more.split())
    found = load_from_disk(ours)

    assert expected.features == found.features
    assert expected.to_list() == found.to_list()
    assert NUM_ROWS - (0 if more else LONGER) == len(found)
    assert {2 if kind == "pairs" else 1} == {len(lengths) for lengths in found["lengths"]}
    packs = PlannedPacks(SimpleNamespace(), expected, packing_length=PACKING_LENGTH).plan
    fixed = {"world_size": 2, "max_steps": -1, "train_dataloader_shuffle": True}
    schedule = make_schedule(packs, SimpleNamespace(**SCHEDULE, **fixed, data_seed=None), world_size=2)
    assert "in all on 2 ranks; " in built
    assert re.search(rf"^  plan +{packs.checksum[:12]}$", built, re.MULTILINE)
    shown = json.loads(run("show", "--json", *words).out)["splits"]["train"]
    assert len(packs.packs) == shown["plan"]["num_packs"] > 4
    assert packs.raw.fill == pytest.approx(shown["plan"]["fill_mean"], abs=1e-9)
    steps = (schedule.steps_per_epoch, schedule.total_steps)
    assert steps == (shown["schedule"]["steps_per_epoch"], shown["schedule"]["total_steps"])
    assert (kind == "images" or bool(more)) == bool(shown["plan"]["long_samples"])
    assert not re.search(r"(?:custom|model|template|training)\.[a-z]", "\n".join([built, *shown["warnings"]]))
    stale = json.loads(run("show", "--json", *words, "--norm_bbox", "none").out)["splits"]["train"]["warnings"]
    assert [[], ["a setting has changed: --norm_bbox was 'None', now 'none'"]] == [
        [line.partition("since ")[2] for line in lines if "would refuse" in line]
        for lines in (shown["warnings"], stale)
    ]


@pytest.mark.parametrize("kind", OTHERS)
def test_rows_of_other_tasks_are_as_long_as_ms_swift_says(command, tmp_path, kind, run):
    """All sequences of a row together; those of embeddings are exported by ms-swift alone."""
    words = command(kind)

    run("build", *words)
    task = ("--task_type", value(words, "--task_type"), "--num_labels", "2")
    expected = export_by_swift(words, tmp_path / "theirs", *task)["lengths"]
    lengths = DiskLengthStore(artefacts_folder(value(words, "--output_dir")) / "train").inspect()

    assert list(map(sum, expected)) == lengths.tokens.tolist()
    assert (kind == "embedding") == (len({len(row) for row in expected}) > 1)
    run("cached-dataset", str(tmp_path / "ours"), *words, status=2 if kind == "embedding" else 0)


def test_rows_of_every_shape_are_as_long_as_ms_swift_says(demo, tmp_path, monkeypatch, run):
    """Images by path, in texts and in Base64; tools, boxes, systems and untrained messages."""
    images = sorted((demo / "data" / "images").glob("train_*"))[:3]
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(demo / "data"))
    coded = base64.b64encode(images[0].read_bytes()).decode()
    answer = {"role": "assistant", "content": "a dot"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    shapes = {
        "base64": {"messages": [user("<image>a"), answer], "images": [f"data:image/png;base64,{coded}"]},
        "folder": {"messages": [user("<image>a"), answer], "images": [f"images/{images[1].name}"]},
        "parts": chat(user([{"type": "image", "image": str(images[2])}, {"type": "text", "text": "b"}]), answer),
        "tag": {"messages": [user(f"<img>{images[0]}</img>see"), answer]},
        "system": {"messages": [{"role": "system", "content": "Be brief."}, user("hi"), answer]},
        "untrained": {"messages": [user("hi"), {**answer, "loss": False}, user("and?"), answer]},
        "boxes": {
            "messages": [user("<image>find <ref-object>"), {**answer, "content": "<bbox>"}], "images": [str(images[0])],
            "objects": {"ref": ["dot"], "bbox": [[1, 2, 30, 40]]},
        },
        "tools": {
            "messages": [
                user("1?"), {"role": "tool_call", "content": json.dumps({"name": "f", "arguments": {}})},
                {"role": "tool_response", "content": "3"}, answer,
            ],
            "tools": [tool],
        },
        "alpaca": {"instruction": "Add.", "input": "1 2", "output": "3"},
    }  # fmt: skip
    for name, row in shapes.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    named = (
        f"--model {demo / 'models' / 'qwen2_5_vl'} --model_type qwen2_5_vl --template qwen2_5_vl --torch_dtype bfloat16"
    )
    asked = [*named.split(), "--max_length", "4000", "--dataset", *(str(tmp_path / f"{name}.jsonl") for name in shapes)]
    exported = [str(tmp_path / "ours"), *f"swift sft --packing true --output_dir {tmp_path / 'out'}".split(), *asked]

    assert "rows with boxes, videos, sound or <img> are encoded in full" in run("cached-dataset", *exported).err
    assert "--cached-dataset is" in run("cached-dataset", *exported, status=2).err, "a folder that exists"

    expected = export_alone(asked, tmp_path / "theirs")
    assert len(shapes) == len(expected)
    assert list(expected) == list(load_from_disk(tmp_path / "ours"))


def test_every_command_of_a_plan_takes_a_command_of_ms_swift(command, tmp_path, run, monkeypatch):
    """Its words, those of a launcher, and a YAML for ms-swift."""
    words, keys = command("pairs"), tmp_path / "dpo.yaml"
    named = {flag.lstrip("-"): value(words, flag) for flag in words if flag.startswith("--")}
    keys.write_text(json.dumps({**named, "ENV": {"NPROC_PER_NODE": 1, "NNODES": 2}}))

    built = run("build", *words).err
    monkeypatch.delenv("NPROC_PER_NODE")
    monkeypatch.delenv("NNODES")
    plain = words[2:]
    del plain[(at := plain.index("--packing")) : at + 2]
    launched = ["torchrun", "--nproc-per-node=2", "-m", "swift.cli.rlhf", *plain]
    again = run("build", "--world-size", "2", *launched).err
    of_keys = run("build", "swift", "rlhf", str(keys)).err
    assert {"passed": True, "findings": []} == json.loads(run("verify", "--samples", "3", "--json", *words).out)
    lengths = ["--max-length", f"{PACKING_LENGTH},400"]
    rows = json.loads(run("whatif", *lengths, "--json", *words).out)["alternatives"]
    opened, place = [], "packplan.app.opening.command_rows.open_pipeline"
    monkeypatch.setattr(place, lambda arguments: opened.append(1) or open_pipeline(arguments))
    shown = json.loads(run("show", "--sample", "5", "--text", "--json", *words).out)
    assert [1] == opened, "text and line are of one opening"
    moved = [*words, "--data_seed", "3"]  # by which ms-swift orders rows
    assert json.loads(run("show", "--sample", "5", "--json", *moved).out)["record"] is None
    line = int(shown["record"].partition(", line ")[2])
    asked = json.loads(Path(value(words, "--dataset")).read_text().splitlines()[line - 1])["messages"][0]["content"]
    assert asked in shown["text"][0]["text"]
    assert shown == json.loads(run("show", "--sample", "5", "--json", *words).out) | {"text": shown["text"]}
    assert 0 == plugin.main(["swift", "--allow-left-out", "8", "-o", str(tmp_path / "plugin.py"), *words])

    assert "on 2 ranks" in built
    assert "the stored plan is still valid, and is used again" in again
    assert [False, True] == ["lacks --packing true" in text for text in (built, again)]
    told = [[line for line in text.splitlines() if "steps an epoch" in line] for text in (built, again, of_keys)]
    assert told[0] == told[1] == told[2] != []
    assert "to train   the command with --packing true --external_plugins plugin.py" in again
    assert "to train   the command with --external_plugins plugin.py" in built
    assert [2, 2] == [row["world_size"] for row in rows]
    assert rows[0]["plan"]["num_packs"] > rows[1]["plan"]["num_packs"]
    (shown,) = re.findall(r"^  plan +(\w{12})$", built, re.MULTILINE)
    assert f"# Plan {shown}. " in (written := (tmp_path / "plugin.py").read_text())
    assert "install(checksum='" in written
    shares, shards = ["--sequence_parallel_size", "2"], ["--deepspeed", "zero2"]
    monkeypatch.setenv("NPROC_PER_NODE", "4")
    monkeypatch.setenv("NNODES", "1")
    assert 2 == resolve_command([*words, *shares]).count_ranks(), "ranks that share rows are one"
    sharded = resolve_command([*words, *shares, *shards], world_size=2)
    assert 2 == sharded.count_ranks()
    assert 2 == zero_stage(sharded.training.trainer["deepspeed"]), "by its name in ms-swift"
    with pytest.raises(ConfigError, match=r"--task_type .*--sequence_parallel_size"):
        resolve_command([*words, *shares, "--task_type", "embedding"], world_size=2)


def test_a_plugin_of_a_plan_counts_the_slots_of_shared_packs(command, tmp_path, capsys):
    """As in training; what cannot share packs is refused before anything is measured."""
    options = "--allow-left-out 8 --sequence-parallel-size auto --world-size 2 -o"
    sharing = ["swift", *options.split(), str(tmp_path / "plugin.py")]
    words = [*command("images"), "--per_device_train_batch_size", "1"]

    assert 0 == plugin.main([*sharing, *words])

    assert re.search(r"shared +.* on 2 ranks; \d+ slots an epoch; no rank computes more", capsys.readouterr().err)
    assert re.search(r"install\(degrees='auto', checksum='\w+'", (tmp_path / "plugin.py").read_text())
    four = ["--max-sequence-parallel-size", "4", *words]
    for refused, said in ((command("pairs"), "--rlhf_type is dpo"), (command("images"), "_batch_size is 5"),
                          (four, "power of two that divides the 2 ranks")):  # fmt: skip
        assert 2 == plugin.main([*sharing[:-1], str(tmp_path / "refused.py"), *refused])
        assert said in capsys.readouterr().err


def test_memory_is_traced_for_a_command(command, run):
    """On the packs of its plan, with its adapters; not for pairs, nor for several packs at once."""
    words = [*command("text"), "--per_device_train_batch_size", "1"]

    found = json.loads(run("fit", "--json", *words).out)
    refused = run("fit", *command("pairs"), status=2).err

    assert 2 == found["world_size"]
    peak = found["packs"][0]["peak"]
    assert 0 < peak["optimizer"] < peak["weights"], "of adapters alone"
    assert "has 2 faults" in refused
    assert "--per_device_train_batch_size is 5" in refused


def test_split_texts_are_planned_as_they_are_trained(command, run):
    """`swift pt` makes several rows of a long text, each of at most `--max_length`."""
    long = command("text", "--dataloader_drop_last false --max_length 9000 --packing_length 9000")[2:]
    whole = ["python", "-m", "swift.cli.pt", *long]  # one process, whatever variables say
    split = ["--truncation_strategy", "split", "--max_length", "50", "--packing_length", "100"]
    plans = []
    for words in (whole, [*elsewhere(whole), *split]):
        assert "on 1 rank" in run("build", *words).err
        run("verify", "--samples", "2", *words)
        plans.append(json.loads(run("show", "--json", *words).out)["splits"]["train"]["plan"])

    assert NUM_ROWS == plans[0]["num_samples"] < plans[1]["num_samples"] // 2
    assert plans[0]["num_tokens"] == plans[1]["num_tokens"]
    assert plans[1]["num_packs"] > plans[1]["num_tokens"] / 100
    assert 0 == plans[1]["long_samples"]


def test_rows_that_ms_swift_leaves_out_are_counted_and_named(command, run, capsys, tmp_path):
    """Rows that are too long, or whose image is absent; with --strict true the first one stops."""
    words = command("images", bad=True)

    left = run("build", *words).err
    assert 2 == plan(["build", *words]) == plugin.main(["swift", "-o", str(tmp_path / "plugin.py"), *words])
    refused = capsys.readouterr().err.split("error: ")[1:]
    assert f"4 of {NUM_ROWS} records cannot become samples and are left out: " in refused[0]
    assert "lists them. To leave them out, put --allow-left-out 10 after packplan plan build" in refused[0]
    assert refused[0].splitlines()[0] == refused[1].splitlines()[0]
    stopped = run("build", *elsewhere(words), "--strict", "true", status=2).err

    assert f"{LONGER + 1} of {NUM_ROWS} records" in left
    assert "MaxLengthError" in left
    assert "packplan plan show --all lists them" in " ".join(left.split())
    shown = " ".join(run("show", "--all", *words).out.split())
    assert ".jsonl, line 39: the image absent.png does not exist: relative paths start at ROOT_IMAGE_DIR" in shown
    assert ".jsonl, line " in stopped


def test_stored_lengths_are_those_of_the_rows_that_ms_swift_keeps(command, run):
    """In its order; of an evaluation without rows, ms-swift keeps none."""
    words = command("text")
    run("build", *words)
    pipeline = open_pipeline(read_command("sft", words[2:])[0])
    rows = pipeline.read_rows()["train"]

    (train, bad), evaluation = take_stored_lengths(pipeline, [rows, rows.select([])])

    assert (LONGER, (None, ())) == (len(bad), evaluation)
    kept = [row["messages"] for row in rows if len(row["messages"][1]["content"]) < MAX_LENGTH]
    assert NUM_ROWS - LONGER == len(kept)
    assert kept == train["messages"][:]
    assert [len(pipeline.template.encode(dict(row))["input_ids"]) for row in train] == train["lengths"][:]
    before, pipeline.args.dataset, pipeline.args.packing_length = *pipeline.args.dataset, ["b.jsonl"], 9
    changes = [f"custom.train_jsonl was {before!r}, now 'b.jsonl'", f"packing_length was {PACKING_LENGTH}, now 9"]
    assert changes == plugin.find_changes(pipeline)
    (Path(pipeline.args.packplan_output_dir) / "static_packing" / "train" / "raw_plan.json").write_text("{}")
    assert [] == plugin.find_changes(pipeline), "a damaged store does not hide which checksum differs"


def test_split_texts_are_located_by_their_row(tmp_path):
    """Since ms-swift shuffles rows before it splits them, even where it splits none."""
    file = str(write_lines(tmp_path / "a.jsonl", [{}, {}]))
    for row, where in (({"messages": []}, f"{file}, line 2"), ({"input_ids": [1]}, f"{file}, row 2")):
        rows = Dataset.from_list([row, row])
        assert where == str(DatasetRowsFile(rows, files=[file], sequences_per_row=1).location(1))


def test_a_row_changes_with_the_size_of_its_video(tmp_path):
    """Its path alone would not tell; rows without a video, or with one elsewhere, stay."""
    (video := tmp_path / "a.mp4").write_bytes(b"before")
    rows = [{"videos": [str(video)]}, {"videos": [[str(video)]]}, {"videos": ["https://host/a.mp4"]}, {"videos": None}]

    def digests() -> list[str]:
        records = FileRecords(
            [DatasetRowsFile(Dataset.from_list([row]), files=["rows"], sequences_per_row=1) for row in rows]
        )
        return [records.record_digest(index) for index in range(len(rows))]

    before = digests()
    video.write_bytes(b"after that")

    assert [False, False, True, True] == [one == other for one, other in zip(before, digests(), strict=True)]


def elsewhere(words: list[str]) -> list[str]:
    """Return the words of a command that stores its plan elsewhere."""
    return [*words, "--output_dir", f"{value(words, '--output_dir')}-other"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.sh", "is a script"),
        ("swift infer --model m", "swift infer "),
        ("python train.py --model m", "python "),
        ("torchrun --nproc_per_node 2 -m swift.cli.sft {given}", "torchrun "),
        ("{text} --streaming true --max_steps 4", "--streaming "),
        ("swift rlhf {given} --rlhf_type orpo", "--rlhf_type is orpo, whose rows are not packed: leave --packing"),
        ("swift rlhf {given} --rlhf_type gkd --teacher_model m --deepspeed zero3", "is gkd, which generates answers"),
        ("swift sft --max_lenght 7", "--max_lenght is not an argument of ms-swift: write --max_length, or"),
        ("swift sft --no-dataset-shufle", "write --no_dataset_shuffle, or"),
        ("{text} --dataset absent.jsonl#9", "--dataset is absent.jsonl#9, which does not exist"),
        ("{text} --dataset ~nobody/a.jsonl", "--dataset is ~nobody/a.jsonl, which does not exist"),
        ("{text} --cached_dataset /absent", "--cached_dataset is /absent, which does not exist"),
        ("{text} --tuner_type full --max_length many", "ms-swift "),
    ],
)
def test_a_command_that_cannot_be_planned_is_refused_by_what_is_wrong(command, run, line, said):
    words = command("text")

    assert said in run("build", *line.format(given=" ".join(words[2:]), text=" ".join(words)).split(), status=2).err


def test_the_percentage_of_rows_to_leave_out_may_be_left_out():
    """Of 100 rows, as the written plugin names it: 29 / 100 * 100 is less than 29 in floats."""
    for number in range(1, 100):
        steps = _PlannedPipeline(None, True, 1, number / 100, None, None, print, print, print)  # noqa: FBT003
        left_out = (SimpleNamespace(packing=True, max_length=9), "training", number, 100, [])

        steps._report_left_out(*left_out)
        with pytest.raises(DataSetError, match=f"--allow-left-out {number} to"):
            attrs.evolve(steps, max_left_out=number / 100 - 0.001)._report_left_out(*left_out)


def test_flags_and_names_that_ms_swift_accepts_are_not_refused(command, tmp_path):
    names = (f"{tmp_path}:part#9", f"{tmp_path}#9", f"{'a' * 300}", "owner/data.json", "https://host/a.jsonl")
    flags = ("--no-dataset-shuffle", "--no-gradient-checkpointing", "--system", "--- rules ---\n=")

    assert resolve_command([*command("text"), *flags, "--dataset", *names]).custom.train_jsonl == names

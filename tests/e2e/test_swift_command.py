"""A plan for ms-swift's command: its rows, lengths, packs and steps."""

import base64
import json
from types import SimpleNamespace

import pytest
from datasets import Dataset, load_from_disk
from swift.pipelines import export_main
from swift.pipelines.utils import get_cached_dataset
from swift.template.templates.qwen import Qwen2VLTemplate
from transformers import AutoTokenizer

from packplan.adapters.samples import media_lengths
from packplan.adapters.stores.lengths import DiskLengthStore
from packplan.adapters.swift.packs import PlannedPacks
from packplan.adapters.swift.training import make_schedule
from packplan.app import export, plugin
from packplan.app.plan.__main__ import main as plan
from packplan.app.wiring import commands
from packplan.app.wiring.stores import artefacts_folder

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


@pytest.fixture(autouse=True)
def _own_caches(tmp_path_factory, monkeypatch, demo):
    """Keep caches in the test, and map rows here: a fork would wait for others' threads."""
    mapped = Dataset.map
    here = lambda rows, *args, **options: mapped(rows, *args, **(options | {"num_proc": None}))  # noqa: E731
    monkeypatch.setattr(Dataset, "map", here)
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path_factory.getbasetemp() / "modelscope"))
    tokenizer = AutoTokenizer.from_pretrained(demo / "models" / "qwen2_5_vl")
    monkeypatch.setattr(Qwen2VLTemplate, "image_token_id", tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    monkeypatch.setattr(Qwen2VLTemplate, "video_token_id", tokenizer.convert_tokens_to_ids("<|video_pad|>"))


@pytest.fixture(scope="module")
def command(demo, tmp_path_factory):
    """Return a function that gives the words of a command, for a kind of data."""
    folder = tmp_path_factory.mktemp("commands")
    images = sorted((demo / "data" / "images").glob("train_*"))[:4]

    def write(kind: str, more: str = "", *, bad: bool = False) -> list[str]:
        task, model, said = (TASKS | OTHERS)[kind]
        lines = []
        for number in range(NUM_ROWS):
            question = {"role": "user", "content": f"what is {number}?"}
            words = 1000 if number < LONGER else 1 + number % 9
            record = {"messages": [question, {"role": "assistant", "content": "blue circle " * words}]}
            if kind == "images" and number % 3:
                # Without tags, ms-swift puts the images first.
                question["content"] += "<image>" * (number % 3) * (number % 2)
                record["images"] = [str(images[(number + one) % 4]) for one in range(number % 3)]
                if bad and number == NUM_ROWS - 2:
                    record["images"] = ["absent.png"] * (number % 3)
            if kind == "pairs":
                record["rejected_response"] = "red square " * (2 + number % 5)
            if kind == "labels":
                record = {"messages": [question], "label": number % 2}
            if kind == "embedding":
                like = [[{"role": "user", "content": "blue " * (1 + number % 3)}]]
                unlike = [[{"role": "user", "content": f"{number} red"}]] * (number % 4)
                record = {"messages": [question], "positive_messages": like, "negative_messages": unlike}
            lines.append(json.dumps(record))
        name = f"{kind}{abs(hash((more, bad)))}"
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(lines))
        chosen = f"--model {demo / 'models' / model} --model_type {model} --template "
        chosen += "qwen2_5" if model == "qwen2" else model
        schedule = " ".join(f"--{flag} {value}" for flag, value in SCHEDULE.items())
        said = (
            f"swift {task} {chosen} --dataset {data} {said} {schedule} --packing true --max_length {MAX_LENGTH} "
            f"--packing_length {PACKING_LENGTH} --torch_dtype bfloat16 --output_dir {folder / name} {more}"
        )
        return said.split()

    return write


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.mark.parametrize(("kind", "more"), [*((kind, "") for kind in TASKS), ("text", "--truncation_strategy left")])
def test_a_cached_data_set_is_ms_swift_s_and_its_packs_are_the_plan_s(command, tmp_path, capsys, kind, more):
    """Rows and lengths are `swift export`'s; the plugin's packs and steps `plan show` prints."""
    words, ours, theirs = command(kind, more), tmp_path / "ours", tmp_path / "theirs"
    kept = ("--model", "--model_type", "--template", "--dataset", "--max_length", "--torch_dtype")
    asked = [*(word for flag in kept for word in (flag, value(words, flag))), *more.split()]
    mode = "rlhf" if kind == "pairs" else "train"

    assert 0 == export.main(["--cached-dataset", str(ours), *words])
    built = capsys.readouterr().err
    export_main([*asked, "--to_cached_dataset", "true", "--template_mode", mode, "--output_dir", str(theirs)])
    read = SimpleNamespace(
        data_seed=7, cached_dataset=[str(ours), str(theirs / "train")], cached_val_dataset=[], max_length=MAX_LENGTH,
        truncation_strategy=None, dataset_shuffle=True,
    )  # fmt: skip
    (found, expected), _ = get_cached_dataset(read)

    assert expected.features == found.features
    assert expected.to_list() == found.to_list()
    assert NUM_ROWS - (0 if more else LONGER) == len(found)
    assert {2 if kind == "pairs" else 1} == {len(lengths) for lengths in found["lengths"]}
    packs = PlannedPacks(SimpleNamespace(), expected, packing_length=PACKING_LENGTH).plan
    fixed = {"world_size": 2, "max_steps": -1, "train_dataloader_shuffle": True}
    schedule = make_schedule(packs, SimpleNamespace(**SCHEDULE, **fixed, data_seed=None), world_size=2)
    assert f"in all on 2 ranks; plan {packs.checksum[:12]}" in built
    assert 0 == plan(["show", "--json", *words])
    shown = json.loads(capsys.readouterr().out)["splits"]["train"]
    assert len(packs.packs) == shown["plan"]["num_packs"] > 4
    assert packs.raw.fill == pytest.approx(shown["plan"]["fill_mean"], abs=1e-9)
    steps = (schedule.steps_per_epoch, schedule.total_steps)
    assert steps == (shown["schedule"]["steps_per_epoch"], shown["schedule"]["total_steps"])
    assert (kind == "images" or bool(more)) == bool(shown["plan"]["long_samples"])


@pytest.mark.parametrize("kind", OTHERS)
def test_rows_of_other_tasks_are_as_long_as_ms_swift_says(command, tmp_path, kind, capsys):
    """All sequences of a row together; those of embeddings are exported by ms-swift alone."""
    words, theirs = command(kind), tmp_path / "theirs"
    kept = ("--model", "--model_type", "--template", "--dataset", "--max_length", "--torch_dtype", "--task_type")
    asked = [word for flag in kept for word in (flag, value(words, flag))]

    assert 0 == plan(["build", *words])
    export_main([*asked, "--num_labels", "2", "--to_cached_dataset", "true", "--output_dir", str(theirs)])
    lengths = DiskLengthStore(artefacts_folder(value(words, "--output_dir")) / "train").inspect()
    expected = load_from_disk(theirs / "train")["lengths"]

    assert list(map(sum, expected)) == lengths.tokens.tolist()
    assert (kind == "embedding") == (len({len(row) for row in expected}) > 1)
    assert (2 if kind == "embedding" else 0) == export.main(["--cached-dataset", str(tmp_path / "ours"), *words])
    capsys.readouterr()


def test_a_folder_that_exists_is_not_written(command, tmp_path, capsys):
    """Nothing is measured before; nor for a run of this project."""
    (tmp_path / "run.yaml").write_text("model: {model: absent}")

    assert 2 == export.main(["--cached-dataset", str(tmp_path), *command("text")])
    assert "--cached-dataset: is" in capsys.readouterr().err
    assert 2 == export.main([str(tmp_path / "run.yaml"), "--cached-dataset", str(tmp_path / "new")])


def test_rows_of_every_shape_are_as_long_as_ms_swift_says(demo, tmp_path, monkeypatch, capsys):
    """Images by path, in texts and in Base64; tools, boxes, systems and untrained messages."""
    images = sorted((demo / "data" / "images").glob("train_*"))[:3]
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(demo / "data"))
    coded = base64.b64encode(images[0].read_bytes()).decode()
    answer = {"role": "assistant", "content": "a dot"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    shapes = {
        "base64": {"messages": [user("<image>a"), answer], "images": [f"data:image/png;base64,{coded}"]},
        "folder": {"messages": [user("<image>a"), answer], "images": [f"images/{images[1].name}"]},
        "parts": {
            "messages": [user([{"type": "image", "image": str(images[2])}, {"type": "text", "text": "b"}]), answer]
        },
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
    asked = ["--model", str(demo / "models" / "qwen2_5_vl"), "--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl",
             "--torch_dtype", "bfloat16", "--max_length", "4000",
             "--dataset", *(str(tmp_path / f"{name}.jsonl") for name in shapes)]  # fmt: skip

    words = ["swift", "sft", *asked, "--packing", "true", "--output_dir", str(tmp_path / "out")]
    assert 0 == export.main(["--cached-dataset", str(tmp_path / "ours"), *words])
    assert "rows with boxes, videos, sound or <img> are encoded in full" in capsys.readouterr().err
    export_main([*asked, "--to_cached_dataset", "true", "--output_dir", str(tmp_path / "theirs")])

    expected = load_from_disk(tmp_path / "theirs" / "train")
    assert len(shapes) == len(expected)
    assert list(expected) == list(load_from_disk(tmp_path / "ours"))


def test_a_template_that_leaves_nothing_of_thin_images_encodes_all_in_full(monkeypatch):
    """As qwen_vl_utils does where MAX_PIXELS is low: no arithmetic is proven for the others."""

    def encode(template, size):
        message = "height and width must be > 0"
        raise ValueError(message)

    monkeypatch.setattr(media_lengths, "encode_image", encode)

    assert media_lengths.prove_image_costs(None) is None


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def test_every_command_of_a_plan_takes_a_command_of_ms_swift(command, tmp_path, capsys, monkeypatch):
    """Its words, those of a launcher, and a YAML for ms-swift."""
    words, keys = command("pairs"), tmp_path / "dpo.yaml"
    named = {flag.lstrip("-"): value(words, flag) for flag in words if flag.startswith("--")}
    keys.write_text(json.dumps({**named, "ENV": {"NPROC_PER_NODE": 2}}))

    assert 0 == plan(["build", *words])
    built = capsys.readouterr().err
    monkeypatch.delenv("NPROC_PER_NODE")
    plain = words[2:]
    del plain[(at := plain.index("--packing")) : at + 2]
    assert 0 == plan(["build", "--world-size", "2", "torchrun", "--nproc-per-node=2", "-m", "swift.cli.rlhf", *plain])
    again = capsys.readouterr().err
    assert 0 == plan(["build", "swift", "rlhf", str(keys)])
    of_keys = capsys.readouterr().err
    assert 0 == plan(["verify", "--samples", "3", "--json", *words])
    assert {"passed": True, "findings": []} == json.loads(capsys.readouterr().out)
    assert 0 == plan(["whatif", "--max-length", f"{PACKING_LENGTH},400", "--json", *words])
    rows = json.loads(capsys.readouterr().out)["alternatives"]
    assert 0 == plugin.main(["swift", "-o", str(tmp_path / "plugin.py"), *words])
    assert 0 == plan(["show", "--sample", "5", "--text", *words])

    assert "steps an epoch" in built
    assert "on 2 ranks" in built
    assert "the stored plan fits and is used again" in again
    assert [False, True] == ["does not say --packing true" in text for text in (built, again)]
    told = [[line for line in text.splitlines() if "steps an epoch" in line] for text in (built, again, of_keys)]
    assert told[0] == told[1] == told[2]
    assert "; to train: the command with --external_plugins plugin.py" in again
    assert [2, 2] == [row["world_size"] for row in rows]
    assert rows[0]["plan"]["num_packs"] > rows[1]["plan"]["num_packs"]
    assert "install(checksum='" in (tmp_path / "plugin.py").read_text()
    assert "blue circle" in capsys.readouterr().out


def test_memory_is_traced_for_a_command(command, capsys):
    """On the packs of its plan, with its adapters; not for pairs, nor for several packs at once."""
    words = [*command("text"), "--per_device_train_batch_size", "1"]

    assert 0 == plan(["fit", "--json", *words])
    adapters = json.loads(capsys.readouterr().out)
    assert 0 == plan(["fit", "--json", *words, "--tuner_type", "full"])
    full = json.loads(capsys.readouterr().out)
    assert 2 == plan(["fit", *command("pairs")])
    refused = capsys.readouterr().err

    assert 2 == adapters["world_size"]
    assert adapters["packs"][0]["peak"]["optimizer"] < full["packs"][0]["peak"]["optimizer"]
    assert "has 2 faults" in refused
    assert "--per_device_train_batch_size: is 5" in refused


def test_split_texts_are_planned_as_they_are_trained(command, capsys):
    """`swift pt` makes several rows of a long text, each of at most `--max_length`."""
    whole = [
        "swift",
        "pt",
        *command("text", "--dataloader_drop_last false --max_length 9000 --packing_length 9000")[2:],
    ]
    shorter = ["--max_length", "50", "--packing_length", "100"]
    split = [*elsewhere(whole), "--truncation_strategy", "split", *shorter]
    plans = []
    for words in (whole, split):
        assert 0 == plan(["build", *words])
        assert 0 == plan(["verify", "--samples", "2", *words])
        capsys.readouterr()
        assert 0 == plan(["show", "--json", *words])
        plans.append(json.loads(capsys.readouterr().out)["splits"]["train"]["plan"])

    assert NUM_ROWS == plans[0]["num_samples"] < plans[1]["num_samples"] // 2
    assert plans[0]["num_tokens"] == plans[1]["num_tokens"]
    assert plans[1]["num_packs"] > plans[1]["num_tokens"] / 100
    assert 0 == plans[1]["long_samples"]


def test_rows_that_ms_swift_leaves_out_are_counted_and_named(command, capsys):
    """Rows that are too long, or whose image is absent; with --strict true the first one stops."""
    words = command("images", bad=True)

    assert 0 == plan(["build", *words])
    left = capsys.readouterr().err
    assert 2 == plan(["build", *elsewhere(words), "--strict", "true"])
    stopped = capsys.readouterr().err

    assert f"{LONGER + 1} of {NUM_ROWS} records cannot become samples and are left out" in left
    assert "MaxLengthError" in left
    assert "absent.png" in left
    assert "error:" in stopped
    assert ".jsonl, row " in stopped


def elsewhere(words: list[str]) -> list[str]:
    """Return the words of a command that stores its plan elsewhere."""
    return [*words, "--output_dir", f"{value(words, '--output_dir')}-other"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.sh", "is a script, and none is read: put packplan before its command"),
        ("swift infer --model m", "swift infer: is not planned"),
        ("python train.py --model m", "python: names no command of ms-swift"),
        (
            "torchrun --nproc_per_node 2 -m swift.cli.sft {given}",
            "torchrun: starts ranks: give their number by",
        ),
        ("{text} --streaming true --max_steps 4", "--streaming: gives no lengths before training"),
        ("swift rlhf {given} --rlhf_type kto", "--rlhf_type: is kto"),
        ("{text} --max_lenght 7", "--max_lenght: is no argument of ms-swift"),
        ("{text} --tuner_type full --max_length many", "ms-swift: refuses an argument"),
    ],
)
def test_a_command_that_cannot_be_planned_is_refused_by_what_is_wrong(command, tmp_path, capsys, line, said):
    words = command("text")
    given = {"given": " ".join(words[2:]), "text": " ".join(words)}

    assert 2 == plan(["build", *line.format(**given).split()])

    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("variables", "ranks"), [({}, 1), ({"NPROC_PER_NODE": "4", "NNODES": "2"}, 8)])
def test_ranks_are_those_that_swift_starts(monkeypatch, variables, ranks):
    """By variables, which its module does not read."""
    for name in ("NPROC_PER_NODE", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, number in variables.items():
        monkeypatch.setenv(name, number)

    assert (ranks, 1) == (
        commands._started_ranks([], is_swift=True),
        commands._started_ranks(["python", "-m"], is_swift=False),
    )

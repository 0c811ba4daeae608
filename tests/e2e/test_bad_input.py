"""
What a user gets wrong: one message that names the place and the remedy, exit status 2, no
traceback, nothing trained.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from packplan.adapters.ranks.torch_group import TorchGroup
from packplan.adapters.trainer.arguments import TrainingArguments
from packplan.adapters.trainer.static import PackTrainer
from packplan.app import __main__ as packplan
from packplan.app import sft
from packplan.app.plan import __main__ as plan
from packplan.core.errors import ConfigError
from tests.network import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

ANSWER = {"role": "assistant", "content": "red dot"}
QUESTION = {"role": "user", "content": "what?"}
SEEN = {"messages": [{"role": "user", "content": "<image>what?"}, ANSWER], "images": ["a.png"]}
GOOD = {"messages": [QUESTION, ANSWER]}


def huge_png(path: Path) -> None:
    """Write a header that promises 20,000 by 20,000 pixels, and no pixels."""
    chunks = {b"IHDR": struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0), b"IDAT": b""}
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks.items()]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.fixture
def outcome(write_run, tmp_path, capfd, monkeypatch):
    """
    Return a function that writes seven records, the last given, runs, and gives status and message.
    """
    Image.effect_noise((200, 200), 60).save(tmp_path / "a.png")
    monkeypatch.setattr(PackTrainer, "train", lambda *_, **__: pytest.fail("training started"))

    def run(
        last: object = GOOD, *, of: str = "qwen2_5_vl", lines: list[str] | None = None, **overlay
    ) -> tuple[int, str]:
        records = [json.dumps(GOOD)] * 6 + [last if isinstance(last, str) else json.dumps(last)]
        (tmp_path / "data.jsonl").write_text("".join(f"{line}\n" for line in (records if lines is None else lines)))
        overlay["custom"] = {"train_jsonl": str(tmp_path / "data.jsonl")} | overlay.get("custom", {})
        status = sft.main([str(write_run(of, **overlay))])
        message = capfd.readouterr().err.split("error: ")[-1]
        assert "Traceback" not in message
        assert not list(tmp_path.glob("run/checkpoint-*"))
        return status, message

    return run


@pytest.fixture(scope="module")
def _proven():
    from packplan.adapters.samples import measurer

    return cache(measurer.prove_lengths)


@pytest.fixture
def _proven_once(one_template, _proven, monkeypatch):
    """Let runs that fail before they train share a template, and what is proven of it."""
    monkeypatch.setattr("packplan.adapters.samples.measurer.prove_lengths", _proven)


@pytest.mark.usefixtures("_proven_once")
@pytest.mark.parametrize(
    ("record", "says"),
    [
        ('{"messages": [', "no valid JSON"),
        ({"id": 3}, "is of no known shape"),
        ({"messages": [QUESTION]}, "assistant"),
        ({**SEEN, "images": []}, "1 <image> tag but 0 images"),
        ({**SEEN, "images": ["a.png", "a.png"]}, "1 <image> tag but 2 images:"),
        ({**SEEN, "images": ["gone.png"]}, "gone.png does not exist"),
        ({**SEEN, "images": ["data.jsonl"]}, "damaged or no image"),
        ({**SEEN, "images": ["torn.png"]}, "torn.png cannot be read"),
        ({**SEEN, "images": ["torn.jpg"]}, "torn.jpg cannot be read"),
        ({**SEEN, "images": ["huge.png"]}, "pixels, which may be an attack"),
        ({**SEEN, "images": ["line.png"]}, "aspect ratio"),
        ({**SEEN, "videos": ["a.mp4"]}, "a.mp4 does not exist"),
        ({**SEEN, "audios": ["a.wav"]}, "'audios'"),
        ({**SEEN, "images": ["pipe.png"]}, "pipe.png is a folder, a pipe or a device"),
        (
            {**SEEN, "images": ["iVBORw0KGgo" * 7000]},
            "the image of 57,750 bytes in the record cannot be read, it is damaged or no image",
        ),
        ({**SEEN, "images": ["file:///a.png"]}, "write the path alone, without file://"),
        ('{"id": ' + "7" * 5000 + "}", "a number of 5,000 digits, which cannot be read: write it as text"),
        ({**GOOD, "chat_template_kwargs": {"enable_thinking": True}}, "has 'chat_template_kwargs': a template is set"),
        (
            {"messages": [QUESTION, {**ANSWER, "reasoning_content": "red"}]},
            "'reasoning_content', which would be ignored",
        ),
        ('{"messages": [], "messages": []}', "the key 'messages' is written twice"),
        ({"messages": [QUESTION, {**ANSWER, "content": "\ud83d"}]}, "without its other half"),
        ({"messages": [{"role": "user", "content": "<|image_pad|>"}, ANSWER]}, "image token itself"),
    ],
)
def test_a_bad_record_is_named_by_its_line(outcome, tmp_path, record, says):
    """Line 7, the file, the reason."""
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "torn.png").write_bytes(whole[: len(whole) // 2])
    Image.open(tmp_path / "a.png").convert("RGB").save(tmp_path / "whole.jpg")
    jpeg = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "torn.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    Image.new("RGB", (4000, 10)).save(tmp_path / "line.png")
    huge_png(tmp_path / "huge.png")
    os.mkfifo(tmp_path / "pipe.png")

    status, message = outcome(record)

    assert 2 == status
    assert f"{tmp_path / 'data.jsonl'}, line 7: " in message
    assert says in message
    assert len(message) <= 520


def test_a_line_beyond_its_bound(outcome):
    """The key that raises it is named."""
    status, message = outcome({**GOOD, "id": "x" * 500}, custom={"max_line_bytes": 400})
    assert (2, True) == (status, "line 7: the line has" in message and "raise custom.max_line_bytes" in message)


def test_tags_of_media_that_a_record_has_not_stay_text(write_run, tmp_path, caplog):
    """They reach the model as they are written, and the log says of how many records."""
    from packplan.app.wiring import training as wiring

    said = {"messages": [{"role": "user", "content": "what is <video>?"}, ANSWER]}
    (tmp_path / "tags.jsonl").write_text(f"{json.dumps(said)}\n{json.dumps(GOOD)}\n{json.dumps(said)}\n")
    logging.getLogger("packplan").propagate = True
    config = wiring.read_config(write_run(custom={"train_jsonl": str(tmp_path / "tags.jsonl")}))
    with caplog.at_level(logging.WARNING, logger="packplan"):
        samples = wiring.open_samples(config)["train"]

    assert "train: 2 of 3 records say <video> or <audio> without such media, which stays text" in caplog.text
    assert "what is <video>?" in samples.template.tokenizer.decode(samples.encode(0)["input_ids"])


def test_the_path_of_an_image_in_a_text_stays_text(write_run, tmp_path):
    """
    ms-swift alone would read the file as an image, and put an image in the place of any other word.
    """
    from packplan.app.wiring import training as wiring

    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    text = f"<img>{tmp_path / 'a.png'}</img><img>b</img>"
    (tmp_path / "img.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": text}, ANSWER]}))
    samples = wiring.open_samples(wiring.read_config(write_run(custom={"train_jsonl": str(tmp_path / "img.jsonl")})))[
        "train"
    ]

    encoded = samples.encode(0)

    assert "pixel_values" not in encoded
    assert text in samples.template.tokenizer.decode(encoded["input_ids"])


def test_an_empty_data_set(outcome, tmp_path, capfd):
    """No line, or blank ones: neither training nor building leaves a file."""
    assert (2, True) == ((found := outcome(lines=["", "  "]))[0], "the data set is empty" in found[1])
    assert not (tmp_path / "run").exists()

    assert 2 == plan.main(["build", str(tmp_path / "run.yaml")])
    assert "the data set is empty" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_data_set_where_every_sample_is_too_long(outcome):
    """The key that helps is named."""
    status, message = outcome(of="qwen3", template={"max_length": 10}, training={"packing_allow_single_long": False})

    assert 2 == status
    assert "none of 7 samples is left" in message
    assert "training.packing_allow_single_long: true" in message


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"packing": False, "per_device_train_batch_size": 8}, "7 samples cannot feed 1 rank with a batch of 8 each"),
        ({"packing": False, "per_device_train_batch_size": 8, "max_steps": 5}, "dataloader_drop_last: false"),
    ],
)
def test_a_data_set_that_fills_no_batch(outcome, tmp_path, training, says):
    """Where the remainder is dropped; also building says so, and nothing is aligned."""
    training["dataloader_drop_last"] = True
    status, message = outcome(of="qwen3", training=training)

    assert 2 == status
    assert says in message
    assert "training.dataloader_drop_last: false" in message
    assert 2 == plan.main(["build", str(tmp_path / "run.yaml")])
    assert not list(tmp_path.glob("run/static_packing/train/plan_ws*"))


def test_a_sample_over_the_limit_where_the_template_raises(outcome):
    """How many, and to what the limit would have to rise."""
    status, message = outcome(of="qwen3", template={"max_length": 10, "truncation_strategy": "raise"})

    assert 2 == status
    assert "7 of 7 samples are too long" in message


@pytest.mark.covers
@pytest.mark.parametrize(
    ("overlay", "says"),
    [
        ({"custom": {"train_jsonl": "gone.jsonl"}}, "gone.jsonl cannot be read"),
        ({"custom": {"fusion_config": "mix.yaml"}}, "custom.fusion_config"),
        ({"model": {"model": "gone"}}, "model.model: gone is no folder with a config.json"),
        ({"model": {"attn_impl": "flex_attention"}}, "set model.attn_impl: auto"),
        ({"training": {"output_dir": "/dev/null/run"}}, "/dev/null/run/static_packing/train cannot be written"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate"),
        ({"training": {"lr_scheduler_type": "zigzag"}}, "zigzag"),
        ({"training": {"resume_from_checkpoint": "gone"}}, "training.resume_from_checkpoint"),
        (
            {"training": {"freeze_vit": True, "freeze_llm": True, "freeze_aligner": True, "packing_drop_last": False}},
            "nothing to train",
        ),
        ({"training": {"bf16": True, "fp16": True}}, "training"),
    ],
)
def test_a_bad_setting_is_named_by_its_key(outcome, overlay, says):
    """Whichever stage finds it."""
    status, message = outcome(**overlay)

    assert 2 == status
    assert says in message


@pytest.mark.parametrize("packing", [True, False])
def test_varlen_on_a_model_that_it_is_not_shown_equal_for(outcome, tmp_path, packing):
    """
    Refused by its key, before anything is measured, with the numbers and what to use; packed or
    not.
    """
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')

    status, message = outcome(
        model={"model": str(tmp_path), "attn_impl": "varlen"}, training={"packing": packing}
    )  # fmt: skip

    assert 2 == status
    assert "attn_impl varlen cannot be taken" in message
    assert "set model.attn_impl: auto" in message
    assert not list(tmp_path.rglob("lengths*"))


def test_one_process_with_several_gpus_is_refused(outcome, monkeypatch):
    """The trainer would split packs over them, silently."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 4))

    status, message = outcome()

    assert 2 == status
    assert "torchrun --nproc-per-node 4" in message


def test_a_missing_yaml(capfd):
    """Named."""
    assert 2 == sft.main(["gone.yaml"])
    assert "gone.yaml" in capfd.readouterr().err


def test_a_model_that_brings_code_is_refused_unless_trusted(outcome, demo, tmp_path):
    """ms-swift would run it unasked."""
    model = tmp_path / "model"
    shutil.copytree(demo / "models" / "qwen3", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoConfig": "code.Evil"}}))
    (model / "code.py").write_text("raise SystemExit('ran')")

    status, message = outcome(model={"model": str(model)})

    assert 2 == status
    assert "model.trust_remote_code: true" in message


@pytest.fixture
def broken_model(demo, tmp_path):
    """
    Return a function that copies a model of the demo, a file of it cut off after so many bytes, or
    with other content; None removes it.
    """

    def copied(name: str, content: bytes | int | None, *, of: str = "qwen2") -> Path:
        model = tmp_path / "model"
        shutil.copytree(demo / "models" / of, model)
        whole = (model / name).read_bytes() if (model / name).exists() else b""
        if content is None:
            (model / name).unlink()
        else:
            (model / name).write_bytes(whole[:content] if isinstance(content, int) else content)
        return model

    return copied


@pytest.mark.parametrize("command", ["sft", "check", "rl"])
def test_weights_that_are_cut_off_are_named_before_anything_is_measured(  # noqa: PLR0917  # fixtures
    broken_model, write_run, write_rl, tmp_path, capfd, command
):
    """By every command that loads them, with both sizes."""
    model = broken_model("model.safetensors", 5000)
    path = write_rl("run") if command == "rl" else write_run("qwen2")

    assert 2 == packplan.main([command, str(path), f"model.model={model}"])

    said = capfd.readouterr().err
    assert f"model.model: {model / 'model.safetensors'} has 5,000 bytes, but its header describes " in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_weights_of_another_kind_that_are_cut_off_are_named(broken_model, outcome):
    """Those whose size nothing describes: what loads them says that they end."""
    model = broken_model("model.safetensors", None)
    torch.save({"w": torch.zeros(999)}, model / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    os.truncate(model / "pytorch_model.bin", 900)

    status, message = outcome(of="qwen2", model={"model": str(model)})

    assert 2 == status
    assert f"model.model: {model} cannot be loaded by ms-swift: unexpected EOF" in message


@pytest.mark.parametrize("lacks", ["a weight", "the names"])
def test_weights_that_the_files_lack_are_not_drawn_at_random(broken_model, outcome, lacks):
    """Files that are whole, but lack a tensor, or hold tensors of other names."""
    model = broken_model("config.json", 10**6)
    tensors = load_file(model / "model.safetensors")
    if lacks == "a weight":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    else:
        tensors = {f"other.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    status, message = outcome(of="qwen2", model={"model": str(model)})

    assert 2 == status
    assert re.search(r"lacks [\d]+ weights? of the model \(.*\), which (is|are) to be trained from random", message)
    assert ("model.layers.1.mlp.up_proj.weight" in message) == (lacks == "a weight")


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenizer.json", 300, "{} cannot be opened by ms-swift: {}/tokenizer.json cannot be read (Unterminated"),
        ("tokenizer_config.json", b"[]", "{} cannot be opened by ms-swift: 'list' object has no attribute"),
        ("tokenizer.json", None, "{} has a tokenizer that knows no words: copy the files of its tokenizer there"),
        (
            "config.json",
            {"intermediate_size": 24},
            "{} has a config.json of other sizes than the weights beside it: take",
        ),
        ("config.json", {"vocab_size": 9}, "{} cannot be loaded by ms-swift: Padding_idx must be within"),
    ],
)
def test_a_model_whose_files_do_not_go_together_is_named(  # noqa: PLR0917  # fixtures
    broken_model, demo, outcome, file, content, says
):
    """With what it lacks, in words of its own or of the library."""
    if isinstance(content, dict):
        content = json.dumps({**json.loads((demo / "models" / "qwen2" / file).read_text()), **content}).encode()
    model = broken_model(file, content)

    status, message = outcome(of="qwen2", model={"model": str(model)})

    assert (2, True) == (status, f"model.model: {says.replace('{}', str(model))}" in message), message


def test_a_model_that_sees_without_its_processor_is_named(broken_model, outcome):
    """By the file that is missing."""
    model = broken_model("processor_config.json", None, of="qwen2_5_vl")

    status, message = outcome(model={"model": str(model)})

    assert (2, True) == (status, "model.model: has no processor of images: copy its processor_config.json" in message)


def test_the_command_line_trains_and_says_what_it_did(write_run):
    """
    `packplan sft` in an interpreter of its own, with the defaults of ms-swift for workers and
    checkpointing.
    """
    path = write_run("qwen3", training={"max_steps": 1, "gradient_checkpointing": True, "dataloader_num_workers": 1})
    run = subprocess.run(
        [sys.executable, "-m", "packplan.app.sft", str(path)], capture_output=True, text=True, check=False, cwd=ROOT
    )

    assert 0 == run.returncode, run.stderr
    for said in ("packplan: train: raw_plan checksum", "packplan: optimizer steps:", "1 in total"):
        assert said in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("words", [["sft"], ["plan", "build"], ["check"], ["rl"]])
def test_a_world_size_that_is_no_number_is_named(write_run, write_rl, tmp_path, monkeypatch, capfd, words):  # noqa: PLR0917  # fixtures
    """By every command that asks for it, before anything is read or written."""
    monkeypatch.chdir(tmp_path)
    path = write_rl("run") if words == ["rl"] else write_run("qwen2")
    monkeypatch.setenv("WORLD_SIZE", "two")

    assert 2 == packplan.main([*words, str(path)])

    said = capfd.readouterr().err
    assert "WORLD_SIZE: is 'two', but" in said
    assert "torchrun" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["sft"], ["plan", "build"], ["rl", "--overwrite"]])
def test_ranks_without_a_place_to_meet_leave_everything_as_it_is(  # noqa: PLR0917  # fixtures
    write_run, write_rl, tmp_path, monkeypatch, capfd, words
):
    """They say which variables are missing, and remove nothing of an earlier run."""
    path = write_rl("run") if words[0] == "rl" else write_run("qwen2")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rl.jsonl").write_text("kept")
    monkeypatch.setenv("WORLD_SIZE", "2")

    assert 2 == packplan.main([*words, str(path)])

    missing = (
        "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: are not set, but WORLD_SIZE is: start the ranks with torchrun"
    )
    assert missing in capfd.readouterr().err
    assert ["rl.jsonl"] == [file.name for file in (tmp_path / "run").iterdir()]


def test_commands_that_join_no_ranks_read_no_variables_of_ranks(monkeypatch, capfd):
    """They answer whatever these are."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "two")

    assert 2 == plan.main(["show", "gone.yaml"])
    assert "gone.yaml" in capfd.readouterr().err


def test_more_ranks_than_gpus_are_named(monkeypatch):
    """Before the ranks meet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")

    with pytest.raises(ConfigError, match="LOCAL_RANK: is 1, but this machine shows 1 GPU: start as many ranks on it"):
        TorchGroup(use_cpu=False)


def test_ranks_that_cannot_meet_end_with_one_message(write_run, monkeypatch, capfd):
    """A port that is taken; a rank whose others never come."""
    path = str(write_run("qwen2", training={"ddp_timeout": 1, "use_cpu": True}))
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name, value in {**ranks, "MASTER_PORT": str(port)}.items():
            monkeypatch.setenv(name, value)
        assert 2 == sft.main([path])
        said = capfd.readouterr().err
        assert f"rank 0 cannot meet the 2 ranks at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT): " in said
        assert "EADDRINUSE" in said
        assert "Traceback" not in said

    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert 2 == sft.main([path])
    said = capfd.readouterr().err
    assert "1/2 clients joined" in said
    assert "Traceback" not in said


def test_a_fault_of_ours_keeps_its_traceback(write_run, monkeypatch):
    """It is not dressed up as the user's."""
    monkeypatch.setattr(sft, "run", lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        sft.main([str(write_run())])


def test_ctrl_c_is_one_line_and_status_130(write_run, monkeypatch, capfd):
    """And says that the work is kept."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sft, "run", interrupted)

    assert 130 == sft.main([str(write_run())])
    assert "interrupted" in capfd.readouterr().err


def test_damage_is_status_3(write_run, tmp_path, execute, capfd):
    """A stored plan with one byte changed is found before training."""
    path = write_run("qwen3", training={"max_steps": 1})
    execute(path)
    indices = tmp_path / "run" / "static_packing" / "train" / "raw_plan.indices.bin"
    damaged = bytearray(indices.read_bytes())
    damaged[0] ^= 1
    indices.write_bytes(damaged)

    assert 3 == sft.main([str(path)])
    assert "raw_plan.indices.bin is damaged" in capfd.readouterr().err


def test_a_changed_system_prompt_is_stale_and_says_so(write_run, execute, capfd):
    """The key, both values, and what to do."""
    execute(write_run("qwen3", training={"max_steps": 1}))

    assert 2 == sft.main([str(write_run("qwen3", template={"system": "Another prompt."}))])
    message = capfd.readouterr().err
    assert "template.system: stored 'You look at scenes.', now 'Another prompt.'" in message
    assert "training.output_dir" in message


@pytest.mark.parametrize("name", ["demo", "rl"])
def test_yaml_that_is_shipped_is_valid(name):
    """What the README runs."""
    from packplan.app.wiring import training as wiring

    assert wiring.read_config(ROOT / "app" / f"{name}.yaml", rl=name == "rl")

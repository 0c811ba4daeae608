"""Mistakes of users: one message with place and remedy, status 2, nothing trained."""

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from packplan.adapters.ranks.torch_group import TorchGroup
from packplan.adapters.trainer.arguments import TrainingArguments
from packplan.adapters.trainer.trainer import PlanTrainer
from packplan.app import __main__ as packplan
from packplan.app import sft
from packplan.app.plan import __main__ as plan
from packplan.app.wiring.runs import read_config, read_rl_config
from packplan.app.wiring.splits import open_encoders
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
    """Return a function that runs on seven records, the last given; status and message."""
    Image.effect_noise((200, 200), 60).save(tmp_path / "a.png")
    monkeypatch.setattr(PlanTrainer, "train", lambda *_, **__: pytest.fail("training started"))

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


@pytest.mark.usefixtures("one_template")
@pytest.mark.parametrize(
    ("record", "says"),
    [
        ('{"messages": [', "no valid JSON"),
        ({**GOOD, "id": "x" * 200_000}, "raise custom.max_line_bytes"),
        ({**SEEN, "images": ["gone.png"]}, "gone.png does not exist"),
        ({**SEEN, "images": ["data.jsonl"]}, "damaged or no image"),
        ({**SEEN, "images": ["torn.png"]}, "torn.png cannot be read"),
        ({**SEEN, "images": ["torn.jpg"]}, "torn.jpg cannot be read"),
        ({**SEEN, "images": ["huge.png"]}, "pixels: shrink it, or raise custom.max_image_pixels"),
        ({**SEEN, "images": ["line.png"]}, "aspect ratio"),
        ({**SEEN, "images": ["pipe.png"]}, "pipe.png is a folder, a pipe or a device"),
        (
            {**SEEN, "images": ["iVBORw0KGgo" * 7000]},
            "the image of 57,750 bytes in the record cannot be read, it is damaged or no image",
        ),
        ({**GOOD, "chat_template_kwargs": {"enable_thinking": True}}, "has 'chat_template_kwargs': a template is set"),
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

    status, message = outcome(record, custom={"max_line_bytes": 100_000})

    assert 2 == status
    assert f"{tmp_path / 'data.jsonl'}, line 7: " in message
    assert says in message
    assert len(message) <= 520


def test_tags_without_their_media_stay_text(write_run, tmp_path):
    """As they are written; ms-swift alone would read the files they name."""
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    text = f"what is <video>? <img>{tmp_path / 'a.png'}</img><img>b</img>"
    tagged = {"messages": [{"role": "user", "content": text}, ANSWER]}
    (tmp_path / "tags.jsonl").write_text(json.dumps(tagged))
    samples = open_encoders(read_config(write_run(custom={"train_jsonl": str(tmp_path / "tags.jsonl")})))["train"]

    encoded = samples.encode(0)

    assert "pixel_values" not in encoded
    assert text in samples.template.tokenizer.decode(encoded["input_ids"])


def test_one_process_with_several_gpus_is_refused(outcome, monkeypatch):
    """The trainer would split packs over them, silently."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 4))

    status, message = outcome()

    assert 2 == status
    assert "torchrun --nproc-per-node 4" in message


@pytest.fixture
def copied_model(demo, tmp_path):
    """Return a function that copies a model of the demo, and returns its folder."""

    def copy(of: str = "qwen2") -> Path:
        return Path(shutil.copytree(demo / "models" / of, tmp_path / "model"))

    return copy


@pytest.mark.parametrize("command", ["sft", "check", "rl"])
def test_weights_that_are_cut_off_are_named_before_anything_is_measured(  # noqa: PLR0917  # fixtures
    copied_model, write_run, write_rl, tmp_path, capfd, command
):
    """By every command that loads them, with both sizes."""
    weights = copied_model() / "model.safetensors"
    os.truncate(weights, 5000)
    path = write_rl("run") if command == "rl" else write_run("qwen2")

    assert 2 == packplan.main([command, str(path), f"model.model={weights.parent}"])

    said = capfd.readouterr().err
    assert f"model.model: {weights} is cut off or no file of weights " in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def save_old_weights(model: Path) -> None:
    """Save weights whose size nothing describes, and cut them off."""
    (model / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(999)}, model / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    os.truncate(model / "pytorch_model.bin", 900)


def rename_tensors(model: Path, rename: Callable[[str], str | None]) -> None:
    """Save a model's weights under other names; None leaves one out."""
    tensors = load_file(model / "model.safetensors")
    named = {new: tensor for name, tensor in tensors.items() if (new := rename(name))}
    save_file(named, model / "model.safetensors", metadata={"format": "pt"})


def change_config(model: Path, **keys: int) -> None:
    """Change keys of a model's configuration."""
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


MISSING = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (save_old_weights, "{} cannot be loaded by ms-swift: unexpected EOF"),
        (lambda model: rename_tensors(model, lambda name: name if name != MISSING else None),
         f"{{}} lacks 1 weight of the model ({MISSING}), which is to be trained from random"),
        (lambda model: rename_tensors(model, "other.{}".format), ", which are to be trained from random"),
        (lambda model: os.truncate(model / "tokenizer.json", 300),
         "{} cannot be opened by ms-swift: {}/tokenizer.json cannot be read (Unterminated"),
        (lambda model: (model / "tokenizer_config.json").write_text("[]"),
         "{} cannot be opened by ms-swift: 'list' object has no attribute"),
        (lambda model: (model / "tokenizer.json").unlink(),
         "{} has a tokenizer that knows no words: copy the files of its tokenizer there"),
        (lambda model: change_config(model, intermediate_size=24),
         "{} has a config.json of other sizes than the weights beside it: take"),
        (lambda model: change_config(model, vocab_size=9), "{} cannot be loaded by ms-swift: Padding_idx must be"),
        (lambda model: (model / "processor_config.json").unlink(),
         "has no processor of images: copy its processor_config.json"),
    ],
)  # fmt: skip
def test_a_model_whose_files_do_not_go_together_is_named(copied_model, outcome, spoil, says):
    """With what it lacks, in words of its own or of the library."""
    of = "qwen2_5_vl" if "processor" in says else "qwen2"
    model = copied_model(of)
    spoil(model)

    status, message = outcome(of=of, model={"model": str(model)})

    assert 2 == status
    assert "model.model: " in message
    assert says.replace("{}", str(model)) in message


def test_commands_that_join_no_ranks_read_no_variables_of_ranks(monkeypatch, capfd):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "two")

    assert 2 == plan.main(["show", "gone.yaml"])
    assert "gone.yaml" in capfd.readouterr().err


def test_more_ranks_than_gpus_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    environment = {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**environment, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match="LOCAL_RANK: is 1, but this machine shows 1 GPU: start as many ranks on it"):
        TorchGroup(use_cpu=False)


def test_yaml_that_is_shipped_is_valid():
    """What the pages run; `test_demo.py` runs the other one."""
    for name in ("rl", "rl_vision"):
        assert read_rl_config(ROOT / "app" / f"{name}.yaml")

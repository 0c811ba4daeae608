"""Mistakes of users: one message with place and remedy, status 2, nothing trained."""

import json
import math
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
from packplan.app import __main__ as packplan
from packplan.app import sft
from packplan.app.opening.runs import read_rl_config
from packplan.app.plan import __main__ as plan
from packplan.core.errors import ConfigError
from tests.e2e.ready import assert_refused
from tests.network import free_port
from tests.records import asked, chat

pytestmark = pytest.mark.slow


def huge_png(path: Path) -> None:
    """Write a header that promises 20,000 by 20,000 pixels, and no pixels."""
    chunks = {b"IHDR": struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0), b"IDAT": b""}
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks.items()]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


@pytest.fixture
def outcome(write_run, tmp_path, capfd):
    """Return a function that runs `packplan sft`, and returns its message; nothing is trained."""

    def run(of: str = "qwen2", **overlay) -> str:
        assert 2 == sft.main([str(write_run(of, **overlay))])
        message = capfd.readouterr().err.split("error: ")[-1]
        assert "Traceback" not in message
        assert not (tmp_path / "run" / "logging.jsonl").exists()
        return message

    return run


def test_a_bad_record_is_named_by_its_line(open_source, outcome, tmp_path):
    """With its file and the reason; the first one ends a run."""
    Image.effect_noise((200, 200), 60).save(tmp_path / "a.png")
    for kind in ("png", "jpg"):
        Image.open(tmp_path / "a.png").convert("RGB").save(tmp_path / f"torn.{kind}")
        os.truncate(tmp_path / f"torn.{kind}", (tmp_path / f"torn.{kind}").stat().st_size // 2)
    Image.new("RGB", (4000, 10)).save(tmp_path / "line.png")
    huge_png(tmp_path / "huge.png")
    os.mkfifo(tmp_path / "pipe.png")
    shown = {
        "gone.png": "gone.png does not exist: relative paths start at custom.media_dir",
        "data.jsonl": "damaged or not an image", "huge.png": "pixels: shrink it, or raise custom.max_image_pixels",
        "line.png": "aspect ratio", "pipe.png": "pipe.png is a folder, a pipe or a device",
        "iVBORw0KGgo" * 7000: "the image of 57,750 bytes in the record cannot be read, since it is damaged",
    }  # fmt: skip
    tags = f"what is <video>? <img>{tmp_path / 'a.png'}</img><img>b</img>"
    records = [asked("<image>what?", images=[image]) for image in shown]
    records += [chat(chat_template_kwargs={"enable_thinking": True}), asked("<|image_pad|>"), chat(id="x" * 200_000)]
    behind_its_header = [asked("<image>what?", images=[image]) for image in ("torn.png", "torn.jpg")]
    says = [
        *shown.values(), "has 'chat_template_kwargs': a template is set", "image token itself",
        "raise custom.max_line_bytes", "not valid JSON", "torn.png cannot be read", "torn.jpg cannot be read",
    ]  # fmt: skip
    data = tmp_path / "data.jsonl"
    lines = [*map(json.dumps, records), '{"messages": [', *map(json.dumps, [*behind_its_header, asked(tags)])]
    data.write_text("\n".join(lines))

    source, encoder = open_source(data, custom={"max_line_bytes": 100_000})
    quick, full = (list(source.measure_many(range(len(lines)), in_full=in_full)) for in_full in (False, True))

    assert_refused(full[:-1], says)
    assert_refused(quick[:-3], says[:-2])
    assert f"{data}, line 1: the image " in outcome("qwen2_5_vl", custom={"train_jsonl": str(data)})
    # Tags without media stay as they are written; ms-swift alone would read the files they name.
    assert quick[-1] == full[-1]
    # Damage behind a header is training's to find, audited or not.
    assert [1, 1, 0] == [one.measurement.images for one in quick[-3:]]
    assert tags in encoder.template.tokenizer.decode(encoder.encode(len(lines) - 1)["input_ids"])


def test_one_process_with_several_gpus_is_refused(outcome, monkeypatch):
    """The trainer would split packs over them, silently."""
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 4))

    assert "torchrun --nproc-per-node 4" in outcome()


@pytest.mark.parametrize("command", ["sft", "check", "plan time", "rl"])
def test_weights_that_are_cut_off_are_named_before_anything_is_measured(  # noqa: PLR0917  # fixtures
    demo, write_run, write_rl, tmp_path, capfd, command
):
    """By every command that loads them, with both sizes."""
    weights = Path(shutil.copytree(demo / "models" / "qwen2", tmp_path / "model")) / "model.safetensors"
    os.truncate(weights, 5000)
    path = write_rl("run") if command == "rl" else write_run("qwen2")

    assert 2 == packplan.main([*command.split(), str(path), f"model.model={weights.parent}"])

    said = capfd.readouterr().err
    assert f"model.model needs {weights}, which is truncated, or is not a weight file " in " ".join(said.split())
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


def change_config(model: Path, *, file: str = "config.json", **keys: object) -> None:
    """Change keys of a model's configuration, or of another file."""
    path = model / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **keys}))


MISSING = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("of", "spoil", "says"),
    [
        ("qwen2", save_old_weights, "{}, which ms-swift cannot load: unexpected EOF"),
        ("qwen2", lambda model: rename_tensors(model, lambda name: name if name != MISSING else None),
         f"{{}}, which lacks 1 weight of the model ({MISSING}), so transformers would draw"),
        ("qwen2", lambda model: rename_tensors(model, "other.{}".format), ", …), so transformers would draw"),
        ("qwen2", lambda model: os.truncate(model / "tokenizer.json", 300),
         "{}, which ms-swift cannot open: it needs {}/tokenizer.json"),
        ("qwen2", lambda model: (model / "tokenizer_config.json").write_text("[]"),
         "{}, which ms-swift cannot open: 'list' object has no attribute"),
        ("qwen2", lambda model: (model / "tokenizer.json").unlink(),
         "{}, whose tokenizer has no vocabulary: copy the tokenizer's files into that folder"),
        ("qwen2", lambda model: change_config(model, intermediate_size=24),
         "{}, whose config.json has other sizes than the weights beside it: take"),
        ("qwen2", lambda model: change_config(model, vocab_size=9), "{}, which ms-swift cannot load: Padding_idx"),
        *(("qwen2", lambda model, dtype=dtype: change_config(model, dtype=dtype),
           f"{{}}, whose config.json has dtype {dtype}, which torch does not have")
          for dtype in ([], [1], 1e308, math.nan, {"a": 1})),
        *(("qwen2", lambda model, end=end: change_config(model, file="generation_config.json", eos_token_id=end),
           f"has eos_token_id {end} in {{}}/generation_config.json, which is neither a token id nor")
          for end in (1.5, "end", {"a": 1}, [1, "a"])),
        ("qwen2_5_vl", lambda model: (model / "processor_config.json").unlink(),
         "has no image processor: copy processor_config.json"),
    ],
)  # fmt: skip
def test_a_model_whose_files_do_not_go_together_is_named(demo, outcome, tmp_path, of, spoil, says):  # noqa: PLR0917  # fixtures
    """With what it lacks, in words of its own or of the library."""
    model = Path(shutil.copytree(demo / "models" / of, tmp_path / "model"))
    spoil(model)

    message = outcome(of, model={"model": str(model)})

    assert "model.model " in message
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

    with pytest.raises(ConfigError, match="LOCAL_RANK is 1, but this machine has 1 GPU: start one rank per GPU"):
        TorchGroup(use_cpu=False)


@pytest.mark.parametrize("name", ["rl", "rl_vision"])
def test_yaml_that_is_shipped_is_valid(name):
    """What the pages run; `test_demo.py` runs the other one."""
    assert read_rl_config(Path(__file__).parents[2] / "app" / f"{name}.yaml")

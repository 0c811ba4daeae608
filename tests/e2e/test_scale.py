"""
Settings for many devices reach ms-swift or are refused; ranks with and without media never wait
for each other.
"""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.trainer import arguments as swift_arguments
from packplan.app.plan import __main__ as plan
from packplan.core.errors import ConfigError
from tests.processes import finished, train_under_torchrun

pytestmark = pytest.mark.slow

SEEING = ["qwen2_5_vl", "qwen3_vl"]


@pytest.fixture
def arguments(write_run):
    """Return a function that builds the training arguments of a run with more settings."""
    from packplan.app.wiring import training as wiring

    def build(**training):
        config = wiring.read_config(write_run(training=training))
        return swift_arguments.training_arguments(config, per_device_train_batch_size=1, gradient_accumulation_steps=1)

    return build


def test_fsdp_reaches_ms_swift_as_it_was_written(arguments, monkeypatch):
    """On devices that can shard; `true` is a value that it takes."""
    monkeypatch.setattr(swift_arguments, "runs_on_cpu", lambda _: False)
    written = {
        "fsdp_version": 2,
        "reshard_after_forward": False,
        "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"],
    }

    built = arguments(fsdp=True, fsdp_config=dict(written))

    assert built.fsdp is True
    assert {
        "version": 2,
        **{k: v for k, v in written.items() if k != "fsdp_version"},
    }.items() <= built.fsdp_config.items()
    assert swift_arguments.shards_weights(built)


def test_deepspeed_reaches_ms_swift_as_it_was_written(write_run, monkeypatch):
    """Whether it is installed here or not: key for key."""
    from packplan.app.wiring import training as wiring

    written = {"zero_optimization": {"stage": 3, "overlap_comm": True}, "bf16": {"enabled": "auto"}}
    config = wiring.read_config(write_run(training={"deepspeed": written}))
    taken = {}
    monkeypatch.setattr(
        swift_arguments, "TrainingArguments", lambda **settings: taken.update(settings) or Mock(n_gpu=0)
    )

    swift_arguments.training_arguments(config, per_device_train_batch_size=1, gradient_accumulation_steps=1)

    assert written == taken["deepspeed"]


@pytest.mark.covers
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fsdp": "full_shard"}, "training.fsdp: would be dropped on a CPU, silently"),
        ({"fsdp": True}, "training.fsdp: would be dropped on a CPU, silently"),
        ({"fp16": True}, "training.fp16: computes in float32 on a CPU"),
        ({"fsdp_config": {"fsdp_version": 2}}, "has no effect without training.fsdp"),
        ({"deepspeed": {"tensor_parallel": {"autotp_size": 2}}}, "plans count every rank: remove tensor_parallel"),
        ({"deepspeed": "zero2"}, "training"),
        ({"parallelism_config": {"tp_size": 2}}, "joins several ranks to one learner"),
        ({"label_smoothing_factor": 0.1}, "is averaged over packs"),
    ],
)
def test_what_would_be_ignored_or_break_the_count_of_learners_is_refused(arguments, settings, says):
    """By key, before anything is measured."""
    with pytest.raises(ConfigError, match=says):
        arguments(**settings)


def test_tensor_parallelism_in_a_file_is_found_too(arguments, tmp_path):
    """As DeepSpeed's settings are often written."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"tensor_parallel": {"autotp_size": 2}}))

    with pytest.raises(ConfigError, match="remove tensor_parallel"):
        arguments(deepspeed=str(path))


@pytest.mark.parametrize("model", SEEING)
def test_a_batch_without_images_uses_every_weight(write_run, few_scenes, model):
    """
    So that no rank waits; the loss is the same. Without it, Qwen3-VL leaves its vision tower out.
    """
    from packplan.adapters.trainer.packed_dataset import EncodedPack
    from packplan.adapters.trainer.vision import DummyImage
    from packplan.app.sft.prepare import prepare
    from packplan.app.wiring import training as wiring

    prepared = prepare(wiring.read_config(write_run(model, custom={"train_jsonl": str(few_scenes)})), OneRank())
    trainer, train = prepared.trainer, prepared.planned["train"]
    index = int((train.table[:, 2] == 0).argmax())

    def loss_and_unused() -> tuple[float, set[str]]:
        batch = trainer.data_collator([EncodedPack(0, [prepared.samples["train"].encode(index)])])
        trainer.model.zero_grad()
        with trainer.media_hook():
            loss = trainer.compute_loss(
                trainer.model, trainer._prepare_inputs(batch), num_items_in_batch=torch.tensor(9.0)
            )
            loss.backward()
        return loss.item(), {name for name, p in trainer.model.named_parameters() if p.grad is None}

    before, unused = loss_and_unused()
    DummyImage.from_model(trainer.model, trainer.template).ensure_seen()
    after, still = loss_and_unused()

    assert before == after
    assert bool(unused) == (model == "qwen3_vl")
    assert not still


@pytest.mark.parametrize("model", SEEING)
def test_sharded_ranks_with_and_without_media_stay_in_step(server, write_run, tmp_path, model):
    """
    Real FSDP over gloo: each rank needs the other's part of the vision tower, whether its pack has
    images, videos, both or none; Qwen3-VL's tower sees images and videos in a pass each.
    """
    from packplan.app.demo.videos import MadeVideo
    from tests.e2e import sharded_main
    from tests.e2e.test_videos import SAMPLING, asked, write

    MadeVideo().write(tmp_path / "a.mp4")
    Image.new("RGB", (90, 60), (40, 10, 200)).save(tmp_path / "a.png")
    media = ([], []), ([], ["a.png"]), (["a.mp4"], []), (["a.mp4"], ["a.png"])
    data = write(tmp_path / "media.jsonl", [asked(*videos, images=images) for videos, images in media])
    path = str(write_run(model, custom={"train_jsonl": str(data)}, template=SAMPLING, training={"max_steps": 1}))
    assert 0 == plan.main(["build", path, "--quiet"])  # the ranks find the plan

    ranks = server.ranks(2, partial(sharded_main.main, videos=True), path, str(tmp_path), folder=tmp_path)
    assert [0, 0] == finished(ranks)
    assert all(float((tmp_path / f"loss{rank}").read_text()) > 1 for rank in range(2))


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed; it is an extra")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("model", SEEING)
def test_deepspeed_trains_the_same(write_run, execute, demo, tmp_path, model, stage):  # noqa: PLR0917  # fixtures
    """
    ZeRO over two ranks on a CPU, packs with and without images: the losses of one process on the
    same packs.
    """
    keys = {"effective_batch_size": 2, "max_steps": 4, "learning_rate": 0.0, "train_dataloader_shuffle": False,
            "eval_strategy": "steps", "eval_steps": 4, "packing_drop_last": False}  # fmt: skip
    overlay = {
        "custom": {"val_jsonl": str(demo / "data" / "val.jsonl")},
        "template": {"max_length": 60},
    }  # packs of one
    alone = execute(write_run(model, name="alone", training=keys, **overlay))
    packs, table = alone.planned["train"].raw.packs, alone.planned["train"].table
    assert {False, True} == {bool(table[packs[p], 2].sum()) for p in alone.schedule.order(0)[:8].tolist()}
    zero = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"}
    path = write_run(model, name="ranks", training={**keys, "deepspeed": zero, "use_cpu": True}, **overlay)

    run = train_under_torchrun(path, tmp_path)

    assert 0 == run.returncode, run.stderr[-4000:]
    found = json.loads((tmp_path / "rank0.json").read_text())["history"]
    for key in ("loss", "eval_loss"):
        expected = [entry[key] for entry in alone.history if key in entry]
        assert expected == pytest.approx([entry[key] for entry in found if key in entry], rel=1e-5)

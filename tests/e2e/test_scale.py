"""Settings for many devices reach ms-swift or are refused; ranks stay in step."""

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import swift
import torch
from PIL import Image
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from packplan.adapters.loaders.packs import PackOfRows
from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.trainer import arguments as swift_arguments
from packplan.adapters.trainer.vision import dummy_image
from packplan.app.opening.runs import read_config
from packplan.app.opening.trainers import use_vision_tower_in_each_batch
from packplan.app.plan import __main__ as plan
from packplan.core.errors import ConfigError
from tests.e2e.ready import prepare
from tests.e2e.test_videos import SAMPLING
from tests.made.pictures import showing
from tests.processes import finished
from tests.records import write_lines
from tools.demo.videos import VideoSpec

pytestmark = pytest.mark.slow


@pytest.fixture
def arguments(write_run):
    """Return a function that builds the training arguments of a run with more settings."""

    def build(**training):
        config = read_config(write_run(training=training))
        return swift_arguments.make_training_arguments(config, gradient_accumulation_steps=1)

    return build


def test_fsdp_reaches_ms_swift_as_it_was_written(arguments, monkeypatch):
    """On devices that can shard; `true` is a value that it takes."""
    monkeypatch.setattr(swift_arguments, "runs_on_cpu", lambda _: False)
    written = {"reshard_after_forward": False, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]}

    built = arguments(fsdp=True, fsdp_config={"fsdp_version": 2, **written})

    assert built.fsdp is True
    assert {"version": 2, **written}.items() <= built.fsdp_config.items()
    assert swift_arguments.shards_weights(built)


def test_deepspeed_reaches_ms_swift_as_it_was_written(arguments, monkeypatch):
    """Whether it is installed here or not: key for key, or by ms-swift's name of its file."""
    written = {"zero_optimization": {"stage": 3, "overlap_comm": True}, "bf16": {"enabled": "auto"}}
    make = Mock(return_value=Mock(n_gpu=0))
    monkeypatch.setattr(swift_arguments.TrainerFactory, "get_training_args", make)

    arguments(deepspeed=written)
    assert written == make.call_args.args[0].deepspeed

    arguments(deepspeed="zero2", logging_dir="zero2")
    found = make.call_args.args[0]
    assert Path(swift.__file__).parent / "config" / "zero2.json" == Path(found.deepspeed)
    assert "zero2" == found.logging_dir, "a folder of that name"


@pytest.mark.covers
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fsdp": "full_shard"}, "training.fsdp has no effect on a CPU"),
        ({"fp16": True}, "training.fp16 has no effect on a CPU"),
        ({"fsdp": True}, "training.fsdp has no effect on a CPU"),
        ({"deepspeed": {"tensor_parallel": {"autotp_size": 2}}}, "plans count every rank: remove tensor_parallel"),
        ({"deepspeed": {"sequence_parallel_size": 2}}, "plans count every rank: remove sequence_parallel_size"),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2}}, "max_grad_norm": 0.5},
            "training.max_grad_norm is 0.5, but .*: add gradient_clipping: auto",
        ),
        ({"deepspeed": "ds.json"}, "remove tensor_parallel"),
        ({"deepspeed": "zero9"}, "training.deepspeed is zero9, but there is no such file: name a JSON file of"),
        ({"parallelism_config": {"tp_size": 2}}, "lets ranks share rows"),
        ({"label_smoothing_factor": 0.1}, "is averaged over packs"),
    ],
)
def test_what_would_be_ignored_or_break_the_count_of_learners_is_refused(
    arguments, settings, says, tmp_path, monkeypatch
):
    """By key, before anything is measured; in a file of DeepSpeed too."""
    (tmp_path / "ds.json").write_text(json.dumps({"tensor_parallel": {"autotp_size": 2}}))
    with contextlib.chdir(tmp_path), pytest.raises(ConfigError, match=says):
        arguments(**settings)


TEXT, IMAGES, VIDEOS, BOTH = range(4)
"""Records that hold these media."""

STEPS = ((TEXT, IMAGES), (TEXT, BOTH), (IMAGES, VIDEOS), (VIDEOS, TEXT))
"""Record that the pack of each rank holds; step by step."""


def on_rank(config, out):
    """Train steps on this rank's packs under FSDP, and write their losses down."""
    # The run is prepared by each process as if it were alone; they meet afterwards.
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    rank, world_size, port, *_ = [os.environ.pop(name) for name in names]
    prepared = prepare(read_config(config), OneRank())
    trainer, encode = prepared.trainer, prepared.samples["train"].encode
    model, dummy = trainer.model, dummy_image(trainer.model, trainer.template)
    use_vision_tower_in_each_batch(model, trainer.template, SimpleNamespace(fsdp=True))
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=int(rank), world_size=int(world_size))
    mesh = dist.device_mesh.init_device_mesh("cpu", (int(world_size),))
    lists = [part for part in dummy.inner.modules() if isinstance(part, torch.nn.ModuleList)]
    tower = dummy.inner.get_submodule(dummy.towers[0])
    for block in [*(block for part in lists for block in part), tower, model]:
        fully_shard(block, mesh=mesh)
    losses = []
    for step in STEPS:
        with trainer.media_hook():
            batch = trainer._prepare_inputs(trainer.data_collator([PackOfRows([encode(step[int(rank)])], 0)]))
            loss = trainer.compute_loss(model, batch, num_items_in_batch=torch.tensor(9.0))
            loss.backward()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    Path(out, f"loss{rank}").write_text(str(min(losses)))
    dist.barrier()
    dist.destroy_process_group()


def test_sharded_ranks_with_and_without_media_stay_in_step(server, write_run, tmp_path):
    """Real FSDP over gloo: whether a rank's pack has images, videos, both or none."""
    VideoSpec().write(tmp_path / "a.mp4")
    Image.new("RGB", (90, 60), (40, 10, 200)).save(tmp_path / "a.png")
    media = ([], []), ([], ["a.png"]), (["a.mp4"], []), (["a.mp4"], ["a.png"])
    data = write_lines(tmp_path / "media.jsonl", [showing(*videos, images=images) for videos, images in media])
    path = str(write_run("qwen3_vl", custom={"train_jsonl": str(data)}, template=SAMPLING, training={"max_steps": 1}))
    assert 0 == plan.main(["build", path, "--quiet"])  # the ranks find the plan

    ranks = server.ranks(2, on_rank, path, str(tmp_path), folder=tmp_path)
    assert [0, 0] == finished(ranks)
    assert all(float((tmp_path / f"loss{rank}").read_text()) > 1 for rank in range(2))

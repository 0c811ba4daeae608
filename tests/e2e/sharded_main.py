"""One rank of two under FSDP, whose packs have other media than the other rank's."""

import os
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from packplan.adapters.loaders.rows import PackOfRows
from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.samples.video_reading import has_separate_video_pass
from packplan.adapters.trainer.vision import DummyImage
from packplan.app.wiring.runs import read_config
from packplan.core.samples.tables import column
from tests.e2e.ready import prepare

TEXT, IMAGES, VIDEOS, BOTH = (False, False), (True, False), (False, True), (True, True)

STEPS = ((TEXT, IMAGES), (TEXT, IMAGES))
STEPS_WITH_VIDEOS = ((TEXT, IMAGES), (TEXT, BOTH), (IMAGES, VIDEOS), (VIDEOS, TEXT))
"""Whether the pack of each rank has images, and whether it has videos; step by step."""


def main(config: str, out: str, *, videos: bool = False) -> None:
    """Train steps on this rank's packs, and write their losses down."""
    # The run is prepared by each process as if it were alone; they meet afterwards.
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    given = {name: os.environ.pop(name) for name in names}
    rank, world_size, port = int(given["RANK"]), int(given["WORLD_SIZE"]), given["MASTER_PORT"]
    prepared = prepare(read_config(config), OneRank())
    trainer, table = prepared.trainer, prepared.planned["train"].table
    kinds = list(zip(*(column(table, name) > 0 for name in ("images", "videos")), strict=True))
    batches = [
        trainer.data_collator([PackOfRows([prepared.samples["train"].encode(kinds.index(step[rank]))], 0)])
        for step in (STEPS_WITH_VIDEOS if videos else STEPS)
    ]
    model = trainer.model
    dummy = DummyImage.from_model(model, trainer.template)
    dummy.run_in_every_batch(passes=1 + has_separate_video_pass(trainer.template))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    tower = dummy.inner.get_submodule(dummy.towers[0])
    lists = [part for part in dummy.inner.modules() if isinstance(part, torch.nn.ModuleList)]
    for block in [*(block for part in lists for block in part), tower]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = []
    for batch in batches:
        with trainer.media_hook():
            inputs = trainer._prepare_inputs(dict(batch))
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(batch["loss_normaliser"]))
            loss.backward()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    Path(out, f"loss{rank}").write_text(str(min(losses)))
    dist.barrier()
    dist.destroy_process_group()

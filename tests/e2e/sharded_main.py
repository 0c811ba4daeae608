"""
One rank whose weights are sharded by FSDP: `rank` 0 has a pack without images, the other one with.
"""

from __future__ import annotations

import os
from pathlib import Path

from adapters import torchvision_shim  # noqa: F401  # before transformers  # isort: skip

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from adapters.ranks.torch_group import OneRank
from adapters.trainer.packed_dataset import EncodedPack
from adapters.trainer.vision import DummyImage
from app.training.prepare import prepare
from app.wiring import training
from core.samples import column


def main(config: str, out: str) -> None:
    """Train one step on this rank's pack, and write its loss down."""
    # The run is prepared by each process as if it were alone; they meet afterwards.
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    given = {name: os.environ.pop(name) for name in names}
    rank, world_size, port = int(given["RANK"]), int(given["WORLD_SIZE"]), given["MASTER_PORT"]
    prepared = prepare(training.read_config(config), OneRank())
    trainer, images = prepared.trainer, column(prepared.planned["train"].table, "images")
    index = int((images == 0).argmax()) if rank == 0 else int((images > 0).argmax())
    batch = trainer.data_collator([EncodedPack(0, [prepared.samples["train"].encode(index)])])
    model = trainer.model
    dummy = DummyImage.of(model, trainer.template)
    dummy.ensure_seen()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    tower = dummy.inner.get_submodule(dummy.towers[0])
    lists = [part for part in dummy.inner.modules() if isinstance(part, torch.nn.ModuleList)]
    for block in [*(block for part in lists for block in part), tower]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        with trainer.media_hook():
            inputs = trainer._prepare_inputs(dict(batch))
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(batch["loss_normaliser"]))
            loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    Path(out, f"loss{rank}").write_text(str(loss.item()))
    dist.barrier()
    dist.destroy_process_group()

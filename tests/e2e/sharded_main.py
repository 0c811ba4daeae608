"""One rank whose weights are sharded by FSDP: `rank` 0 has a pack without images, the other one with."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from adapters import torchvision_shim  # noqa: F401  # before transformers  # isort: skip

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from adapters.dummy_media import always_see
from adapters.packed_dataset import EncodedPack
from adapters.torch_group import OneRank
from app import wiring
from app.preparing import prepare
from core.samples import column


def forked(rank: int, world_size: int, port: int, config: str, out: str) -> None:
    """Train one step on this rank's pack, and write its loss down."""
    torch.set_num_threads(1)
    output = Path(out, f"rank{rank}.log").open("w", buffering=1)  # noqa: SIM115  # lives as long as the process
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    prepared = prepare(wiring.read_config(config), OneRank())
    trainer, images = prepared.trainer, column(prepared.planned["train"].table, "images")
    index = int((images == 0).argmax()) if rank == 0 else int((images > 0).argmax())
    batch = trainer.data_collator([EncodedPack(0, [prepared.samples["train"].encode(index)])])
    model = trainer.model
    always_see(model, trainer.template.processor.image_processor)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    for block in [*model.model.visual.blocks, *model.model.language_model.layers, model.model.visual]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        with trainer.media_hook():
            inputs = trainer._prepare_inputs(dict(batch))
            loss = trainer.compute_loss(model, inputs, num_items_in_batch=torch.tensor(batch["loss_normaliser"]))
            loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    Path(out, f"loss{rank}").write_text(str(loss.item()))
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0)

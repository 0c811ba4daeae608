"""One rank whose weights are sharded by FSDP, which computes a step in two orders of its packs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from packplan.adapters.ranks.torch_group import OneRank
from packplan.adapters.trainer.packed_dataset import EncodedPack
from packplan.adapters.trainer.vision import DummyImage
from packplan.app.sft.prepare import prepare
from packplan.app.wiring import training
from packplan.core.work import assign_steps

RANKS, PACKS_OF_A_RANK = 2, 3


def main(config: str, out: str) -> None:
    """Compute one step as packs come, and by work in equal microbatches; write both down."""
    # The run is prepared by each process as if it were alone; they meet afterwards.
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    given = {name: os.environ.pop(name) for name in names}
    rank = int(given["RANK"])
    prepared = prepare(training.read_config(config), OneRank())
    trainer, planned = prepared.trainer, prepared.planned["train"]
    packs = planned.raw.packs[: RANKS * PACKS_OF_A_RANK]
    works = np.array([sum(int(planned.table[index, 0]) ** 2 for index in pack) for pack in packs])
    encoded = [EncodedPack(0, [prepared.samples["train"].encode(index) for index in pack]) for pack in packs]
    batches = [trainer.data_collator([pack]) for pack in encoded]
    together = torch.tensor(sum(batch["loss_normaliser"] for batch in batches))
    place = f"tcp://127.0.0.1:{given['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    model = trainer.model
    dummy = DummyImage.from_model(model, trainer.template)
    dummy.ensure_seen()  # a pack without images meets one with
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    for block in [*(block for part in lists for block in part), dummy.inner.get_submodule(dummy.towers[0])]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    by_work = assign_steps(works, world_size=RANKS, accumulation=PACKS_OF_A_RANK, meeting="microbatch")
    found = []
    for order in (np.arange(len(batches)), by_work):
        model.zero_grad()
        for position in order[rank::RANKS].tolist():
            with trainer.media_hook():
                inputs = trainer._prepare_inputs(dict(batches[position]))
                trainer.compute_loss(model, inputs, num_items_in_batch=together).backward()
        gradients = {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
        rows = works[order].reshape(PACKS_OF_A_RANK, RANKS)
        waited = int((rows.max(axis=1) - rows.min(axis=1)).sum())
        found.append((order[rank::RANKS].tolist(), waited, gradients))
    torch.save(found, Path(out, f"found{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()

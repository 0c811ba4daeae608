"""Train planned packs with accelerate; see docs/use-it-in/torch.md."""

import sys

import packplan as pp
from packplan.hf import PACK, PackBatches, PackInputs, RowsOfPacks, count_supervised, refuse_other_packs, unpad

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from datasets import load_from_disk
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

accelerator = Accelerator(cpu=not torch.cuda.is_available())
rank, world_size = accelerator.process_index, accelerator.num_processes
rows = load_from_disk(sys.argv[2])
plan = pp.plan([len(ids) for ids in rows["input_ids"]], 256)
packs = RowsOfPacks(rows, plan)
schedule = plan.schedule(world_size=world_size, packs_per_step=4, epochs=2)
batches = PackBatches(schedule, rank, world_size, plan=plan.checksum, data=packs.inspect().digest)
plain = AutoModelForCausalLM.from_pretrained(sys.argv[1]).train()
unpad(plain, logits=False)
model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=1e-3))
loader = DataLoader(packs, batch_sampler=batches, collate_fn=PackInputs())  # not prepared: each rank has its own packs


def epochs():
    while True:
        yield from loader


stream = epochs()
for step in batches.schedule.steps(rank=rank):
    window = [next(stream) for _ in step.batches]
    refuse_other_packs(window, step.batches)
    supervised = torch.tensor(sum(count_supervised(batch["labels"]) for batch in window), device=accelerator.device)
    tokens = accelerator.reduce(supervised).clamp(min=1)
    for batch in window:
        print(f"rank {rank} step {step.number} pack {batch.pop(PACK)}\n", end="", flush=True)
        loss = model(**send_to_device(batch, accelerator.device), num_items_in_batch=tokens).loss
        accelerator.backward(loss * world_size)
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()

"""Train planned packs with Ray Train; see docs/use-it-in/torch.md."""

import os
import sys
import tempfile

import ray
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, get_checkpoint, get_context, report
from ray.train.torch import TorchTrainer, prepare_model


def train(config):
    import packplan as pp
    from packplan.hf import PACK, PackBatches, PackInputs, RowsOfPacks, count_supervised, refuse_other_packs, unpad

    import torch
    from datasets import load_from_disk
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    rank, world_size = get_context().get_world_rank(), get_context().get_world_size()
    rows = load_from_disk(config["rows"])
    plan = pp.plan([len(ids) for ids in rows["input_ids"]], 256)
    packs = RowsOfPacks(rows, plan)
    schedule = plan.schedule(world_size=world_size, packs_per_step=4)
    batches = PackBatches(schedule, rank, world_size, plan=plan.checksum, data=packs.inspect().digest)
    plain = AutoModelForCausalLM.from_pretrained(config["model"]).train()
    unpad(plain, logits=False)
    if (saved := get_checkpoint()) is not None:
        with saved.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        plain.load_state_dict(state["model"])
        batches.load_state_dict(state["batches"])
    model = prepare_model(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    stream = iter(DataLoader(packs, batch_sampler=batches, collate_fn=PackInputs()))
    log = open(os.path.join(config["here"], f"rank{rank}.txt"), "a", buffering=1)
    for step in batches.schedule.steps(rank=rank):
        window = [next(stream) for _ in step.batches]
        refuse_other_packs(window, step.batches)
        tokens = torch.tensor(sum(count_supervised(batch["labels"]) for batch in window))
        torch.distributed.all_reduce(tokens)
        tokens.clamp_(min=1)
        for batch in window:
            print(f"rank {rank} step {step.number} pack {batch.pop(PACK)}", file=log)
            (model(**batch, num_items_in_batch=tokens).loss * world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as folder:
            state = {"model": plain.state_dict(), "batches": batches.state_dict(step=step.number)}
            torch.save(state, os.path.join(folder, "state.pt"))
            report({"tokens": int(tokens)}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    config = {"model": os.path.abspath(sys.argv[1]), "rows": os.path.abspath(sys.argv[2]), "here": os.getcwd()}
    run = RunConfig(storage_path=os.path.abspath("out"), failure_config=FailureConfig(max_failures=1))
    TorchTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2), run_config=run).fit()

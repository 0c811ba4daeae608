"""Train planned packs with Lightning; see docs/use-it-in/torch.md."""

import sys

import packplan as pp
from packplan.hf import PACK, PackBatches, PackInputs, RowsOfPacks, refuse_other_packs, unpad

import torch
from datasets import load_from_disk
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

WINDOW = 2  # packs of a step
rows = load_from_disk(sys.argv[2])
plan = pp.plan([len(ids) for ids in rows["input_ids"]], 256)
packs = RowsOfPacks(rows, plan)
facts = packs.inspect()  # all rows, once
schedule = plan.schedule(packs_per_step=WINDOW, epochs=2)
steps = list(schedule.steps())
tokens = [sum(facts.num_supervised[plan.packs[pack]].sum() for (pack,) in step.batches) for step in steps]
batches = PackBatches(schedule, plan=plan.checksum, data=facts.digest)
checkpoint = "out/last.ckpt" if "--resume" in sys.argv else None
if checkpoint:
    batches.load_state_dict(torch.load(checkpoint, weights_only=False)["batches"])


class Packed(LightningModule):
    """Module that trains packs. The loss of a step is the mean over its supervised tokens."""

    def __init__(self, folder):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(folder).train()
        unpad(self.model, logits=False)

    def training_step(self, batch, index):
        number = self.current_epoch * schedule.steps_per_epoch + index // WINDOW
        refuse_other_packs([batch], [steps[number].batches[index % WINDOW]])
        print(f"rank 0 step {number + 1} pack {batch.pop(PACK)}", flush=True)
        return self.model(**batch, num_items_in_batch=max(1, int(tokens[number]))).loss * WINDOW

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self):
        return DataLoader(packs, batch_sampler=batches, collate_fn=PackInputs())

    def on_save_checkpoint(self, saved):
        saved["batches"] = batches.state_dict(step=self.trainer.global_step)


trainer = Trainer(
    max_epochs=2,
    accumulate_grad_batches=WINDOW,
    use_distributed_sampler=False,
    callbacks=[ModelCheckpoint("out", every_n_train_steps=3, save_last=True)],
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Packed(sys.argv[1]), ckpt_path=checkpoint, weights_only=False)

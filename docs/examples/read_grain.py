"""Read planned packs with grain; see docs/use-it-in/torch.md."""

import json
import os
import sys

import grain
import packplan as pp
from packplan.hf import PACK, RowsOfPacks, flatten

from datasets import load_from_disk


class PlannedPacks(grain.sources.RandomAccessDataSource):
    """Packs of one rank over all epochs."""

    def __init__(self, rows, plan, schedule, rank):
        self.packs = RowsOfPacks(rows, plan)
        self.order = [pack for step in schedule.steps(rank=rank) for (pack,) in step.batches]

    def __len__(self):
        return len(self.order)

    def __getitem__(self, position):
        pack = self.packs[self.order[position]]
        return {PACK: pack.pack, **{name: value.numpy() for name, value in flatten(pack).items()}}


rows = load_from_disk(sys.argv[1])
plan = pp.plan([len(ids) for ids in rows["input_ids"]], 256)
schedule = plan.schedule(world_size=2, packs_per_step=4, epochs=2)
batches = iter(grain.MapDataset.source(PlannedPacks(rows, plan, schedule, rank=0)).to_iter_dataset())
if os.path.exists("state.json"):
    with open("state.json") as file:
        batches.set_state(json.load(file))
for number, batch in enumerate(batches):
    print(f"pack {batch[PACK]} of {batch['input_ids'].size} tokens", flush=True)
    with open("state.json", "w") as file:
        json.dump(batches.get_state(), file)
    if number == int(sys.argv[2]):
        break

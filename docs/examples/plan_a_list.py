"""
Plan a list of lengths, a numpy array and a column of a data set: `python
docs/examples/plan_a_list.py`.

With the folder of a planned run as argument (`runs/demo/run/static_packing/train`), this script
reads the lengths stored there, and makes the same packs with the same checksum.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from datasets import Dataset

from packplan.core.align import align_plan
from packplan.core.batch import resolve_accumulation
from packplan.core.packs import plan_checksum
from packplan.core.lengths import Lengths
from packplan.core.plan import build_raw_plan
from packplan.core.schedule import EpochSchedule

WORLD_SIZE, PACKS_PER_STEP, EPOCHS = 2, 8, 3


def describe(lengths: Lengths, *, packing_length: int) -> str:
    """Describe a plan of these lengths in one line: packs, steps and checksum."""
    plan = build_raw_plan(lengths, packing_length=packing_length)
    aligned = align_plan(plan, world_size=WORLD_SIZE, dataloader_drop_last=False)
    accumulation = resolve_accumulation(
        effective_batch_size=PACKS_PER_STEP,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=None,
        world_size=WORLD_SIZE,
    ).gradient_accumulation_steps
    schedule = EpochSchedule.from_plan(aligned, gradient_accumulation_steps=accumulation, num_train_epochs=EPOCHS)
    return (
        f"{plan.planned_samples:,} of {plan.num_samples:,} samples in {len(plan.packs):,} packs "
        f"(no plan has fewer than {plan.lower_bound:,}), fill {plan.fill:.4f}; on {WORLD_SIZE} ranks "
        f"{schedule.steps_per_epoch} steps "
        f"per epoch, {schedule.total_steps} in total, {aligned.pad_needed} packs repeated; checksum "
        f"{plan_checksum(plan.packs)[:12]}"
    )


def stored_lengths(folder: Path) -> tuple[np.ndarray, int]:
    """Return the lengths that a run measured, and its packing length."""
    columns = json.loads((folder / "lengths.json").read_text())["samples"]["columns"]
    table = np.fromfile(folder / "lengths.bin", dtype="<i4").reshape(-1, len(columns))
    return table[:, columns.index("length")], json.loads((folder / "raw_plan.json").read_text())["packing_length"]


def main(arguments: list[str]) -> None:
    """Describe the same plan, made from lengths of three types."""
    if arguments:
        array, packing_length = stored_lengths(Path(arguments[0]))
    else:
        array, packing_length = np.random.default_rng(0).geometric(1 / 200, 1000), 1024
    for kind, lengths in {
        "a list": array.tolist(),
        "a numpy array": array,
        "a column of a data set": Dataset.from_dict({"length": array})["length"],
    }.items():
        print(f"{kind}: {describe(lengths, packing_length=packing_length)}")


if __name__ == "__main__":
    main(sys.argv[1:])

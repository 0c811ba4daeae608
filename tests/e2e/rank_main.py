"""
Runs `packplan sft` as one rank, and writes down what the rank saw: `rank_main.py run.yaml
out_folder [fault]`.

A fault, on one rank alone: `measure` fails measuring on rank 0. `gradients` writes each step's
gradients down, and silences the records that say so. `infinite` adds infinity to the loss of rank
1's second step.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packplan.adapters.progress import loading_libraries
from packplan.app import sft
from packplan.app.cli.command import run_command

with loading_libraries():
    import torch

    from packplan.adapters.samples.measurer import SwiftMeasurer
    from packplan.adapters.trainer import packed_dataset
    from packplan.app.sft import prepare
    from packplan.app.wiring import training
    from tests.e2e.alone import Gradients, silence


def main(config: str, out: str, fault: str = "") -> int:
    """Return the exit status."""
    fetched: list[int] = []
    plain = packed_dataset.PackedDataset.__getitem__

    def noted(dataset, position):
        if dataset.planned is trained.get("table"):
            fetched.append(position)
        return plain(dataset, position)

    trained: dict[str, object] = {}
    gradients = Gradients()
    built = prepare.build_trainer

    def build_trainer(*args, planned, **kwargs):
        trained["table"] = planned["train"].table
        trainer = built(*args, planned=planned, **kwargs)
        if fault == "gradients":
            trainer.add_callback(gradients)
        if fault == "infinite" and trainer.group.rank == 1:
            loss = trainer.compute_loss
            trainer.compute_loss = lambda *a, **k: loss(*a, **k) + (math.inf if trainer.state.global_step else 0)
        return trainer

    def command() -> None:
        packed_dataset.PackedDataset.__getitem__ = noted
        SwiftMeasurer.measure_elsewhere = measure_here
        prepare.build_trainer = build_trainer
        if fault == "gradients":
            silence()
        if fault == "measure":
            SwiftMeasurer.measure = _fail
        run = training.read_config(config)
        with training.joined_ranks(run) as group:
            result = sft.run(run, group)
        plan = result.planned["train"]
        seen = {
            "rank": group.rank, "fetched": fetched, "steps": result.num_steps,
            "planned_steps": result.schedule.total_steps,
            "raw": plan.raw_checksum, "aligned": plan.checksum, "num_aligned": len(plan.aligned.packs),
            "num_raw": len(plan.raw.packs), "raw_packs": plan.raw.packs.tolist(), "repeated": plan.aligned.repeated,
            "history": result.history, "terminated": result.terminated,
        }  # fmt: skip
        Path(out, f"rank{group.rank}.json").write_text(json.dumps(seen))
        if fault == "gradients":
            torch.save(gradients.steps, Path(out, f"gradients{group.rank}.pt"))

    return run_command(command, verbose=False)


def measure_here(samples: SwiftMeasurer, indices: Sequence[int], *, epoch: int) -> list[Any]:  # its name
    """Encode samples again in this process: to fork it for that takes 0.1 s."""
    return [samples.encoded(index) for index in indices]


def _fail(*_):
    raise ZeroDivisionError("planted")


def seen(out: Path, world_size: int) -> list[dict[str, Any]]:
    """Return what each rank wrote down."""
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world_size)]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

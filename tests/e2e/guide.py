"""
Runs the code of `docs/transformers-trainer.md` as it stands there, and writes down what each rank
saw.

`python -m tests.e2e.guide cases.json`; in a process of its own, since ms-swift changes transformers
where it is imported.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

from packplan.adapters.progress import loading_libraries
from tests.network import free_port

with loading_libraries():
    import torch
    from transformers import Trainer, TrainerCallback

    for _name in ("torch._dynamo", "transformers.models.qwen2.modeling_qwen2", "transformers.data.data_collator",
                  "packplan.core.align", "packplan.core.batch", "packplan.core.plan",
                  "packplan.core.schedule"):  # fmt: skip
        importlib.import_module(_name)  # what the page imports, once for all its processes


class Weights(TrainerCallback):
    """Keeps the weights as they are before each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args, state, control, *, model, **kwargs):
        plain = getattr(model, "module", model)
        self.steps.append({name: weight.detach().clone() for name, weight in plain.state_dict().items()})


def run(page: str, rows: list[dict[str, list[int]]], model: str, out: Path) -> tuple[dict[str, Any], Weights]:
    """Execute the page's blocks of Python, one after the other."""
    planning, building, training, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    weights, fetched = Weights(), []
    names: dict[str, Any] = {"rows": rows, "model": model, "output_dir": str(out), "__name__": "guide"}
    exec(planning, names)  # noqa: S102  # the guide's own code
    exec(building, names)  # noqa: S102
    packed, trainer = names["PackedRows"], names["trainer"]
    assert type(trainer) is Trainer
    plain = packed.__getitem__
    packed.__getitem__ = lambda dataset, position: fetched.append(position) or plain(dataset, position)
    trainer.add_callback(weights)
    exec(training, names)  # noqa: S102
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    packs, window = names["aligned"].packs.tolist(), names["accumulation"]
    return {"packs": packs, "accumulation": window, "fetched": fetched, "losses": losses}, weights


def be_rank(rank: int, world_size: int, port: int, case: dict[str, Any]) -> None:
    """Run one case as one rank."""
    out = Path(case["out"])
    if world_size > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="1",
        )  # fmt: skip
    seen, weights = run(case["page"], case["rows"], case["model"], out)
    torch.save(weights.steps, out / f"weights{rank}.pt")
    (out / f"rank{rank}.json").write_text(json.dumps(seen))
    if world_size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main(cases: str) -> int:
    """Run the cases of a file, each in processes of its own; return how many processes failed."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    failed = 0
    for case in json.loads(Path(cases).read_text()):
        world_size, port = case["world_size"], free_port()
        ranks = [context.Process(target=be_rank, args=(rank, world_size, port, case)) for rank in range(world_size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            failed += bool(rank.exitcode)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The policy of docs/examples/, trained on the workers that are given."""

import types
from pathlib import Path

import numpy as np
import torch

from packplan.adapters.microbatches import BatchedData

CODE = Path(__file__).parents[2] / "docs" / "examples" / "policy.py"

LENGTHS = [9, 41, 5, 30, 2, 17, 61, 8, 12, 25, 33]


def shown() -> types.ModuleType:
    """Return the file as a module that is sent to actors by value."""
    module = types.ModuleType("page_policy")
    exec(compile(CODE.read_text(), CODE.name, "exec"), module.__dict__)  # noqa: S102  # our own
    return module


def trained(workers) -> list[float]:
    """Return the losses of two steps."""
    drawn = torch.Generator().manual_seed(3)
    inside = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    fields = {
        "input_ids": torch.randint(20, 400, inside.shape, generator=drawn) * inside,
        "token_mask": inside.float(),
        "advantages": torch.randn(len(LENGTHS), generator=drawn),
    }
    batch = BatchedData.from_fields(fields, lengths=LENGTHS)
    return [shown().train(workers, batch) for _ in range(2)]


def main(folder: str, out: str) -> None:
    """Train as one rank; each writes its losses."""
    workers = shown().on_ranks(folder)
    losses = trained(workers)
    np.save(Path(out, f"{workers._group.rank}.npy"), losses)

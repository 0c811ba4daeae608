"""The policy that docs/rl.md shows, trained on the workers that are given."""

import re
import types
from pathlib import Path

import numpy as np
import torch

from packplan.adapters.microbatches import BatchedData

PAGE = Path(__file__).parents[2] / "docs" / "rl.md"

LENGTHS = [9, 41, 5, 30, 2, 17, 61, 8, 12, 25, 33]


def shown() -> types.ModuleType:
    """Return the page's file as a module that is sent to actors by value."""
    (code,) = (block for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
               if block.startswith("# policy.py"))  # fmt: skip
    module = types.ModuleType("page_policy")
    exec(compile(code, PAGE.name, "exec"), module.__dict__)  # noqa: S102  # the page's own code
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

"""
A value head: what a policy expects an answer to be rewarded, at each of its tokens.

It reads what the policy's layer of logits reads, and so works on any row that the policy does. It
starts at 0, and is a part of the policy's module, so it is trained, sharded and kept with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_NAME = "value_head"


class ValueHead:
    """Value head of a policy, with its values in the latest forward pass."""

    def __init__(self, model: Any) -> None:
        """Add the head to a model of transformers, before its weights are sharded."""
        logits = model.get_output_embeddings()
        head = torch.nn.Linear(logits.in_features, 1, dtype=logits.weight.dtype, device=logits.weight.device)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        model.add_module(_NAME, head)
        logits.register_forward_pre_hook(self._note)
        self._head, self._values = head, torch.empty(0)

    @property
    def values(self) -> Tensor:
        """Value at each position of the latest forward pass; float32, shape (1, positions)."""
        return self._values.float().reshape(1, -1)

    def _note(self, _: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        # Within the model's own pass, while FSDP holds all of the weights.
        self._values = self._head(given[0])


def split_state(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of the policy, and those of its value head, if it has one."""
    own = {name: weight for name, weight in state.items() if _NAME not in name}
    return own, {name.rpartition(".")[2]: weight for name, weight in state.items() if _NAME in name}


def save_head(folder: Path, state: dict[str, Tensor]) -> None:
    """Write the weights of a value head beside those of its policy."""
    save_file(state, folder / f"{_NAME}.safetensors")

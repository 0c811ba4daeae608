"""Rows of a trainer's batch, taken apart and joined to other batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.nn.functional import pad

from packplan.core.errors import ArgumentError

Unit = dict[str, Any]
"""Part of a batch for one row, or one pair of rows: tensors of shape (rows of the unit, …)."""

_KEYS = frozenset(
    {
        "input_ids", "attention_mask", "labels", "completion_mask", "token_type_ids", "margin", "label",
        "ref_chosen_logps", "ref_rejected_logps", "ref_logps",
    }
)  # fmt: skip
"""Keys of a batch without answers. How others are cut by rows is not known."""

_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Keys with a prompt and its answer side by side."""

_BY_TOKEN = ("completion_ids", "completion_mask", "tool_mask", "importance_sampling_ratio", "advantages")


@attrs.frozen
class Counts:
    """Numbers of a batch, by which means over it are weighed."""

    rows: float
    """Rows, or pairs of rows."""

    tokens: float
    """Tokens that the loss learns."""

    attended: float
    """Tokens that are no padding."""

    chosen_tokens: float = 0
    rejected_tokens: float = 0
    chosen: float = 0
    rejected: float = 0


@attrs.frozen
class Taken:
    """A batch, taken apart."""

    units: list[Unit]
    tokens: list[int]
    """Tokens of each unit that are no padding."""

    widths: list[int]
    """Positions of each unit without padding after its end; of answers, without their prompt."""

    prompt: int
    """Positions of the prompts of answers; 0 for other batches."""


@attrs.frozen
class RowLayout:
    """How the rows of a trainer's batches are laid out."""

    answers: bool
    """Whether a row is a prompt, padded left, and an answer, padded right, as in GRPO and RLOO."""

    pairs: bool
    """Whether a batch has the chosen rows first, and then the rejected ones."""

    pad_token_id: int

    def take_apart(self, batch: Mapping[str, Any]) -> Taken:
        """
        Return the rows of a batch, or its pairs of rows (chosen and rejected), without padding
        after their end.

        Padding before them stays, since it decides positions.

        Raises:
            ArgumentError: The batch has something that is not cut by rows.
        """
        if self.answers:
            from trl.trainer.utils import split_pixel_values_by_grid

            batch = split_pixel_values_by_grid(dict(batch))
        elif unknown := sorted(set(batch) - _KEYS) or ["no attention_mask"] * ("attention_mask" not in batch):
            fact = f"the trainer's batch has {', '.join(unknown)}: unpad alone serves it"
            raise ArgumentError("host", fact, {"unknown": unknown})
        each, masks = 1 + self.pairs, [batch[name] for name in self.masks]
        num, prompt = len(masks[0]) // each, masks[0].shape[1] if self.answers else 0
        real = masks[-1].reshape(each, num, -1).any(0)
        width = real.shape[1]
        stops = torch.where(real.any(1), width - real.flip(1).int().argmax(1), 1).tolist()
        units = []
        for index, stop in enumerate(stops):
            unit = {key: value if _is_shared(value) else value[index::num] for key, value in batch.items()}
            for key, rows in unit.items():
                if self._has_columns(key, rows) and rows.shape[1] in (width, prompt + width):
                    unit[key] = rows[:, : rows.shape[1] - width + stop] if not key.startswith("prompt_") else rows
            units.append(unit)
        tokens = sum(mask.reshape(each, num, -1).sum((0, 2)) for mask in masks).tolist()
        return Taken(units, tokens, [each * stop for stop in stops], prompt)

    def join(self, units: Sequence[Unit]) -> dict[str, Any]:
        """Return a batch of units, padded to the longest."""
        prompts = [unit["prompt_mask"].shape[1] if self.answers else 0 for unit in units]
        batch: dict[str, Any] = {}
        for key, first in units[0].items():
            values = [unit[key] for unit in units]
            if isinstance(first, list):
                batch[key] = [one for value in values for one in value]
                continue
            if self._has_columns(key, first):
                leads = [(max(prompts) - own) * key.startswith(("prompt_", *_TYPES)) for own in prompts]
                width = max(value.shape[1] + lead for value, lead in zip(values, leads, strict=True))
                values = [
                    pad(value, (lead, width - value.shape[1] - lead), value=self._filler(key))
                    for value, lead in zip(values, leads, strict=True)
                ]
            batch[key] = first if _is_shared(first) else torch.stack(values).transpose(0, 1).flatten(0, 1)
        if self.answers:
            from trl.trainer.utils import unsplit_pixel_values_by_grid

            batch = unsplit_pixel_values_by_grid(batch)
        return batch

    @property
    def masks(self) -> tuple[str, ...]:
        """Names of the masks that together say which positions are no padding."""
        return ("prompt_mask", "completion_mask") if self.answers else ("attention_mask",)

    def _has_columns(self, key: str, value: Any) -> bool:
        """Return whether a value has a column for each position."""
        known = key.startswith(("prompt_", *_TYPES)) or key in _BY_TOKEN or key.endswith("per_token_logps")
        return isinstance(value, torch.Tensor) and value.dim() > 1 and (known or not self.answers)

    def _filler(self, key: str) -> int:
        if key in ("input_ids", "prompt_ids", "completion_ids"):
            return self.pad_token_id
        return {"labels": -100, "importance_sampling_ratio": 1}.get(key, 0)

    def count(self, batch: Mapping[str, Any]) -> Counts:
        """Return the numbers of a batch."""
        masks = [batch[name] for name in self.masks]
        attended, learned = sum(mask.sum() for mask in masks), batch.get("completion_mask", masks[0])
        if self.answers:
            by_row = (learned if batch.get("tool_mask") is None else learned * batch["tool_mask"]).sum(1)
        else:
            by_row = (batch["labels"] != -100 if "labels" in batch else learned)[:, 1:].sum(1)
        num = len(by_row) // (1 + self.pairs)
        chosen = batch["label"].bool() if "label" in batch else torch.arange(len(by_row), device=by_row.device) < num
        found = [by_row.sum(), attended, by_row[chosen].sum(), by_row[~chosen].sum(), chosen.sum(), (~chosen).sum()]
        return Counts(num, *torch.stack(found).tolist())


def _is_shared(value: Any) -> bool:
    """Return whether a value of a batch is one for all rows."""
    return value is None or getattr(value, "ndim", 1) == 0

"""
Conversion of TRL's batches of prompts and answers into rows (`split_batch`) and back (`join_rows`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.nn.functional import pad

from packplan.adapters.loaders.rows import TYPE_COLUMNS

Row = dict[str, Any]
"""One row of a batch by key: tensors of shape (1, …), lists of one element, or shared scalars."""

_BY_TOKEN = ("completion_ids", "completion_mask", "tool_mask", "importance_sampling_ratio", "advantages")
"""Keys that may have a value for each token of an answer."""


@attrs.frozen
class BatchCounts:
    """Numbers of rows and tokens of a batch, by which its loss and logged means are weighted."""

    rows: float
    tokens: float
    """Supervised tokens."""

    attended: float
    """Tokens of prompts and answers, without padding."""

    @classmethod
    def from_batch(cls, batch: Mapping[str, Any]) -> "BatchCounts":
        """Count the rows and tokens of a batch."""
        answers, tools = batch["completion_mask"], batch.get("tool_mask")
        supervised = answers if tools is None else answers * tools
        attended = batch["prompt_mask"].sum() + answers.sum()
        return cls(len(answers), *torch.stack([supervised.sum(), attended]).tolist())


@attrs.frozen
class BatchRows:
    """Rows of a batch, with the number of tokens and the width of each row."""

    rows: list[Row]
    tokens: list[int]
    """Number of tokens of each row, without padding."""

    answer_widths: list[int]
    """Number of positions of each row's answer, without the padding after it."""

    prompt_width: int
    """Number of positions of each prompt, padding included."""


def split_batch(batch: Mapping[str, Any]) -> BatchRows:
    """
    Return the rows of a batch, each without the padding after its answer.

    A row is a prompt, padded left, and an answer, padded right. The padding before a prompt is
    kept, since position ids depend on it.
    """
    from trl.trainer.utils import split_pixel_values_by_grid

    batch = split_pixel_values_by_grid(dict(batch))
    prompts, answers = batch["prompt_mask"], batch["completion_mask"]
    prompt, width = prompts.shape[1], answers.shape[1]
    stops = torch.where(answers.any(1), width - answers.flip(1).int().argmax(1), 1).tolist()
    rows = []
    for index, stop in enumerate(stops):
        row = {key: value if _is_shared(value) else value[index : index + 1] for key, value in batch.items()}
        for key, value in row.items():
            if _has_columns(key, value) and not key.startswith("prompt_") and value.shape[1] in {width, prompt + width}:
                row[key] = value[:, : value.shape[1] - width + stop]
        rows.append(row)
    return BatchRows(rows, (prompts.sum(1) + answers.sum(1)).tolist(), stops, prompt)


def join_rows(rows: Sequence[Row], *, pad_token_id: int) -> dict[str, Any]:
    """Join rows into a batch, padded to the longest prompt and answer."""
    from trl.trainer.utils import unsplit_pixel_values_by_grid

    prompts = [row["prompt_mask"].shape[1] for row in rows]
    batch: dict[str, Any] = {}
    for key, first in rows[0].items():
        values = [row[key] for row in rows]
        if isinstance(first, list):
            batch[key] = [one for value in values for one in value]
            continue
        if _has_columns(key, first):
            leads = [(max(prompts) - own) * key.startswith(("prompt_", *TYPE_COLUMNS)) for own in prompts]
            width = max(value.shape[1] + lead for value, lead in zip(values, leads, strict=True))
            filler = (
                pad_token_id if key in {"prompt_ids", "completion_ids"} else int(key == "importance_sampling_ratio")
            )
            values = [
                pad(value, (lead, width - value.shape[1] - lead), value=filler)
                for value, lead in zip(values, leads, strict=True)
            ]
        batch[key] = first if _is_shared(first) else torch.cat(values)
    return unsplit_pixel_values_by_grid(batch)  # type: ignore[no-any-return]  # has no types


def _has_columns(key: str, value: Any) -> bool:
    """Return whether a value of a batch is a tensor of shape (rows, positions, …)."""
    known = key.startswith(("prompt_", *TYPE_COLUMNS)) or key in _BY_TOKEN or key.endswith("per_token_logps")
    return isinstance(value, torch.Tensor) and value.dim() > 1 and known


def _is_shared(value: Any) -> bool:
    """
    Return whether a value applies to all rows of a batch: it is None or a zero-dimensional tensor.
    """
    return value is None or getattr(value, "ndim", 1) == 0
